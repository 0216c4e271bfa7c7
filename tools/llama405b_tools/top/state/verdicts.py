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
import statistics
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.checkpoints import nearly_full
from llama405b.contract.errors import and_more, counted, given
from llama405b.contract.records import STUCK, Phase, rank_words, said_by_rank
from llama405b_tools.agent.messages import Beat
from llama405b_tools.parsers import GpuReport
from llama405b_tools.run.judge import Failure, failure_words
from llama405b_tools.text.figures import span
from llama405b_tools.text.words import clean, fold_ranks
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import Frame, Ram, StepMetrics
from llama405b_tools.top.state.picture import RunPhase, known

ALONE = {"data_s": "its batch", "optimizer_s": "clipping and update"}  # parts of a step that each rank does on its own
IB_ERRORS = {
    "symbol_error": "symbol errors",
    "link_downed": "link downs",
    "port_rcv_errors": "receive errors",
    "out_of_sequence": "packets out of order",
    "packet_seq_err": "sequence errors",
}
BEHIND = "behind"  # the key of the note on the rank that computes longest
FREE, HEAT = "disk_free_bytes", "temperature_c"  # the same, of a full disk; and of a hot GPU's cell
MISSING = "no heartbeat"  # how the key of the note on ranks without one begins
STEP_AND_AGE = ("step", "step_age_s")  # fields of a host's row
BeatId = tuple[str, int, float]  # identifies a silent rank's last heartbeat: host, rank, time


class Note(NamedTuple):
    """A finding about a host, GPU, rank or run."""

    key: str  # words without the numbers that change
    words: str
    fields: tuple[str, ...] = ()  # fields of the drawn row or cell that show it


HALTED = {
    "T": Note("stopped", STUCK["T"], ("state",)),
    "Z": Note("ended", STUCK["Z"], ("state",)),
    "": Note("gone", "its process is gone", ("state",)),
}  # by the state of a rank's process: the others wait for it, whatever else stands out


class Hang(NamedTuple):
    """A hang: the rank or host that the others wait for."""

    host: str
    age_s: float
    words: str
    beat: BeatId


def odd_gpus(
    gpus: Mapping[str, Sequence[GpuReport]], compared: Mapping[str, Collection[int]]
) -> dict[tuple[str, int], Note]:
    """Return the GPUs that deviate, by host and index, each with a note.

    ``compared``: by host, the indices of those that have a rank: they are compared with others of their model.
    """
    everyone = {(host, gpu.index): gpu for host, each in gpus.items() for gpu in each}
    model = {(host, i): gpu.name if i in compared.get(host, ()) else "" for (host, i), gpu in everyone.items()}
    usual = {
        name: _usual([everyone[i] for i, its in model.items() if its and its == name]) for name in {*model.values()}
    }
    notes = {place: list(_oddities(gpu, usual[model[place]])) for place, gpu in everyone.items()}
    return {gpu: _joined(found) for gpu, found in notes.items() if found}


def _usual(alike: Sequence[GpuReport]) -> "Usual":
    return Usual(
        power=_median(map(_share, alike), -math.inf),
        clock=_median((gpu.clock_mhz for gpu in alike), -math.inf),
        heat=_median((gpu.temperature_c for gpu in alike), math.inf),
    )


def _joined(notes: Sequence[Note]) -> Note:
    fields = tuple(field for note in notes for field in note.fields)
    return Note("+".join(note.key for note in notes), "; ".join(note.words for note in notes), fields)


class Usual(NamedTuple):
    """Medians over all GPUs of a model in the run; if too few report, values from which no GPU deviates."""

    power: float  # share of the limit
    clock: float  # MHz
    heat: float  # °C


def _oddities(gpu: GpuReport, usual: Usual) -> Iterator[Note]:
    """Yield notes on one GPU."""
    if gpu.fault:
        yield Note("fault", gpu.fault)
    if gpu.slowed:
        yield Note("slowed", f"slowed by {', '.join(gpu.slowed)}")
    if gpu.ecc_errors:
        yield Note("ecc", f"{gpu.ecc_errors} uncorrected ECC errors")
    if usual.power > thresholds.BUSY:
        yield from _below(gpu, usual)
    hot = gpu.temperature_c
    if hot is not None and hot >= thresholds.HOT_C and hot > usual.heat + thresholds.HOTTER_C:
        yield Note("heat", f"{hot} °C (median {usual.heat:.0f})", (HEAT,))
    elif hot is not None and hot >= thresholds.TOO_HOT_C:
        yield Note("heat", f"{hot} °C", (HEAT,))


def _below(gpu: GpuReport, usual: Usual) -> Iterator[Note]:
    """Yield notes if power or clock are below the median of busy GPUs."""
    share = _share(gpu)
    if share is not None and share < thresholds.LOW_POWER * usual.power:
        yield Note("power", f"power {100 * share:.0f}% (median {100 * usual.power:.0f}%)", ("power_w",))
    if gpu.clock_mhz is not None and gpu.clock_mhz < thresholds.LOW_CLOCK * usual.clock:
        yield Note("clock", f"clock {gpu.clock_mhz} MHz (median {usual.clock:.0f})", ("clock_mhz",))


def halted_ranks(everyone: Sequence[tuple[str, Beat]]) -> Iterator[tuple[str, Beat, Note]]:
    """Yield host, heartbeat and note of ranks that cannot continue: their process is stopped, ended or gone.

    A host that sees none of its ranks' processes is skipped: they run in a container.
    """
    seen = {host for host, beat in everyone if beat.state}
    for host, beat in everyone:
        if beat.state in HALTED and host in seen and beat.phase not in (Phase.DONE, Phase.FAILED):
            yield host, beat, HALTED[beat.state]


def slow_ranks(everyone: Sequence[tuple[str, Beat]], step_s: float) -> Iterator[tuple[str, int, Note]]:
    """Yield ranks that delay the others by slow local work (batch, update): host, rank and note."""
    for key, what in ALONE.items():
        took = [(host, beat.rank, getattr(beat, key)) for host, beat in everyone]
        median = _median((took_s for _, _, took_s in took), math.inf)
        for host, rank, took_s in took:
            if (
                took_s is not None
                and took_s > thresholds.SLOW_RANK * median
                and took_s - median > thresholds.SLOW_PART * step_s
            ):
                words = f"{what} took {took_s:.2f} s (median {median:.2f})"
                yield host, rank, Note(what, words, (key,))


def behind(busy: Sequence[tuple[float, str, int]], step_s: float) -> Iterator[tuple[str, int, Note]]:
    """Yield the slowest rank if it is well behind the median rank; the others wait for it in every step.

    ``busy``: seconds of each rank in a step, its host and number.
    """
    median = _median((busy_s for busy_s, _, _ in busy), math.inf)
    busy_s, host, rank = max(busy, default=(0.0, "", 0))
    behind_s = busy_s - median
    if behind_s > max(thresholds.BEHIND_S, thresholds.BEHIND * step_s):
        words = f"it is {behind_s:.2f} s behind in every step: it costs {100 * behind_s / step_s:.0f}%"
        yield host, rank, Note(BEHIND, words, ("busy_s",))


def _share(gpu: GpuReport) -> float | None:
    return gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else None


def _median(values: Iterable[float | None], otherwise: float) -> float:
    """Return the median of the known values; ``otherwise`` if there are too few."""
    told = known(values)
    return statistics.median(told) if len(told) >= thresholds.FEW else otherwise


def host_notes(frame: Frame, before: Frame, best: Mapping[str, float]) -> list[Note]:
    """Return the notes on a host except those on its GPUs.

    ``before``: an earlier frame, for counters that have grown since; ``best``: of RDMA ports that were ever active, the best
    rate in Gb/s.
    """
    return [*_memory_notes(frame.memory, before.memory), *_disk_notes(frame), *_port_notes(frame, before, best)]


def _memory_notes(memory: Ram, before: Ram) -> Iterator[Note]:
    if memory.oom_kills is not None and before.oom_kills is not None and memory.oom_kills > before.oom_kills:
        killed = memory.oom_kills - before.oom_kills
        yield Note("oom", f"out-of-memory kills: {killed}")
    if memory.total and memory.available is not None and memory.available < thresholds.LOW_RAM * memory.total:
        yield Note("ram", f"RAM is full: {memory.available / (1 << 30):.1f} GiB left", ("ram_used_bytes",))


def full_disks(frame: Frame) -> list[tuple[str, int]]:
    """Return the run's paths on nearly full disks, each with the free bytes."""
    return [(path, free) for path, free, total in frame.disks if nearly_full(free, total)]


def _disk_notes(frame: Frame) -> Iterator[Note]:
    for path, free in full_disks(frame):
        words = f"disk is nearly full: {free / (1 << 30):.1f} GiB left at {path}"
        yield Note(f"disk {path}", words, (FREE,))


def _port_notes(frame: Frame, before: Frame, best: Mapping[str, float]) -> Iterator[Note]:
    earlier = {port.name: port.counters for port in before.ib}
    for port in frame.ib:
        counters = earlier.get(port.name, {})
        grown = {key: port.counters.get(key, 0) - counters[key] for key in IB_ERRORS if key in counters}
        said = [f"{count} {IB_ERRORS[key]}" for key, count in grown.items() if count > 0]
        if said:
            yield Note(f"{port.name} errors", f"{port.name}: {', '.join(said)}", ("ib_bytes_per_s",))
        if port.name in best and "ACTIVE" not in port.state:
            yield Note(f"{port.name} down", f"{port.name} is down", ("ib_bytes_per_s",))
        elif port.gbit_per_s < best.get(port.name, 0.0):
            words = f"{port.name} runs at {port.gbit_per_s:g} Gb/s, and ran at {best[port.name]:g}"
            yield Note(f"{port.name} rate", words, ("ib_bytes_per_s",))


def is_hang(
    beat: Beat, age_s: float, gpus: Sequence[GpuReport], ages: Sequence[float], *, sure: bool, long: bool
) -> bool:
    """Return whether a silence is a hang; it may not be if the rank's GPUs are busy or log lines arrive.

    ``ages``: seconds since the last log line on each host. ``sure``: it already was a hang. ``long``: the silence is so
    long that nothing is an excuse: NCCL keeps a GPU busy while it waits.
    """
    if long or beat.state in STUCK:
        return True
    works = max(known(map(_share, gpus)), default=0.0) > thresholds.IDLE + 0.25
    talks = min(ages, default=math.inf) < age_s / 4
    return not works and (sure or not talks)


def hang_words(beat: Beat, age_s: float, gpus: Sequence[GpuReport], ages: Sequence[float]) -> str:
    """Describe a hang; ``ages``: seconds since the last log line on each host."""
    words = f"rank {beat.rank} is silent for {age_s:.0f} s at step {beat.step} in phase {beat.phase}"
    words += given("; {}", STUCK.get(beat.state, ""))
    if shares := known(map(_share, gpus)):
        words += f"; its GPU draws {100 * statistics.mean(shares):.0f}% of its power"
    if ages:
        words += f"; no log line for {min(ages):.0f} s"
    return words


def trouble_words(failure: Failure) -> str:
    """Describe a failure of a node runner, or of a rank whose node runner has not ended yet."""
    if failure.state or failure.decided or failure.cause.rank is None:
        return failure_words(failure)
    return f"{rank_words(failure.cause)} failed{given(': {}', clean(said_by_rank(failure.cause)))}"


class Pace(NamedTuple):
    """The recent and the expected seconds per step."""

    recent_s: float
    expected_s: float
    is_planned: bool  # the expected time is the plan's; else it is this run's own

    @property
    def is_slow(self) -> bool:
        """Whether recent steps are slower than expected."""
        return self.expected_s < thresholds.PACE * self.recent_s

    @property
    def words(self) -> str:
        """Compare recent and expected step time: ``a step takes 6.00 s, 3% more than planned``."""
        percent = round(100 * (self.recent_s / self.expected_s - 1))
        measure = "planned" if self.is_planned else "usual"
        if not percent:
            return f"a step takes {self.recent_s:.2f} s, as {measure}"
        more = "more" if percent > 0 else "less"
        return f"a step takes {self.recent_s:.2f} s, {abs(percent)}% {more} than {measure}"


@dataclasses.dataclass(slots=True)
class Paces:
    """Caches the pace and the usual step time, which are computed from thousands of steps."""

    key: tuple[int, StepMetrics | None, float | None] = (0, None, None)
    pace: Pace | None = None
    usual_s: float | None = None

    def look(self, metrics: Sequence[StepMetrics], planned_s: float | None) -> "Paces":
        """Return the values for these steps, recomputed only if there is a new step."""
        key = len(metrics), metrics[-1] if metrics else None, planned_s
        if key != self.key:
            self.key, self.pace, self.usual_s = key, pace(metrics, planned_s), usual_s(metrics)
        return self


def usual_s(metrics: Sequence[StepMetrics]) -> float | None:
    """Return the median step time of the run's best ten minutes, so that slow hours do not set the norm."""
    took = [each.step_s for each in metrics if each.step_s]
    return min(map(statistics.median, _blocks(took)), default=None)


def _blocks(took: Sequence[float]) -> Iterator[Sequence[float]]:
    """Divide the steps into blocks of ten minutes and 20 steps or more; the last may be twice as long."""
    begin, elapsed_s = 0, 0.0
    for end, step_s in enumerate(took, 1):
        elapsed_s += step_s
        n_left = len(took) - end
        is_long = elapsed_s >= thresholds.BLOCK_S and end - begin >= thresholds.BLOCK_STEPS
        if n_left == 0 or (is_long and n_left >= thresholds.BLOCK_STEPS):
            yield took[begin:end]
            begin, elapsed_s = end, 0.0


def pace(metrics: Sequence[StepMetrics], planned_s: float | None) -> Pace | None:
    """Return the pace of the last steps (at least five, and a minute); None if it is not known yet.

    The first step of an attempt is excluded: it connects and compiles. A run without a plan is compared with its own
    first steps, once there are as many of them.
    """
    attempt = list(itertools.takewhile(lambda each: each.attempt == metrics[-1].attempt, reversed(metrics)))[:-1]
    n = n_recent(attempt)
    if planned_s is None:
        n = min(n, len(metrics) // 2)
    recent = [each.step_s for each in attempt[:n] if each.step_s]
    if len(recent) < thresholds.PACE_STEPS or sum(recent) < thresholds.PACE_LEAST_S:
        return None
    own_s = usual_s(metrics[: len(metrics) - n])
    expected = [(value_s, is_planned) for value_s, is_planned in ((planned_s, True), (own_s, False)) if value_s]
    if not expected:
        return None
    recent_s = statistics.mean(sorted(recent)[:-1])  # without the slowest: a single slow step does not count
    return Pace(recent_s, *min(expected))


def n_recent(newest_first: Iterable[StepMetrics]) -> int:
    """Return how many steps make up at least five steps and a minute; all, if there are fewer."""
    n, sum_s = 0, 0.0
    for each in newest_first:
        n, sum_s = n + 1, sum_s + (each.step_s or 0.0)
        if n >= thresholds.PACE_STEPS and sum_s >= thresholds.PACE_S:
            break
    return n


def slow_note(found: Pace | None) -> Iterator[Note]:
    """Yield a note if recent steps are slower than expected."""
    if found and found.is_slow:
        than = "planned" if found.is_planned else "usual"
        factor = found.recent_s / found.expected_s
        words = f"a step takes {found.recent_s:.2f} s, {factor:.2g} times the {than} {found.expected_s:.2f} s"
        yield Note("step_s", words, ("step_s",))


class Fall(NamedTuple):
    """A fall of a quantity below its usual level."""

    usual: float
    now: float
    lasts_s: float


@dataclasses.dataclass(slots=True)
class Level:
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
        runs = _low_runs(self.samples, thresholds.FALLEN * usual)
        last = self.samples[-1]
        if not runs or runs[-1][1] != last[0]:
            return None
        *before, (begin, end) = runs
        longest_s = max((until - since for since, until in before), default=0.0)
        lasts_s = end - begin
        if lasts_s < max(every_s, thresholds.LONGER * longest_s):
            return None
        return Fall(usual, last[1], lasts_s)


def _low_runs(samples: Sequence[tuple[float, float]], limit: float) -> list[tuple[float, float]]:
    """Return the time spans below the limit, each from its first to its last sample."""
    runs: list[tuple[float, float]] = []
    was_low = False
    for moment, value in samples:
        is_low = value < limit
        if is_low:
            begin = runs.pop()[0] if was_low else moment
            runs.append((begin, moment))
        was_low = is_low
    return runs


KEPT = 9  # durations kept per phase
SHOWN = {
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
ACTS = {
    Phase.START: "starting",
    Phase.DATA: "reading the data",
    Phase.LOAD: "loading",
    Phase.PIN: "pinning memory",
    Phase.RESUME: "reading the checkpoint",
    Phase.CHECKPOINT: "saving",
    Phase.EVAL: "evaluating",
}  # phases that have a usual time


class Stay(NamedTuple):
    """How long a phase other than training has lasted, and how long it usually takes."""

    phase: Phase
    lasts_s: float
    usual_s: float | None  # None: unknown

    @property
    def words(self) -> str:
        """Describe it: ``saving for 38m, usually 12s``."""
        usual = "" if self.usual_s is None else f", usually {span(self.usual_s)}"
        return f"{ACTS[self.phase]} for {span(self.lasts_s)}{usual}"


@dataclasses.dataclass(slots=True)
class PhaseTimes:
    """The observed durations of each phase."""

    took: dict[Phase, collections.deque[float]] = dataclasses.field(default_factory=dict)
    current: tuple[Phase, float] | None = None  # and since when, by the clock of its rank

    def see(self, phase: Phase, since: float) -> None:
        """Record the current phase of one rank, always the same rank."""
        if self.current and self.current[1] < since:
            before, began = self.current
            self.took.setdefault(before, collections.deque(maxlen=KEPT)).append(since - began)
        self.current = phase, since

    def usual_s(self, phase: Phase, told: Mapping[str, float]) -> float | None:
        """Return the median duration of a phase: observed, else as the host reports; None if unknown."""
        if phase in self.took:
            return statistics.median(self.took[phase])
        return told.get(phase)


def waited_for(phases: Container[Phase]) -> Phase:
    """Return the phase of the rank that holds up the others."""
    return next((phase for phase in SHOWN if phase in phases), Phase.START)


def shown_phase(phases: Iterable[Phase]) -> RunPhase:
    """Return the run's phase: that of the rank that holds up the others."""
    return SHOWN[waited_for({*phases})]


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """Filled by ``moment.remember`` at each moment; a new one for each run."""

    times: PhaseTimes = dataclasses.field(default_factory=PhaseTimes)
    paces: Paces = dataclasses.field(default_factory=Paces)
    power_w: Level = dataclasses.field(default_factory=Level)  # per GPU
    ib_bytes_per_s: Level = dataclasses.field(default_factory=Level)  # per host
    gone: dict[int, Failure] = dataclasses.field(default_factory=dict)  # by attempt, of the rank that was gone first


class Measured(NamedTuple):
    """The last step of this attempt and its times, by the clock of the host that writes the metrics."""

    step: int  # the last
    age_s: float  # since the last
    since_s: float  # since the first


def measured(metrics: Sequence[StepMetrics], attempt: int, now: float) -> Measured | None:
    """Return an attempt's last step and times; None without metrics that have attempt and time."""
    if not metrics or metrics[-1].attempt != attempt:
        return None
    first = metrics[bisect.bisect_left(metrics, attempt, key=operator.attrgetter("attempt"))]
    if first.time is None or metrics[-1].time is None:
        return None
    return Measured(metrics[-1].step, now - metrics[-1].time, now - first.time)


def seconds_between(metrics: Sequence[StepMetrics], saved: int, step: int) -> float:
    """Return the seconds of the steps after a checkpoint; steps without metrics count with the mean."""
    took = known(each.step_s for each in metrics if each.step > saved) or known([metrics[-1].step_s])
    return statistics.mean(took) * max(0, step - saved) if took else 0.0


def unusual(metrics: Sequence[StepMetrics]) -> Iterator[Note]:
    """Yield notes on the last steps, except on their duration."""
    last = metrics[-1]
    if last.step_s is None:
        return
    recent = [each for each in metrics[-thresholds.RECENT_STEPS :] if each.step_s is not None]
    if bad := [each.step for each in recent if each.loss is None]:
        yield Note("loss", f"the loss of step {bad[0]}{and_more(bad)} was not a finite number", ("loss",))
    else:
        yield from _high_loss([each.loss for each in metrics if each.step_s is not None])
    if retries := _retries(metrics):
        shown = counted(retries, "allocator retry", "allocator retries")
        why = "GPU memory is short, and each makes a step slower; `llama405b plan` says what helps"
        yield Note("retries", f"{shown} in the last {thresholds.RECENT_STEPS} steps: {why}", ("step_s",))


def _high_loss(losses: Sequence[float | None]) -> Iterator[Note]:
    """Yield a note if the loss stays above its median; the higher, the sooner."""
    for times, n in thresholds.HIGH_LOSS:
        if usual := _exceeded(losses, times, n):
            words = f"the loss is {losses[-1]:.4g}, for {n} steps above {times:g} times its median of {usual:.4g}"
            yield Note("loss", words, ("loss",))
            return


def _retries(metrics: Sequence[StepMetrics]) -> int:
    """Return the allocator retries of rank 0 within the recent steps of this attempt."""
    recent = [each for each in metrics if each.attempt == metrics[-1].attempt][-thresholds.RECENT_STEPS :]
    counts = [each.num_alloc_retries for each in recent if each.num_alloc_retries is not None]
    return max(0, counts[-1] - counts[0]) if counts else 0


def _exceeded(values: Sequence[float | None], times: float, n: int) -> float | None:
    """Return the median before the last ``n`` values, if each of these exceeds it ``times`` times."""
    before, recent = known(values[:-n]), known(values[-n:])
    if len(before) < thresholds.USUAL_LOSS_STEPS or not recent:
        return None
    median = statistics.median(before)
    return median if 0 < times * median < min(recent) else None


def without_heartbeat(ranks: range, beats: Sequence[Beat], late: Sequence[Beat]) -> Iterator[Note]:
    """Yield which of a host's ranks have no heartbeat, or one that is ``late``, while the metrics go on."""
    if missing := sorted({*ranks} - {beat.rank for beat in beats}):
        yield Note(
            f"{MISSING} {missing}", f"no heartbeat from {fold_ranks(missing)}, although the run trains", STEP_AND_AGE
        )
    if late:
        names, step = fold_ranks([beat.rank for beat in late]), min(beat.step for beat in late)
        yield Note(
            f"late {names}", f"no heartbeat from {names} since step {step}, although the metrics go on", STEP_AND_AGE
        )


def without_metrics(found: Measured | None, beats: Sequence[tuple[Beat, float]], patience_s: float) -> Iterator[Note]:
    """Yield a note if the metrics have stopped while the ranks of the host that writes them continue.

    ``beats``: theirs, with the age of each. Steps without a target have no metrics, and never are many in a row.
    """
    if any(beat.phase is not Phase.TRAIN for beat, _ in beats):
        return
    step, at_step = 0, min((beat.step for beat, _ in beats), default=0)
    silent_s = min((beat.time - beat.phase_since for beat, _ in beats), default=0.0)
    if found:
        step, silent_s = found.step, found.age_s - max((age_s for _, age_s in beats), default=0.0)
    if at_step > step + thresholds.DISAGREE_STEPS and silent_s > patience_s:
        yield Note(
            "metrics", f"no metrics{given(' since step {}', step)}, although its ranks are at step {at_step}", ("step",)
        )
