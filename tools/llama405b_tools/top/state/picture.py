"""What cluster-top knows at one moment, as values: what the screen draws, and what ``--json`` prints. Pure.

``None`` is unknown (a dash on screen), never 0. Times are seconds; ages count from the moment of the picture.
"""

import dataclasses
import enum
from collections.abc import Iterable
from typing import TypeVar

from llama405b.contract.mesh import Axes
from llama405b_tools.text.figures import share

T = TypeVar("T")


def known(values: Iterable[T | None]) -> list[T]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


class HostState(enum.StrEnum):
    """A host's state, worst first."""

    HUNG = "HUNG"  # the others wait for one of its ranks
    FAILED = "FAILED"
    DOWN = "DOWN"  # no connection
    AUTH = "AUTH"
    REFUSED = "REFUSED"
    TIMEOUT = "TIMEOUT"
    STALE = "STALE"  # a connection, but no frames
    SMI_HUNG = "SMI-HUNG"
    NO_DRIVER = "NO-DRIVER"
    OK = "OK"
    CONNECTING = "CONNECTING"


LINK_STATES = (HostState.AUTH, HostState.REFUSED, HostState.TIMEOUT, HostState.DOWN)  # states of the connection
UNHEARD = (HostState.STALE, HostState.CONNECTING, *LINK_STATES)
SEVERITY = {
    **dict.fromkeys((HostState.HUNG, HostState.FAILED, *LINK_STATES), 2),
    **dict.fromkeys((HostState.STALE, HostState.SMI_HUNG, HostState.NO_DRIVER), 1),
    **dict.fromkeys((HostState.OK, HostState.CONNECTING), 0),
}


class RunPhase(enum.StrEnum):
    """The phase of the run as a whole."""

    STARTING = "STARTING"
    LOADING = "LOADING"
    RUNNING = "RUNNING"  # a program of the user's own, which does not say more
    TRAINING = "TRAINING"
    EVALUATING = "EVALUATING"
    SAVING = "SAVING"
    HUNG = "HUNG"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    DONE = "DONE"
    UNKNOWN = "UNKNOWN"  # not all its hosts report


ENDED = (RunPhase.STOPPED, RunPhase.DONE)
OVER = (*ENDED, RunPhase.FAILED)


class Verdict(enum.StrEnum):
    """The overall verdict, in one word or two."""

    HEALTHY = "HEALTHY"  # it trains, and at the expected pace
    TRAINING = "TRAINING"  # too few steps to know the pace
    RUNNING = "RUNNING"  # a program of the user's own, which does not say more
    STARTING = "STARTING"
    LOADING = "LOADING"
    SAVING = "SAVING"
    EVALUATING = "EVALUATING"
    DONE = "DONE"
    STOPPED = "STOPPED"
    NO_RUN = "NO RUN"
    CONNECTING = "CONNECTING"
    DEGRADED = "DEGRADED"
    RESTARTING = "RESTARTING"  # an attempt failed, or somebody asked for it to be ended, and its guard starts the next
    LOST = "STOPPED, STEPS LOST"  # its last save failed
    HUNG = "HUNG"
    FAILED = "FAILED"
    DOWN = "DOWN"

    @property
    def exit_code(self) -> int:
        """The exit code that reports it to a script: 0 as it should be, 1 degraded or not known, 3 useless."""
        if self in (Verdict.HUNG, Verdict.FAILED, Verdict.DOWN):
            return 3
        return int(self in (Verdict.DEGRADED, Verdict.CONNECTING, Verdict.RESTARTING, Verdict.LOST))


class GuardShown(enum.StrEnum):
    """What the run's guard does."""

    NONE = ""  # there is none
    WATCHING = "watching"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    ENDED = "ended"
    STOPPED = "stopped"
    GAVE_UP = "gave up"
    GONE = "GONE"  # it died while the run needed it


GUARDED = (GuardShown.WATCHING, GuardShown.RECOVERING)  # it may bring the run back


@dataclasses.dataclass(frozen=True, slots=True)
class GpuCell:
    """One GPU of a host."""

    index: int
    name: str
    utilization: int | None  # percent of the time in which a kernel ran
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    clock_mhz: int | None
    used_mib: int | None
    memory_mib: int | None
    rank: int | None  # the rank that uses it
    odd: str = ""  # why it or its rank stands out; "" if it does not
    odd_in: tuple[str, ...] = ()  # the fields above that show it

    @property
    def power_pct(self) -> float | None:
        """Power in percent of its limit."""
        return share(self.power_w, self.power_limit_w)


@dataclasses.dataclass(frozen=True, slots=True)
class RankRow:
    """One rank, from its heartbeat."""

    rank: int
    pid: int
    phase: str
    step: int
    age_s: float  # of the heartbeat
    state: str  # process state, as the kernel writes it: R, S, D, T, Z; "" if gone
    done_bytes: int
    total_bytes: int
    data_s: float | None = None  # in its last step: time until it had its batch
    busy_s: float | None = None  # in its last step: its own computing, without waiting for other ranks
    optimizer_s: float | None = None  # in its last step: time for clipping and the update
    odd: str = ""  # why it stands out; "" if it does not
    odd_in: tuple[str, ...] = ()  # the fields above that show it


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
    why: str  # the reason for a state other than OK
    age_s: float | None  # since the last frame
    gpus: tuple[GpuCell, ...] = ()
    has_gpu: bool | None = None  # None: the machine was not queried
    ranks: tuple[RankRow, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    cpu_pct: float | None = None
    cores: int | None = None
    ram_bytes: int | None = None
    ram_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    net_bytes_per_s: float | None = None  # both directions, the busiest interface
    ib_bytes_per_s: float | None = None  # both directions, all ports
    notes: tuple[str, ...] = ()  # what stands out on the host, worst first
    odd_in: tuple[str, ...] = ()  # the fields that show it; those of its GPUs too
    is_culprit: bool = False  # the run failed or hangs, and it began here
    history: tuple[float, ...] = ()  # mean power or utilization in percent, oldest first; of the CPU if there is no GPU

    @property
    def is_heard(self) -> bool:
        """Whether its values are of now; else they are the last that were heard."""
        return self.state not in UNHEARD

    @property
    def severity(self) -> int:
        """0 good, 1 not as it should be, 2 useless to the run."""
        return SEVERITY[self.state]

    @property
    def power_pct(self) -> float | None:
        """Power of the GPU that draws least, in percent of its limit."""
        return min(known(gpu.power_pct for gpu in self.gpus), default=None)

    @property
    def temperature_c(self) -> int | None:
        """Temperature of its hottest GPU."""
        return max(known(gpu.temperature_c for gpu in self.gpus), default=None)

    @property
    def step(self) -> int | None:
        """Step of its slowest rank."""
        return min((rank.step for rank in self.ranks), default=None)

    @property
    def step_age_s(self) -> float | None:
        """Age of its oldest heartbeat."""
        return max((rank.age_s for rank in self.ranks), default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The run as a whole."""

    run: str
    phase: RunPhase
    phase_s: float | None
    usual_phase_s: float | None  # what this phase usually takes; None: unknown, or it is training
    world: int
    attempt: int  # restarts + 1
    step: int | None = None
    steps: int | None = None  # in total
    loss: float | None = None
    losses: tuple[float, ...] = ()
    evaluation_loss: float | None = None  # the last on data that is not trained on
    evaluated_step: int | None = None  # after which it was that; 0: before the first
    step_s: float | None = None  # median of the last steps
    expected_step_s: float | None = None  # as predicted
    mesh: Axes | None = None  # of its ranks
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    update_s: float | None = None  # of updates on the CPU; None: there are none, or they are part of optimizer_s
    exposed_s: float | None = None  # of them, and of the norm: what the steps waited for
    update_bytes: float | None = None  # that these updates moved in rank 0's CPU memory
    down_bytes: float | None = None  # of rank 0's gradients to CPU memory
    up_bytes: float | None = None  # of rank 0's weights from there
    tokens_per_s: float | None = None
    mfu_pct: float | None = None
    eta_s: float | None = None
    done_bytes: int | None = None  # while loading
    total_bytes: int | None = None
    checkpoint_step: int | None = None
    copied_step: int | None = None  # the newest that outlives a host; None: it is on a disk that all share
    lost_steps: int | None = None  # steps lost if the run died now
    lost_rank_hours: float | None = None  # the same, in hours of one GPU (or rank, without GPUs)
    network: str = ""  # "IB 8x400", "SOCKET", "gloo"; "" if unknown
    guard: GuardShown = GuardShown.NONE
    others: tuple[str, ...] = ()  # other live runs on these hosts
    age_s: float | None = None  # since its first attempt began
    goodput_pct: float | None = None  # of the time since then that went into steps that count; None: not known yet
    is_stale: bool = False  # no step for long, or rank 0's host is not heard: what it says of steps is no longer so
    odd_in: tuple[str, ...] = ()  # the fields above that stand out

    @property
    def is_unguarded(self) -> bool:
        """Whether its guard died while the run still needs it."""
        return self.guard is GuardShown.GONE and self.phase not in ENDED


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
    exit_code: int  # ``Verdict.exit_code``
    hosts: tuple[HostRow, ...]  # in the order of the hosts file
    training: TrainingStatus | None
    events: tuple[Change, ...]  # oldest first
    fresh: int  # hosts whose last frame is not stale
    gpus_seen: int
    gpus_expected: int  # as far as the hosts have reported
    advice: str = ""  # what to do next; "" if there is nothing to do
    workdirs: tuple[str, ...] = ()  # directories on the hosts in which runs were looked for
    about: str = ""  # the host that the verdict is about; "" if it is about none, or all
