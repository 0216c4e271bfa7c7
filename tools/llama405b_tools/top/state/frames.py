"""The types of a sampler's frame: a host's report about itself and the run, every few seconds. Pure.

Counters and nvidia-smi's text are raw. ``contract.reader`` refuses malformed frames, but only drops malformed heartbeats and
metrics.
"""

import dataclasses
import re
from collections.abc import Mapping

from llama405b.contract.reader import SoundOnly
from llama405b.contract.records import FailureRecord, GuardState, NodeStatus
from llama405b.settings.axes import Axes
from llama405b_tools.agent.messages import RankHeartbeat

PORT_RATE = re.compile(r"\s*(\d{1,6}(?:\.\d{1,3})?)", re.ASCII)  # of a port
Nodes = tuple[tuple[str, int, int], ...]  # of a run: name, first rank, number of ranks
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
class StepMetrics:
    """One training step, by any trainer; values it does not report are None."""

    step: int
    loss: SoundOnly[float | None] = None  # None: not a finite number
    step_s: float | None = None  # None: no step was taken, only an evaluation made
    time: float | None = None  # the clock of the host that writes them
    attempt: int = 0  # the launch of the run that took the step; 0: unknown
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    update_s: float | None = None  # of updates on the CPU since the step before
    exposed_s: float | None = None  # of them, and of the norm: what the step waited for
    update_bytes: int | None = None  # that these updates moved in rank 0's CPU memory
    down_bytes: int | None = None  # of rank 0's gradients to CPU memory
    up_bytes: int | None = None  # of rank 0's weights from there
    tokens_per_s: float | None = None  # trained on
    all_tokens_per_s: float | None = None  # also those that are only read; None or 0: an earlier version's
    flops_per_token: float | None = None
    num_alloc_retries: int | None = None  # of rank 0's allocator so far in this attempt, for want of GPU memory
    evaluation_loss: SoundOnly[float | None] = None  # on data that is not trained on, after this step

    @property
    def rate(self) -> float | None:
        """Tokens per second as the plan counts them: all of the step's."""
        return self.all_tokens_per_s or self.tokens_per_s

    def __post_init__(self) -> None:
        """Refuse negative values."""
        times = (
            self.step_s,
            self.data_s,
            self.forward_s,
            self.backward_s,
            self.optimizer_s,
            self.update_s,
            self.exposed_s,
            self.update_bytes,
            self.down_bytes,
            self.up_bytes,
            self.num_alloc_retries,
            self.all_tokens_per_s,
        )
        if min(filter(None, (self.step, *times, self.tokens_per_s, self.flops_per_token)), default=0) < 0:
            raise ValueError


@dataclasses.dataclass(frozen=True, slots=True)
class RunFrame:
    """What a host reports about the run.

    ``usual_s``: by ``Phase``, the seconds in the median that this run's took before; the trainer records only saves, so only
    ``checkpoint`` is there, from the beginning of a save. ``run_created``: when this host first ran the run, whatever the
    attempt, by the clock of the file system that has the run's directory (the host's, or its file server's), in seconds since
    the epoch; None if it never has.
    """

    name: str
    created: float
    attempt: int
    alive: bool
    status: SoundOnly[NodeStatus | None]
    beats: SoundOnly[tuple[RankHeartbeat, ...]]
    log_age_s: float | None  # since the last line of any rank on this host
    net: str  # the transport NCCL reported: IB, EFA, SOCKET; "": none yet
    blame: SoundOnly[FailureRecord | None] = None  # on the last attempt that failed
    guard: SoundOnly[GuardState | None] = None  # as this host last heard from it
    others: tuple[str, ...] = ()  # other live runs on this host
    nodes: Nodes | None = None  # only if the plan is new
    trains: bool = True  # with ``nodes``: whether it runs our trainer, which writes heartbeats
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)  # with ``nodes``: NCCL's settings on this host
    expected_step_s: float = 0.0  # with ``nodes``: as predicted; 0: nothing is
    load_s: float = 0.0  # with ``nodes``: timeouts.load; 0: unknown
    mesh: SoundOnly[Axes | None] = None  # with ``nodes``: of the ranks
    metrics: SoundOnly[tuple[StepMetrics, ...]] = ()  # only from the head
    max_steps: int | None = None  # only from the head
    unsaved: str = ""  # only from the head: why the newest save failed
    unsent: str = ""  # only from the head: where the command after a save fails, and why
    usual_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # only from the head
    checkpoint_step: int | None = None  # the newest in the directory of checkpoints; None: there is none
    copied_step: int | None = None  # the newest of which the next host has this one's part; None: nothing is copied
    run_created: float | None = None


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

    def __post_init__(self) -> None:
        """Refuse times without lines."""
        if self.kernel_times and len(self.kernel_times) != len(self.kernel or ()):
            raise ValueError


NO_FRAME = HostFrame(0.0, "", None, Cpu(0, 0, None), Ram(None, None, None), (), {}, (), None, SmiFrame(None, 0.0), None)
