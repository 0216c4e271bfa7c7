"""Find deviations: hosts and GPUs against the others, and a run's pace, power, phases and steps against its own past. Pure.

GPUs are judged against the median of the run's GPUs of the same model, because a run is as fast as its slowest rank. Unknown values are
never judged. A fall of all GPUs or links together is judged against their last ten minutes. A run may idle in every step (an update on
the CPU) or while it saves, so only a fall that lasts longer than any before counts.
"""

import bisect
import collections
import dataclasses
import itertools
import math
import operator
import shlex
import statistics
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.checkpoints import is_nearly_full
from llama405b.contract.errors import and_more, fmt_if, pluralize
from llama405b.contract.records import PROCESS_STATE_NOTES, Phase, describe_rank_exit, rank_label
from llama405b_tools.agent.messages import RankHeartbeat, StepMetrics
from llama405b_tools.parsers import THERMAL_REASONS, GpuReport
from llama405b_tools.run.judge import Failure, failure_words
from llama405b_tools.text.figures import format_duration
from llama405b_tools.text.words import clean, fold_ranks
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import HostFrame, Ram
from llama405b_tools.top.state.picture import RunPhase, not_none

LOCAL_PARTS = {
    "data_s": "its batch",
    "optimizer_s": "clipping and update",
}  # parts of a step that each rank does on its own
IB_ERRORS = {
    "symbol_error": "symbol errors",
    "link_downed": "link downs",
    "port_rcv_errors": "receive errors",
    "out_of_sequence": "packets out of order",
    "packet_seq_err": "sequence errors",
}
BEHIND_KEY = "behind"  # the key of the note on the rank that computes longest
TEMPERATURE_FIELD = "temperature_c"  # of a hot GPU's cell
NO_HEARTBEAT = "no heartbeat"  # how the key of the note on ranks without one begins
STEP_AND_AGE = ("step", "step_age_s")  # fields of a host's row
BeatId = tuple[str, int, float]  # identifies a silent rank's last heartbeat: host, rank, time


class Note(NamedTuple):
    """A finding about a host, GPU, rank or run."""

    key: str  # words without the numbers that change
    words: str
    fields: tuple[str, ...] = ()  # fields of the drawn row or cell that show it
    # what to do; "": nothing in particular; with ``{host}``, and ``{doctor}``, ``{plan}``, ``{status}`` and ``{stop}`` for these commands
    remedy: str = ""


HALTED_NOTES = {
    "T": Note("stopped", PROCESS_STATE_NOTES["T"], ("state",)),
    "Z": Note("ended", PROCESS_STATE_NOTES["Z"], ("state",)),
    "": Note("gone", "its process is gone", ("state",)),
}  # by the state of a rank's process: the others wait for it, whatever else stands out


class Hang(NamedTuple):
    """A hang: the rank or host that the others wait for."""

    host: str
    age_s: float
    words: str
    beat: BeatId


def find_odd_gpus(
    gpus: Mapping[str, Sequence[GpuReport]], ranked_gpus: Mapping[str, Collection[int]]
) -> dict[tuple[str, int], Note]:
    """Return the GPUs that deviate, by host and index, each with a note.

    ``ranked_gpus``: by host, the indices of those that have a rank: they are compared with others of their model.
    """
    gpu_at = {(host, gpu.index): gpu for host, host_gpus in gpus.items() for gpu in host_gpus}
    model = {(host, i): gpu.name if i in ranked_gpus.get(host, ()) else "" for (host, i), gpu in gpu_at.items()}
    usual = {
        name: _median_readings([gpu_at[i] for i, gpu_model in model.items() if gpu_model and gpu_model == name])
        for name in {*model.values()}
    }
    notes = {place: list(_gpu_notes(gpu, usual[model[place]])) for place, gpu in gpu_at.items()}
    return {gpu: _join_notes(gpu_notes) for gpu, gpu_notes in notes.items() if gpu_notes}


def _median_readings(gpus: Sequence[GpuReport]) -> "MedianReadings":
    return MedianReadings(
        power=_median(map(_power_share, gpus), -math.inf),
        clock=_median((gpu.clock_mhz for gpu in gpus), -math.inf),
        heat=_median((gpu.temperature_c for gpu in gpus), math.inf),
    )


def _join_notes(notes: Sequence[Note]) -> Note:
    fields = tuple(field for note in notes for field in note.fields)
    return Note("+".join(note.key for note in notes), "; ".join(note.words for note in notes), fields)


class MedianReadings(NamedTuple):
    """Medians over all GPUs of a model in the run; if too few report, values from which no GPU deviates."""

    power: float  # share of the limit
    clock: float  # MHz
    heat: float  # °C


def _gpu_notes(gpu: GpuReport, usual: MedianReadings) -> Iterator[Note]:
    """Yield notes on one GPU."""
    if gpu.fault:
        yield Note("fault", gpu.fault)
    if gpu.slowdowns:
        yield Note("slowed", f"slowed by {', '.join(gpu.slowdowns)}")
    if gpu.ecc_errors:
        yield Note("ecc", f"{gpu.ecc_errors} uncorrected ECC errors")
    if usual.power > thresholds.BUSY_POWER:
        yield from _low_reading_notes(gpu, usual)
    temperature_c = gpu.temperature_c
    if (
        temperature_c is not None
        and temperature_c >= thresholds.HOT_C
        and temperature_c > usual.heat + thresholds.HOTTER_C
    ):
        yield Note("heat", f"{temperature_c} °C (median {usual.heat:.0f})", (TEMPERATURE_FIELD,))
    elif temperature_c is not None and temperature_c >= thresholds.TOO_HOT_C:
        yield Note("heat", f"{temperature_c} °C", (TEMPERATURE_FIELD,))


def is_heat(gpu: GpuReport, note: Note) -> bool:
    """Return whether a note on a GPU is about heat."""
    return TEMPERATURE_FIELD in note.fields or bool({*gpu.slowdowns} & {*THERMAL_REASONS})


def _low_reading_notes(gpu: GpuReport, usual: MedianReadings) -> Iterator[Note]:
    """Yield notes if power or clock are below the median of busy GPUs."""
    share = _power_share(gpu)
    if share is not None and share < thresholds.LOW_POWER * usual.power:
        yield Note("power", f"power {100 * share:.0f}% (median {100 * usual.power:.0f}%)", ("power_w",))
    if gpu.clock_mhz is not None and gpu.clock_mhz < thresholds.LOW_CLOCK * usual.clock:
        yield Note("clock", f"clock {gpu.clock_mhz} MHz (median {usual.clock:.0f})", ("clock_mhz",))


def find_halted_ranks(beats: Sequence[tuple[str, RankHeartbeat]]) -> Iterator[tuple[str, RankHeartbeat, Note]]:
    """Yield host, heartbeat and note of ranks that cannot continue: their process is stopped, ended or gone.

    A host that sees none of its ranks' processes is skipped: they run in a container.
    """
    hosts_with_processes = {host for host, beat in beats if beat.state}
    for host, beat in beats:
        if beat.state in HALTED_NOTES and host in hosts_with_processes and beat.phase not in (Phase.DONE, Phase.FAILED):
            yield host, beat, HALTED_NOTES[beat.state]


def find_slow_ranks(beats: Sequence[tuple[str, RankHeartbeat]], step_s: float) -> Iterator[tuple[str, int, Note]]:
    """Yield ranks that delay the others by slow local work (batch, update): host, rank and note."""
    for key, part in LOCAL_PARTS.items():
        times = [(host, beat.rank, getattr(beat, key)) for host, beat in beats]
        median = _median((took_s for _, _, took_s in times), math.inf)
        for host, rank, took_s in times:
            if (
                took_s is not None
                and took_s > thresholds.SLOW_RANK * median
                and took_s - median > thresholds.SLOW_PART * step_s
            ):
                words = f"{part} took {took_s:.2f} s (median {median:.2f})"
                yield host, rank, Note(part, words, (key,))


def find_slowest_rank(busy: Sequence[tuple[float, str, int]], step_s: float) -> Iterator[tuple[str, int, Note]]:
    """Yield the slowest rank if it is well behind the median rank; the others wait for it in every step.

    ``busy``: seconds of each rank in a step, its host and number.
    """
    median = _median((busy_s for busy_s, _, _ in busy), math.inf)
    busy_s, host, rank = max(busy, default=(0.0, "", 0))
    behind_s = busy_s - median
    if behind_s > max(thresholds.BEHIND_S, thresholds.BEHIND * step_s):
        words = f"it is {behind_s:.2f} s behind in every step: it costs {100 * behind_s / step_s:.0f}%"
        remedy = "look at the GPU of that rank (3, Enter): a slow one costs every step; replace its host if it stays so"
        yield host, rank, Note(BEHIND_KEY, words, ("busy_s",), remedy)


def _power_share(gpu: GpuReport) -> float | None:
    return gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else None


def _median(values: Iterable[float | None], default: float) -> float:
    """Return the median of the known values; ``default`` if there are too few."""
    known_values = not_none(values)
    return statistics.median(known_values) if len(known_values) >= thresholds.MIN_COMPARED else default


def list_host_notes(frame: HostFrame, earlier_frame: HostFrame, best_rates: Mapping[str, float]) -> list[Note]:
    """Return the notes on a host except those on its GPUs.

    ``earlier_frame``: an earlier frame, for counters that have grown since; ``best_rates``: of RDMA ports that were ever active, the best
    rate in Gb/s.
    """
    return [
        *_memory_notes(frame.memory, earlier_frame.memory),
        *_disk_notes(frame),
        *([Note("runs", f"its runs are unknown: {frame.run_fault}")] if frame.run_fault else ()),
        *_port_notes(frame, earlier_frame, best_rates),
    ]


def _memory_notes(memory: Ram, earlier: Ram) -> Iterator[Note]:
    if memory.oom_kills is not None and earlier.oom_kills is not None and memory.oom_kills > earlier.oom_kills:
        killed = memory.oom_kills - earlier.oom_kills
        yield Note("oom", f"out-of-memory kills: {killed}")
    if memory.total and memory.available is not None and memory.available < thresholds.LOW_RAM * memory.total:
        yield Note("ram", f"RAM is full: {memory.available / (1 << 30):.1f} GiB left", ("ram_used_bytes",))


def full_disks(frame: HostFrame) -> list[tuple[str, int]]:
    """Return the run's paths on nearly full disks, each with the free bytes."""
    return [(path, free) for path, free, total in frame.disks if is_nearly_full(free, total)]


def _disk_notes(frame: HostFrame) -> Iterator[Note]:
    for path, free in full_disks(frame):
        words = f"disk is nearly full: {free / (1 << 30):.1f} GiB left at {path}"
        remedy = f"{disk_usage_command(path)}; delete what is not needed, such as checkpoints of earlier runs"
        yield Note(f"disk {path}", words, ("disk_free_bytes",), remedy)


def disk_usage_command(path: str, host: str = "{host}") -> str:
    """Return a remedy's sentence with the command that shows what fills a host's disk."""
    quoted = shlex.quote(path).replace("{", "{{").replace("}", "}}")  # as it is part of a remedy
    return f"`du -xhd2 {quoted} | sort -h | tail` on {host} shows what fills it"


def _port_notes(frame: HostFrame, earlier_frame: HostFrame, best_rates: Mapping[str, float]) -> Iterator[Note]:
    earlier = {port.name: port.counters for port in earlier_frame.ib}
    for port in frame.ib:
        counters = earlier.get(port.name, {})
        growth = {key: port.counters.get(key, 0) - counters[key] for key in IB_ERRORS if key in counters}
        errors = [f"{count} {IB_ERRORS[key]}" for key, count in growth.items() if count > 0]
        if errors:
            yield Note(f"{port.name} errors", f"{port.name}: {', '.join(errors)}", ("ib_bytes_per_s",))
        if port.name in best_rates and "ACTIVE" not in port.state:
            yield Note(f"{port.name} down", f"{port.name} is down", ("ib_bytes_per_s",))
        elif port.gbit_per_s < best_rates.get(port.name, 0.0):
            words = f"{port.name} runs at {port.gbit_per_s:g} Gb/s, and ran at {best_rates[port.name]:g}"
            yield Note(f"{port.name} rate", words, ("ib_bytes_per_s",))


def is_hang(
    beat: RankHeartbeat,
    age_s: float,
    gpus: Sequence[GpuReport],
    ages: Sequence[float],
    *,
    was_hung: bool,
    is_long: bool,
) -> bool:
    """Return whether a silence is a hang; it may not be if the rank's GPUs are busy or log lines arrive.

    ``ages``: seconds since the last log line on each host. ``was_hung``: it already was a hang. ``is_long``: the silence is so
    long that nothing is an excuse: NCCL keeps a GPU busy while it waits.
    """
    if is_long or beat.state in PROCESS_STATE_NOTES:
        return True
    is_busy = max(not_none(map(_power_share, gpus)), default=0.0) > thresholds.IDLE_POWER + 0.25
    is_logging = min(ages, default=math.inf) < age_s / 4
    return not is_busy and (was_hung or not is_logging)


def describe_hang(beat: RankHeartbeat, age_s: float, gpus: Sequence[GpuReport], ages: Sequence[float]) -> str:
    """Describe a hang; ``ages``: seconds since the last log line on each host."""
    words = f"rank {beat.rank} is silent for {age_s:.0f} s at step {beat.step} in phase {beat.phase}"
    words += fmt_if("; {}", PROCESS_STATE_NOTES.get(beat.state, ""))
    if shares := not_none(map(_power_share, gpus)):
        words += f"; its GPU draws {100 * statistics.mean(shares):.0f}% of its power"
    if ages:
        words += f"; no log line for {min(ages):.0f} s"
    return words


def describe_failure(failure: Failure) -> str:
    """Describe a failure of a node runner, or of a rank whose node runner has not ended yet."""
    if failure.state or failure.is_decided or failure.cause.rank is None:
        return failure_words(failure)
    return f"{rank_label(failure.cause)} failed{fmt_if(': {}', clean(describe_rank_exit(failure.cause)))}"


class Pace(NamedTuple):
    """The recent and the expected seconds per step."""

    recent_s: float
    expected_s: float
    is_planned: bool  # the expected time is the plan's; else it is this run's own

    @property
    def is_slow(self) -> bool:
        """Whether recent steps are slower than expected."""
        return self.expected_s < thresholds.MIN_PACE * self.recent_s

    @property
    def words(self) -> str:
        """Compare recent and expected step time: ``a step takes 6.00 s, 3% more than planned``."""
        percent = round(100 * (self.recent_s / self.expected_s - 1))
        reference = "planned" if self.is_planned else "usual"
        if not percent:
            return f"a step takes {self.recent_s:.2f} s, as {reference}"
        comparison = "more" if percent > 0 else "less"
        return f"a step takes {self.recent_s:.2f} s, {abs(percent)}% {comparison} than {reference}"


@dataclasses.dataclass(slots=True)
class PaceCache:
    """Caches the pace and the usual step time, which are computed from thousands of steps."""

    key: tuple[int, StepMetrics | None, float | None] = (0, None, None)
    pace: Pace | None = None
    usual_s: float | None = None

    def update(self, metrics: Sequence[StepMetrics], planned_s: float | None) -> "PaceCache":
        """Return the values for these steps, recomputed only if there is a new step."""
        key = len(metrics), metrics[-1] if metrics else None, planned_s
        if key != self.key:
            self.key, self.pace, self.usual_s = key, measure_pace(metrics, planned_s), median_step_s(metrics)
        return self


def median_step_s(metrics: Sequence[StepMetrics]) -> float | None:
    """Return the median step time of the run's best ten minutes, so that slow hours do not set the norm."""
    step_times = [step.step_s for step in metrics if step.step_s]
    return min(map(statistics.median, _blocks(step_times)), default=None)


def _blocks(step_times: Sequence[float]) -> Iterator[Sequence[float]]:
    """Divide the steps into blocks of ten minutes and 20 steps or more; the last may be twice as long."""
    begin, elapsed_s = 0, 0.0
    for end, step_s in enumerate(step_times, 1):
        elapsed_s += step_s
        n_left = len(step_times) - end
        is_long = elapsed_s >= thresholds.BLOCK_S and end - begin >= thresholds.BLOCK_STEPS
        if n_left == 0 or (is_long and n_left >= thresholds.BLOCK_STEPS):
            yield step_times[begin:end]
            begin, elapsed_s = end, 0.0


def measure_pace(metrics: Sequence[StepMetrics], planned_s: float | None) -> Pace | None:
    """Return the pace of the last steps (at least five, and a minute); None if it is not known yet.

    The first step of an attempt is excluded: it connects and compiles. A run without a plan is compared with its own
    first steps, once there are as many of them.
    """
    attempt = list(itertools.takewhile(lambda step: step.attempt == metrics[-1].attempt, reversed(metrics)))[:-1]
    n = n_recent(attempt)
    if planned_s is None:
        n = min(n, len(metrics) // 2)
    recent = [step.step_s for step in attempt[:n] if step.step_s]
    if len(recent) < thresholds.PACE_STEPS or sum(recent) < thresholds.MIN_PACE_S:
        return None
    run_step_s = median_step_s(metrics[: len(metrics) - n])
    expected = [(value_s, is_planned) for value_s, is_planned in ((planned_s, True), (run_step_s, False)) if value_s]
    if not expected:
        return None
    recent_s = statistics.mean(sorted(recent)[:-1])  # without the slowest: a single slow step does not count
    return Pace(recent_s, *min(expected))


def n_recent(newest_first: Iterable[StepMetrics]) -> int:
    """Return how many steps make up at least five steps and a minute; all, if there are fewer."""
    n, sum_s = 0, 0.0
    for step in newest_first:
        n, sum_s = n + 1, sum_s + (step.step_s or 0.0)
        if n >= thresholds.PACE_STEPS and sum_s >= thresholds.PACE_S:
            break
    return n


def slow_note(current: Pace | None) -> Iterator[Note]:
    """Yield a note if recent steps are slower than expected."""
    if current and current.is_slow:
        reference = "planned" if current.is_planned else "usual"
        factor = current.recent_s / current.expected_s
        words = f"a step takes {current.recent_s:.2f} s, {factor:.2g} times the {reference} {current.expected_s:.2f} s"
        remedy = "2, 3 and 4 show GPUs, ranks and network: one that is slower delays all; a step's parts tell what takes longer"
        yield Note("step_s", words, ("step_s",), remedy)


class Fall(NamedTuple):
    """A fall of a quantity below its usual level."""

    usual_level: float
    level: float
    duration_s: float


@dataclasses.dataclass(slots=True)
class Baseline:
    """One quantity over the last ten minutes of training."""

    # time, value
    samples: collections.deque[tuple[float, float]] = dataclasses.field(default_factory=collections.deque)

    def add(self, now: float, value: float | None, every_s: float) -> None:
        """Add a value, at most one per interval."""
        if value is None or (self.samples and now - self.samples[-1][0] < 0.9 * every_s):
            return
        self.samples.append((now, value))
        while now - self.samples[0][0] > thresholds.LEVEL_S:
            self.samples.popleft()

    def fall(self, every_s: float) -> Fall | None:
        """Return the current fall; None if there is none, or it is no longer than earlier ones."""
        values = [value for _, value in self.samples]
        if len(values) < thresholds.LEVEL_SAMPLES:
            return None
        usual = statistics.median(values)
        low_spans = _low_spans(self.samples, thresholds.FALL_SHARE * usual)
        last = self.samples[-1]
        if not low_spans or low_spans[-1][1] != last[0]:
            return None
        *earlier_spans, (begin, end) = low_spans
        longest_s = max((until - since for since, until in earlier_spans), default=0.0)
        duration_s = end - begin
        if duration_s < max(every_s, thresholds.FALL_LENGTH_FACTOR * longest_s):
            return None
        return Fall(usual, last[1], duration_s)


def _low_spans(samples: Sequence[tuple[float, float]], limit: float) -> list[tuple[float, float]]:
    """Return the time spans below the limit, each from its first to its last sample."""
    spans: list[tuple[float, float]] = []
    was_low = False
    for moment, value in samples:
        is_low = value < limit
        if is_low:
            begin = spans.pop()[0] if was_low else moment
            spans.append((begin, moment))
        was_low = is_low
    return spans


MAX_PHASE_TIMES = 9  # durations kept per phase
RUN_PHASES = {
    Phase.FAILED: RunPhase.FAILED,
    Phase.START: RunPhase.STARTING,
    Phase.DATA: RunPhase.LOADING,
    Phase.LOAD: RunPhase.LOADING,
    Phase.PIN: RunPhase.LOADING,
    Phase.RESUME: RunPhase.LOADING,
    Phase.CHECKPOINT: RunPhase.SAVING,
    Phase.EVAL: RunPhase.EVALUATING,
    Phase.UPDATE: RunPhase.TRAINING,
    Phase.TRAIN: RunPhase.TRAINING,
    Phase.DONE: RunPhase.DONE,
}  # a rank's phase -> the run's, in the order in which other ranks wait for it
PHASE_VERBS = {
    Phase.START: "starting",
    Phase.DATA: "reading the data",
    Phase.LOAD: "loading",
    Phase.PIN: "pinning memory",
    Phase.RESUME: "reading the checkpoint",
    Phase.CHECKPOINT: "saving",
    Phase.EVAL: "evaluating",
}  # phases that have a usual time


class PhaseDuration(NamedTuple):
    """How long a phase other than training has lasted, and how long it usually takes."""

    phase: Phase
    duration_s: float
    usual_s: float | None  # None: unknown

    @property
    def words(self) -> str:
        """Describe it: ``saving for 38m, usually 12s``."""
        usual = "" if self.usual_s is None else f", usually {format_duration(self.usual_s)}"
        return f"{PHASE_VERBS[self.phase]} for {format_duration(self.duration_s)}{usual}"


@dataclasses.dataclass(slots=True)
class PhaseTimes:
    """The observed durations of each phase."""

    durations: dict[Phase, collections.deque[float]] = dataclasses.field(default_factory=dict)
    current: tuple[Phase, float] | None = None  # and since when, by the clock of its rank

    def observe(self, phase: Phase, since: float) -> None:
        """Record the current phase of one rank, always the same rank."""
        if self.current and self.current[1] < since:
            previous, began = self.current
            self.durations.setdefault(previous, collections.deque(maxlen=MAX_PHASE_TIMES)).append(since - began)
        self.current = phase, since

    def usual_s(self, phase: Phase, reported_s: Mapping[str, float]) -> float | None:
        """Return the median duration of a phase: observed, else as the host reports; None if unknown."""
        if phase in self.durations:
            return statistics.median(self.durations[phase])
        return reported_s.get(phase)


def slowest_phase(phases: Container[Phase]) -> Phase:
    """Return the phase of the rank that holds up the others."""
    return next((phase for phase in RUN_PHASES if phase in phases), Phase.START)


def run_phase(phases: Iterable[Phase]) -> RunPhase:
    """Return the run's phase: that of the rank that holds up the others."""
    return RUN_PHASES[slowest_phase({*phases})]


@dataclasses.dataclass(frozen=True, slots=True)
class RunHistory:
    """Filled by ``moment.extend_history`` at each moment; a new one for each run."""

    times: PhaseTimes = dataclasses.field(default_factory=PhaseTimes)
    paces: PaceCache = dataclasses.field(default_factory=PaceCache)
    power_w: Baseline = dataclasses.field(default_factory=Baseline)  # per GPU
    ib_bytes_per_s: Baseline = dataclasses.field(default_factory=Baseline)  # per host
    first_exits: dict[int, Failure] = dataclasses.field(
        default_factory=dict
    )  # by attempt, of the rank that was gone first


class StepTimes(NamedTuple):
    """The last step of this attempt and its times, by the clock of the host that writes the metrics."""

    step: int  # the last
    age_s: float  # since the last
    since_s: float  # since the first


def attempt_step_times(metrics: Sequence[StepMetrics], attempt: int, now: float) -> StepTimes | None:
    """Return an attempt's last step and times; None without metrics that have attempt and time."""
    if not metrics or metrics[-1].attempt != attempt:
        return None
    first = metrics[bisect.bisect_left(metrics, attempt, key=operator.attrgetter("attempt"))]
    if first.time is None or metrics[-1].time is None:
        return None
    return StepTimes(metrics[-1].step, now - metrics[-1].time, now - first.time)


def mean_step_seconds(metrics: Sequence[StepMetrics], saved: int, step: int) -> float:
    """Return the seconds of the steps after a checkpoint; steps without metrics count with the mean."""
    step_times = not_none(step_metrics.step_s for step_metrics in metrics if step_metrics.step > saved) or not_none(
        [metrics[-1].step_s]
    )
    return statistics.mean(step_times) * max(0, step - saved) if step_times else 0.0


LOSS_REMEDY = "if it does not come down again, stop, and resume from a checkpoint before it with a lower learning rate"


def step_notes(metrics: Sequence[StepMetrics]) -> Iterator[Note]:
    """Yield notes on the last steps, except on their duration."""
    last = metrics[-1]
    if last.step_s is None:
        return
    recent = [step for step in metrics[-thresholds.RECENT_STEPS :] if step.step_s is not None]
    if bad_steps := [step.step for step in recent if step.loss is None]:
        words = f"the loss of step {bad_steps[0]}{and_more(bad_steps)} was not a finite number"
        yield Note("loss", words, ("loss",), LOSS_REMEDY)
    else:
        yield from _high_loss_notes([step.loss for step in metrics if step.step_s is not None])
    if retries := _count_retries(metrics):
        shown = pluralize(retries, "allocator retry", "allocator retries")
        consequence = "GPU memory is short, and each makes a step slower; `llama405b plan` says what helps"
        remedy = "a smaller batch or sequence, or more offload, makes room: `{plan}` says what fits"
        yield Note(
            "retries", f"{shown} in the last {thresholds.RECENT_STEPS} steps: {consequence}", ("step_s",), remedy
        )


def _high_loss_notes(losses: Sequence[float | None]) -> Iterator[Note]:
    """Yield a note if the loss stays above its median; the higher, the sooner."""
    for times, n in thresholds.HIGH_LOSS:
        if usual := _exceeded_median(losses, times, n):
            words = f"the loss is {losses[-1]:.4g}, for {n} steps above {times:g} times its median of {usual:.4g}"
            yield Note("loss", words, ("loss",), LOSS_REMEDY)
            return


def _count_retries(metrics: Sequence[StepMetrics]) -> int:
    """Return the allocator retries of rank 0 within the recent steps of this attempt."""
    recent = [step for step in metrics if step.attempt == metrics[-1].attempt][-thresholds.RECENT_STEPS :]
    counts = [step.num_alloc_retries for step in recent if step.num_alloc_retries is not None]
    return max(0, counts[-1] - counts[0]) if counts else 0


def _exceeded_median(values: Sequence[float | None], times: float, n: int) -> float | None:
    """Return the median before the last ``n`` values, if each of these exceeds it ``times`` times."""
    earlier, recent = not_none(values[:-n]), not_none(values[-n:])
    if len(earlier) < thresholds.USUAL_LOSS_STEPS or not recent:
        return None
    median = statistics.median(earlier)
    return median if 0 < times * median < min(recent) else None


def missing_heartbeat_notes(
    ranks: range, beats: Sequence[RankHeartbeat], late_beats: Sequence[RankHeartbeat]
) -> Iterator[Note]:
    """Yield which of a host's ranks have no heartbeat, or one that is ``late_beats``, while the metrics go on."""
    if missing := sorted({*ranks} - {beat.rank for beat in beats}):
        yield Note(
            f"{NO_HEARTBEAT} {missing}",
            f"no heartbeat from {fold_ranks(missing)}, although the run trains",
            STEP_AND_AGE,
        )
    if late_beats:
        names, step = fold_ranks([beat.rank for beat in late_beats]), min(beat.step for beat in late_beats)
        yield Note(
            f"late {names}", f"no heartbeat from {names} since step {step}, although the metrics go on", STEP_AND_AGE
        )


def missing_metrics_notes(
    steps: StepTimes | None, beats: Sequence[tuple[RankHeartbeat, float]], patience_s: float
) -> Iterator[Note]:
    """Yield a note if the metrics have stopped while the ranks of the host that writes them continue.

    ``beats``: theirs, with the age of each. Steps without a target have no metrics, and never are many in a row.
    """
    if any(beat.phase is not Phase.TRAIN for beat, _ in beats):
        return
    step, ranks_step = 0, min((beat.step for beat, _ in beats), default=0)
    silent_s = min((beat.time - beat.phase_since for beat, _ in beats), default=0.0)
    if steps:
        step, silent_s = steps.step, steps.age_s - max((age_s for _, age_s in beats), default=0.0)
    if ranks_step > step + thresholds.DISAGREE_STEPS and silent_s > patience_s:
        yield Note(
            "metrics",
            f"no metrics{fmt_if(' since step {}', step)}, although its ranks are at step {ranks_step}",
            ("step",),
            "the log of rank 0 (5) may say why it writes no metrics",
        )
