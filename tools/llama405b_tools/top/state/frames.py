"""The types of a sampler's frame: a host's report about itself and the run, every few seconds. Pure.

Counters and nvidia-smi's text are raw. ``contract.reader`` refuses malformed frames, but only drops malformed heartbeats and
metrics.
"""

import dataclasses
import re
from collections.abc import Mapping

from llama405b_tools.agent.messages import RunFrame

PORT_RATE = re.compile(r"\s*(\d{1,6}(?:\.\d{1,3})?)", re.ASCII)  # of a port
Processes = tuple[tuple[int, str, int, int, str, str], ...]  # pid, state, ticks, bytes, rank, command


@dataclasses.dataclass(frozen=True, slots=True)
class Cpu:
    """Clock ticks since boot, over all cores."""

    total: int
    idle: int
    cores: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Ram:
    """Bytes, and processes killed for lack of memory since boot."""

    total: int | None
    available: int | None
    oom_kills: int | None

    @property
    def used(self) -> int | None:
        """Bytes in use."""
        if self.total is None or self.available is None or not 0 <= self.available <= self.total:
            return None
        return self.total - self.available


@dataclasses.dataclass(frozen=True, slots=True)
class IbPort:
    """A port of an RDMA device."""

    device: str
    port: str
    state: str
    rate: str
    counters: Mapping[str, int]

    @property
    def name(self) -> str:
        """The name, as the kernel and NCCL write it."""
        return f"{self.device}/{self.port}"

    @property
    def gbit_per_s(self) -> float:
        """The rate, such as ``400 Gb/sec (4X NDR)``, in Gb/s; 0 if it cannot be read."""
        match = PORT_RATE.match(self.rate)
        return float(match[1]) if match else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class SmiFrame:
    """nvidia-smi's newest output, and how long the current query has been waiting."""

    text: str | None
    hung_s: float
    fields: tuple[str, ...] = ()
    apps: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HostFrame:
    """One host at one moment.

    ``kernel_times``: when each line of ``kernel`` was logged, seconds since the epoch by the host's clock; () in recordings of
    before. The first frame of a sampler has this boot's lines from before it began.

    ``foreign``: processes on the GPUs that are not of the run: pid, user (a number if it has no name here), command. Both are ""
    if nothing is known of the pid: it has just ended, or belongs to another pid namespace, as it may if one of both is a
    container. ``io``: bytes that each process that has a rank has read and written so far; without those of which the kernel
    does not tell. Both None: unchanged.
    """

    now: float  # host's clock, seconds since the epoch
    machine: str
    pci_gpus: int | None  # None: the sampler has the host's files but runs on another machine
    cpu: Cpu
    memory: Ram
    disks: tuple[tuple[str, int, int], ...]  # where the run writes: path, bytes free, bytes in total
    net: Mapping[str, tuple[int, int]]  # interface -> bytes received, sent
    ib: tuple[IbPort, ...]
    kernel: tuple[str, ...] | None  # new lines about GPUs and memory; None: not readable
    smi: SmiFrame
    run: RunFrame | None
    runs: tuple[str, ...] = ()  # if it does not have the run that was requested: those it has, the newest first
    cwd: str = ""
    own: tuple[float, int] | None = None  # the sampler's CPU seconds (without nvidia-smi) and peak resident bytes
    procs: Processes | None = None  # None: unchanged
    kernel_times: tuple[float, ...] = ()
    foreign: tuple[tuple[int, str, str], ...] | None = None
    io: tuple[tuple[int, int], ...] | None = None
    slots: int = 0  # of it in the hosts file; 0: unknown
    run_fault: str = ""  # why its runs are unknown: no agent can run there

    def __post_init__(self) -> None:
        """Refuse times without lines."""
        if self.kernel_times and len(self.kernel_times) != len(self.kernel or ()):
            raise ValueError


NO_FRAME = HostFrame(0.0, "", None, Cpu(0, 0, None), Ram(None, None, None), (), {}, (), None, SmiFrame(None, 0.0), None)
