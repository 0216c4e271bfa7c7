"""The values that cluster-top shows at one moment: for the screen, ``--json`` and Prometheus. Pure.

``None`` means unknown (a dash on screen), never 0. Times are in seconds; ages count from the view's time. Metrics with unknown or
outdated values are omitted, so that a graph has a gap instead of an old value.
"""

import dataclasses
import enum
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from llama405b.settings.axes import Axes
from llama405b_tools.text.figures import percent_of

T = TypeVar("T")


def not_none(values: Iterable[T | None]) -> list[T]:
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
UNHEARD_STATES = (HostState.STALE, HostState.CONNECTING, *LINK_STATES)
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


ENDED_PHASES = (RunPhase.STOPPED, RunPhase.DONE)
OVER_PHASES = (*ENDED_PHASES, RunPhase.FAILED)


class ClusterVerdict(enum.StrEnum):
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
        if self in (ClusterVerdict.HUNG, ClusterVerdict.FAILED, ClusterVerdict.DOWN):
            return 3
        return int(
            self in (ClusterVerdict.DEGRADED, ClusterVerdict.CONNECTING, ClusterVerdict.RESTARTING, ClusterVerdict.LOST)
        )


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


GUARDING_STATES = (GuardShown.WATCHING, GuardShown.RECOVERING)  # it may bring the run back


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
        return percent_of(self.power_w, self.power_limit_w)


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
        """Whether its values are current; else they are the last ones received."""
        return self.state not in UNHEARD_STATES

    @property
    def severity(self) -> int:
        """0: good, 1: degraded, 2: useless to the run."""
        return SEVERITY[self.state]

    @property
    def power_pct(self) -> float | None:
        """Power of the GPU that draws least, in percent of its limit."""
        return min(not_none(gpu.power_pct for gpu in self.gpus), default=None)

    @property
    def temperature_c(self) -> int | None:
        """Temperature of its hottest GPU."""
        return max(not_none(gpu.temperature_c for gpu in self.gpus), default=None)

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
    all_tokens_per_s: float | None = None  # as the plan counts: also those that are only read, and padding
    tokens_per_s: float | None = None  # trained on
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
        return self.guard is GuardShown.GONE and self.phase not in ENDED_PHASES


class Severity(enum.StrEnum):
    """How bad a change is."""

    BAD = "bad"
    WARNING = "warning"
    NOTE = "note"


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterEvent:
    """An event: a change of a host or the run."""

    time: float  # when it was noticed; operator's clock, seconds since the epoch
    host: str
    level: Severity
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterView:
    """The whole cluster at one moment."""

    time: float  # operator's clock, seconds since the epoch
    interval_s: float
    badge: str  # "" live | RECORDED | SIMULATED
    verdict: ClusterVerdict
    why: str
    exit_code: int  # ``ClusterVerdict.exit_code``
    hosts: tuple[HostRow, ...]  # in the order of the hosts file
    training: TrainingStatus | None
    events: tuple[ClusterEvent, ...]  # oldest first
    fresh: int  # hosts whose last frame is not stale
    gpus_seen: int
    gpus_expected: int  # as far as the hosts have reported
    advice: str = ""  # what to do next; "" if there is nothing to do
    workdirs: tuple[str, ...] = ()  # directories on the hosts in which runs were looked for
    about: str = ""  # the host that the verdict is about; "" if it is about none, or all


class Quantity(NamedTuple):
    """A quantity of every GPU (or rank), as a heat map shows it."""

    name: str
    unit: str
    value_of: Callable[[HostRow, int], float | None]
    worst_of: Callable[[Iterable[float]], float]  # of several
    worst_name: str
    bounds: tuple[float, float] | None  # coldest and hottest value; None: 0 and the maximum
    is_centered: bool = False  # whether the scale is centered on the median
    min_high: float = 0.0  # lower bound of the hottest value, so that noise stays cold

    def scale(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the coldest and the hottest value, given all values."""
        if self.bounds or not values:
            return self.bounds or (0.0, 1.0)
        if self.is_centered:
            median = statistics.median(values)
            return 0.45 * median, 1.45 * median
        return 0.0, max(self.min_high, *values)


def rank_at(row: HostRow, i: int) -> RankRow | None:
    """Return the rank on a host's i-th GPU; without GPUs, its i-th rank."""
    if i < len(row.gpus):
        return next((rank for rank in row.ranks if rank.rank == row.gpus[i].rank), None)
    return row.ranks[i] if i < len(row.ranks) else None


def n_units(row: HostRow) -> int:
    """Return the number of a host's GPUs; without GPUs, of its ranks."""
    return len(row.gpus) or len(row.ranks)


def network_gbps(row: HostRow) -> float | None:
    """Return a host's Gb/s: RDMA, without it the busiest interface; both directions."""
    rate = row.net_bytes_per_s if row.ib_bytes_per_s is None else row.ib_bytes_per_s
    return None if rate is None else rate * 8e-9


def _gpu(field: str) -> Callable[[HostRow, int], float | None]:
    return lambda row, i: getattr(row.gpus[i], field) if i < len(row.gpus) else None


def _memory(row: HostRow, i: int) -> float | None:
    return percent_of(row.gpus[i].used_mib, row.gpus[i].memory_mib) if i < len(row.gpus) else None


def _busy(row: HostRow, i: int) -> float | None:
    rank = rank_at(row, i)
    return rank.busy_s if rank else None


MIN_GBIT = 0.01  # background traffic of an idle host is less
LOWEST, HIGHEST = (min, "lowest"), (max, "highest")
QUANTITIES = (
    Quantity("power", "% of limit", _gpu("power_pct"), *LOWEST, (0.0, 100.0)),
    Quantity("utilization", "%", _gpu("utilization"), *LOWEST, (0.0, 100.0)),
    Quantity("memory", "%", _memory, *HIGHEST, (0.0, 100.0)),
    Quantity("temperature", "°C", _gpu("temperature_c"), *HIGHEST, (25.0, 95.0)),
    Quantity("clock", "MHz", _gpu("clock_mhz"), *LOWEST, None),
    Quantity("net", "Gb/s of its host", lambda row, _: network_gbps(row), *LOWEST, None, min_high=MIN_GBIT),
    Quantity("busy", "s in a step", _busy, *HIGHEST, None, is_centered=True),
)
POWER, UTILIZATION, MEMORY, TEMPERATURE, CLOCK, NETWORK, BUSY = range(len(QUANTITIES))


def available_quantities(rows: Sequence[HostRow]) -> list[int]:
    """Return the indices of the quantities that some host has."""
    return [
        i
        for i, quantity in enumerate(QUANTITIES)
        if any(quantity.value_of(row, k) is not None for row in rows for k in range(n_units(row)))
    ]


METRICS = {  # name without ``llama405b_`` -> labels, meaning
    "verdict": ("verdict", "1 for the verdict that is given now"),
    "exit_code": ("", "0 as it should be, 1 degraded or not known, 3 hung, failed or down"),
    "run_info": ("run phase network guard", "1 for the run that is shown"),
    "world_size": ("run", "Ranks of the run"),
    "restarts": ("run", "Attempts of the run before this one"),
    "step": ("run", "Last step"),
    "steps": ("run", "Steps in total"),
    "loss": ("run", "Loss of the last step"),
    "evaluation_loss": ("run", "Last loss on data that is not trained on"),
    "step_seconds": ("run", "Median of the last steps"),
    "step_planned_seconds": ("run", "A step as it was predicted at launch"),
    "step_part_seconds": ("run part", "Median of a part of the last steps: data, forward, backward, optimizer"),
    "all_tokens_per_second": ("run", "Of all ranks, also those that are only read; absent while no steps are taken"),
    "tokens_per_second": ("run", "Trained on, of all ranks; absent while no steps are taken"),
    "mfu_ratio": ("run", "Model FLOPs over the dense BF16 peak of the GPUs"),
    "eta_seconds": ("run", "Until the last step"),
    "checkpoint_step": ("run", "Step of the newest checkpoint"),
    "goodput_ratio": ("run", "Of the time since its first launch: steps that count"),
    "steps_at_risk": ("run", "Steps since the newest checkpoint"),
    "host_up": ("host", "1 if the host is heard, else 0"),
    "host_state": ("host state", "1 for the state that the host is in"),
    "host_notes": ("host", "How many things stand out on the host"),
    "host_cpu_ratio": ("host", "Of all its cores"),
    "host_memory_used_bytes": ("host", "RAM in use"),
    "host_memory_bytes": ("host", "RAM in total"),
    "host_disk_free_bytes": ("host", "Where the run writes; of several file systems the least"),
    "host_network_bytes_per_second": ("host", "Both directions, the busiest interface"),
    "host_rdma_bytes_per_second": ("host", "Both directions, all ports"),
    "gpu_power_watts": ("host gpu rank", "Power draw"),
    "gpu_power_limit_watts": ("host gpu rank", "Power limit"),
    "gpu_utilization_ratio": ("host gpu rank", "Time in which a kernel ran"),
    "gpu_memory_used_bytes": ("host gpu rank", "Memory in use"),
    "gpu_memory_bytes": ("host gpu rank", "Memory in total"),
    "gpu_temperature_celsius": ("host gpu rank", "Temperature"),
    "gpu_clock_hertz": ("host gpu rank", "Clock of its multiprocessors"),
    "gpu_stands_out": ("host gpu rank", "1 if something about it or its rank stands out, else 0"),
    "rank_step": ("host rank", "Step of the rank's last heartbeat"),
    "rank_heartbeat_age_seconds": ("host rank", "Age of the rank's last heartbeat"),
    "rank_busy_seconds": ("host rank", "Its own computing in its last step, without waiting for other ranks"),
}
STEP_PARTS = ("data", "forward", "backward", "optimizer")


class MetricSample(NamedTuple):
    """One value of a metric."""

    name: str  # a key of ``METRICS``
    labels: tuple[str, ...]  # their values, in the order of ``METRICS``
    value: float


def metric_samples(view: ClusterView) -> Iterator[MetricSample]:
    """Yield all metrics with known values."""
    candidates: list[MetricValue] = [("verdict", (str(view.verdict),), 1.0), ("exit_code", (), float(view.exit_code))]
    if view.training:
        candidates += _run_metrics(view.training)
    for row in view.hosts:
        candidates += [("host_up", (row.name,), float(row.is_heard)), ("host_state", (row.name, str(row.state)), 1.0)]
        if row.is_heard:
            candidates += _host_metrics(row)
    yield from (MetricSample(name, labels, value) for name, labels, value in candidates if value is not None)


MetricValue = tuple[str, tuple[str, ...], float | None]


def _run_metrics(run: TrainingStatus) -> Iterator[MetricValue]:
    yield "run_info", (run.run, str(run.phase), run.network, str(run.guard)), 1.0
    values: dict[str, float | None] = {
        "world_size": run.world,
        "restarts": run.attempt - 1,
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "evaluation_loss": run.evaluation_loss,
        "step_seconds": run.step_s,
        "step_planned_seconds": run.expected_step_s,
        "all_tokens_per_second": run.all_tokens_per_s,
        "tokens_per_second": run.tokens_per_s,
        "mfu_ratio": None if run.mfu_pct is None else run.mfu_pct / 100,
        "eta_seconds": run.eta_s,
        "checkpoint_step": run.checkpoint_step,
        "goodput_ratio": None if run.goodput_pct is None else run.goodput_pct / 100,
        "steps_at_risk": run.lost_steps,
    }
    for name, value in values.items():
        yield name, (run.run,), value
    for part in STEP_PARTS:
        yield "step_part_seconds", (run.run, part), getattr(run, f"{part}_s")


def _host_metrics(row: HostRow) -> Iterator[MetricValue]:
    values: dict[str, float | None] = {
        "host_notes": len(row.notes),
        "host_cpu_ratio": None if row.cpu_pct is None else row.cpu_pct / 100,
        "host_memory_used_bytes": row.ram_used_bytes,
        "host_memory_bytes": row.ram_bytes,
        "host_disk_free_bytes": row.disk_free_bytes,
        "host_network_bytes_per_second": row.net_bytes_per_s,
        "host_rdma_bytes_per_second": row.ib_bytes_per_s,
    }
    for name, value in values.items():
        yield name, (row.name,), value
    for gpu in row.gpus:
        readings: dict[str, float | None] = {
            "gpu_power_watts": gpu.power_w,
            "gpu_power_limit_watts": gpu.power_limit_w,
            "gpu_utilization_ratio": None if gpu.utilization is None else gpu.utilization / 100,
            "gpu_memory_used_bytes": None if gpu.used_mib is None else gpu.used_mib * 2**20,
            "gpu_memory_bytes": None if gpu.memory_mib is None else gpu.memory_mib * 2**20,
            "gpu_temperature_celsius": gpu.temperature_c,
            "gpu_clock_hertz": None if gpu.clock_mhz is None else gpu.clock_mhz * 1e6,
            "gpu_stands_out": bool(gpu.odd),
        }
        for name, value in readings.items():
            yield name, (row.name, str(gpu.index), "" if gpu.rank is None else str(gpu.rank)), value
    for rank in row.ranks:
        for name, value in (
            ("rank_step", rank.step),
            ("rank_heartbeat_age_seconds", rank.age_s),
            ("rank_busy_seconds", rank.busy_s),
        ):
            yield name, (row.name, str(rank.rank)), value
