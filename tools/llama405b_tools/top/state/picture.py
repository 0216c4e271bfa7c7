"""What cluster-top knows at one moment, as values: what the screen draws, and what ``--json`` prints. Pure.

``None`` is unknown (a dash on screen), never 0. Times are seconds; ages count from the moment of the picture.
"""

import dataclasses
import enum
from collections.abc import Iterable
from typing import TypeVar

from llama405b_tools.text.figures import share

T = TypeVar("T")


def known(values: Iterable[T | None]) -> list[T]:
    """Without those that are not known."""
    return [value for value in values if value is not None]


class HostState(enum.StrEnum):
    """What a host is in, worst first."""

    HUNG = "HUNG"  # its rank is the one the others wait for
    FAILED = "FAILED"
    DOWN = "DOWN"  # no connection
    AUTH = "AUTH"
    REFUSED = "REFUSED"
    TIMEOUT = "TIMEOUT"
    STALE = "STALE"  # a connection, and no frames
    SMI_HUNG = "SMI-HUNG"
    NO_DRIVER = "NO-DRIVER"
    OK = "OK"
    CONNECTING = "CONNECTING"


LINK_STATES = (HostState.AUTH, HostState.REFUSED, HostState.TIMEOUT, HostState.DOWN)  # of its connection
SEVERITY = {
    **dict.fromkeys((HostState.HUNG, HostState.FAILED, *LINK_STATES), 2),
    **dict.fromkeys((HostState.STALE, HostState.SMI_HUNG, HostState.NO_DRIVER), 1),
    **dict.fromkeys((HostState.OK, HostState.CONNECTING), 0),
}


class RunPhase(enum.StrEnum):
    """What the run as a whole does."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    TRAIN = "TRAIN"
    EVAL = "EVAL"
    CKPT = "CKPT"
    HUNG = "HUNG"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    DONE = "DONE"
    UNKNOWN = "UNKNOWN"  # not all its hosts are heard


OVER = (RunPhase.STOPPED, RunPhase.DONE, RunPhase.FAILED)


class Verdict(enum.StrEnum):
    """The one word for the whole."""

    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    CONNECTING = "CONNECTING"
    HUNG = "HUNG"
    FAILED = "FAILED"
    DOWN = "DOWN"

    @property
    def exit_code(self) -> int:
        """What says it to a script."""
        return {Verdict.HEALTHY: 0, Verdict.DEGRADED: 1, Verdict.CONNECTING: 1}.get(self, 3)


class GuardShown(enum.StrEnum):
    """What the guard on this machine does."""

    NONE = ""  # there is none here
    WATCHING = "watching"
    RECOVERING = "recovering"
    ENDED = "ended"
    STOPPED = "stopped"
    GAVE_UP = "gave up"
    GONE = "GONE"  # it died while the run needed it


@dataclasses.dataclass(frozen=True, slots=True)
class GpuCell:
    """One GPU of a host."""

    index: int
    name: str
    utilization: int | None  # percent of time in which a kernel ran
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    clock_mhz: int | None
    used_mib: int | None
    memory_mib: int | None
    rank: int | None  # that computes on it
    odd: str = ""  # why it stands out; "": it does not

    @property
    def power_pct(self) -> float | None:
        """Power in percent of its limit."""
        return share(self.power_w, self.power_limit_w)


@dataclasses.dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, as its heartbeat says."""

    rank: int
    pid: int
    phase: str
    step: int
    age_s: float  # of the heartbeat
    state: str  # of the process, as the kernel writes it: R, S, D, T, Z; "": gone
    done_bytes: int
    total_bytes: int
    data_s: float | None = None  # of its last step: until it had its batch
    optimizer_s: float | None = None  # and clipping and the update


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process of the run on a host."""

    pid: int
    state: str
    cpu_pct: float | None  # of one core
    rss_bytes: int
    rank: int | None
    gpu: int | None
    gpu_mib: int | None
    command: str


@dataclasses.dataclass(frozen=True, slots=True)
class HostRow:
    """One host."""

    name: str
    state: HostState
    why: str  # of a state that is not OK
    age_s: float | None  # since the last frame
    gpus: tuple[GpuCell, ...] = ()
    has_gpu: bool | None = None  # None: nobody asked the machine
    ranks: tuple[RankRow, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    cpu_pct: float | None = None
    cores: int | None = None
    ram_bytes: int | None = None
    ram_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    net_bytes_per_s: float | None = None  # both ways, the busiest interface
    ib_bytes_per_s: float | None = None  # both ways, all ports
    notes: tuple[str, ...] = ()  # what stands out here, worst first
    history: tuple[float, ...] = ()  # mean power or utilization in percent, oldest first; of CPU where there is no GPU

    @property
    def severity(self) -> int:
        """0 good, 1 not as it should be, 2 of no use to the run."""
        return SEVERITY[self.state]

    @property
    def power_pct(self) -> float | None:
        """Of the GPU that draws least, in percent of its limit."""
        return min(known(gpu.power_pct for gpu in self.gpus), default=None)

    @property
    def temperature_c(self) -> int | None:
        """Of its hottest GPU."""
        return max(known(gpu.temperature_c for gpu in self.gpus), default=None)

    @property
    def step(self) -> int | None:
        """Of its slowest rank."""
        return min((rank.step for rank in self.ranks), default=None)

    @property
    def step_age_s(self) -> float | None:
        """Of its most silent rank."""
        return max((rank.age_s for rank in self.ranks), default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """The run as a whole."""

    run: str
    phase: RunPhase
    phase_s: float | None
    world: int
    attempt: int  # restarts + 1
    step: int | None = None
    steps: int | None = None  # in all
    loss: float | None = None
    losses: tuple[float, ...] = ()
    step_s: float | None = None  # median of the last steps
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    tokens_per_s: float | None = None
    mfu_pct: float | None = None
    eta_s: float | None = None
    done_bytes: int | None = None  # while loading
    total_bytes: int | None = None
    checkpoint_step: int | None = None
    lost_steps: int | None = None  # if it died now
    lost_rank_hours: float | None = None  # the same, in hours of one GPU (or rank, without GPUs)
    network: str = ""  # "IB 8x400", "SOCKET", "gloo"; "": not known
    guard: GuardShown = GuardShown.NONE
    others: tuple[str, ...] = ()  # other runs that live on these hosts

    @property
    def is_unguarded(self) -> bool:
        """Whether its guard died while it needs it."""
        return self.guard is GuardShown.GONE and self.phase not in (RunPhase.DONE, RunPhase.STOPPED)


class Level(enum.StrEnum):
    """How bad a change is."""

    BAD = "bad"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Something that changed."""

    time: float  # when it was noticed; operator's clock, seconds since the epoch
    host: str
    level: Level
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """Everything at one moment."""

    time: float  # operator's clock, seconds since the epoch
    interval_s: float
    badge: str  # "" live | RECORDED | SIMULATED
    verdict: Verdict
    why: str
    exit_code: int  # 0 healthy, 1 degraded or connecting, 3 hung, failed or down
    hosts: tuple[HostRow, ...]  # in the order of the hosts file
    training: Training | None
    events: tuple[Change, ...]  # oldest first
    fresh: int  # hosts with a frame that is not stale
    gpus_seen: int
    gpus_expected: int  # as far as the hosts have told
    workdirs: tuple[str, ...] = ()  # where on the hosts runs were looked for
