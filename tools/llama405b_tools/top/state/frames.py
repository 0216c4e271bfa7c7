"""A sampler's frame, as types: what a host says of itself and of the run, every few seconds. Pure.

Counters are as the machine counts them, and nvidia-smi's text as it comes. ``contract.reader`` refuses a frame that is malformed;
heartbeats and metrics that are, are left out of it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated

from llama405b.contract.reader import SoundOnly
from llama405b.contract.records import NodeStatus
from llama405b_tools.remote.messages.status import Beat

Nodes = tuple[tuple[str, int, int], ...]  # of a run: name, first rank, ranks
Processes = tuple[tuple[int, str, int, int, str, str], ...]  # pid, state, ticks, bytes, rank, command


@dataclasses.dataclass(frozen=True, slots=True)
class Cpu:
    """Clock ticks since boot, over all cores."""

    total: int
    idle: int
    cores: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Ram:
    """Bytes, and processes killed for want of them since boot."""

    total: int | None
    available: int | None
    oom_kills: int | None

    @property
    def used(self) -> int | None:
        """Bytes."""
        return None if self.total is None or self.available is None else self.total - self.available


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
        """As the kernel and NCCL write it."""
        return f"{self.device}/{self.port}"


@dataclasses.dataclass(frozen=True, slots=True)
class SmiFrame:
    """nvidia-smi's newest answer, and for how long there has been none to the last question."""

    text: str | None
    hung_s: float
    fields: tuple[str, ...] = ()
    apps: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step of training, by whatever trainer: what it does not tell is None."""

    step: int
    loss: float
    step_s: float
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_token: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunFrame:
    """What a host says of the run."""

    name: str
    created: float
    attempt: int
    alive: bool
    status: Annotated[NodeStatus | None, SoundOnly]
    beats: Annotated[tuple[Beat, ...], SoundOnly]
    log_age_s: float | None  # since the last line of any rank here
    net: str  # what NCCL said that it takes: IB, EFA, SOCKET; "": nothing yet
    others: tuple[str, ...] = ()  # other runs that live here
    nodes: Nodes | None = None  # only where the plan is new
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)  # with ``nodes``: NCCL's settings here
    metrics: Annotated[tuple[StepMetrics, ...], SoundOnly] = ()  # only the head's
    max_steps: int | None = None
    checkpoint_step: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One host at one moment."""

    now: float  # host's clock, seconds since the epoch
    machine: str
    pci_gpus: int | None  # None: its files are here, but it is another machine
    cpu: Cpu
    memory: Ram
    disks: tuple[tuple[str, int, int], ...]  # where the run writes: path, bytes free, bytes
    net: Mapping[str, tuple[int, int]]  # interface -> bytes received, sent
    ib: tuple[IbPort, ...]
    kernel: tuple[str, ...] | None  # new lines about GPUs and memory; None: they may not be read
    smi: SmiFrame
    run: RunFrame | None
    cwd: str = ""
    own: tuple[float, int] | None = None  # the sampler's CPU seconds (without nvidia-smi's) and most resident bytes
    procs: Processes | None = None  # None: as before


NO_FRAME = Frame(0.0, "", None, Cpu(0, 0, None), Ram(None, None, None), (), {}, (), None, SmiFrame(None, 0.0), None)
