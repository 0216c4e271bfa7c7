"""What stands out: the GPU or host that deviates from the others, and whether the run hangs. Pure.

A deviation is judged against the median of all GPUs of the run, because a run goes as fast as its slowest rank; nothing is
judged on what is not known.
"""

import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b.contract.records import Phase
from llama405b.contract.words import STUCK, said_by_rank
from llama405b_tools.machine.gpus import Gpu
from llama405b_tools.remote.messages.runs import Beat
from llama405b_tools.run.endings import failure_words
from llama405b_tools.run.judge import Failure, first_failure
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state.frames import Frame, Ram
from llama405b_tools.top.state.picture import SEVERITY, GuardShown, HostRow, HostState, RunPhase, Training, Verdict

FEW = 4  # GPUs that have to tell before one can deviate
LOW_POWER, LOW_CLOCK = 0.75, 0.9  # of the median
SLOW, SLOW_PART = 2.0, 0.2  # times the median, and by so much of a step
HOT_C, HOTTER_C = 80, 8  # and so much above the median
BUSY = 0.4  # median power over limit: below, GPUs idle together (an offloaded optimizer, a checkpoint)
IDLE = 0.35  # power over limit of a GPU that waits: a hang's sign
LOW_RAM, LOW_DISK, LOW_DISK_BYTES = 0.03, 0.02, 1 << 30
HANG_STEPS = 5  # times the median step
STALL_STEPS, STALL_S = 3, 15.0  # times the median step, and at least so long: not a hang yet, and not healthy
PHASES = {
    Phase.FAILED: RunPhase.FAILED,
    Phase.START: RunPhase.STARTING,
    Phase.DATA: RunPhase.LOADING,
    Phase.LOAD: RunPhase.LOADING,
    Phase.RESUME: RunPhase.LOADING,
    Phase.CHECKPOINT: RunPhase.CKPT,
    Phase.EVAL: RunPhase.EVAL,
    Phase.TRAIN: RunPhase.TRAIN,
    Phase.DONE: RunPhase.DONE,
}  # of a rank -> of the run, in the order in which the others wait for it
IB_ERRORS = {
    "symbol_error": "symbol errors",
    "link_downed": "link downs",
    "port_rcv_errors": "receive errors",
    "out_of_sequence": "packets out of order",
    "packet_seq_err": "sequence errors",
}


class Note(NamedTuple):
    """Something that stands out."""

    key: str  # what it is, without the numbers that change
    words: str


class SilentBeat(NamedTuple):
    """The last heartbeat of a rank that is silent, to know it again."""

    host: str
    rank: int
    time: float


class Hang(NamedTuple):
    """A rank that is silent, or a host that the others wait for."""

    host: str
    age_s: float
    words: str
    beat: SilentBeat


def odd_gpus(gpus: Mapping[str, Sequence[Gpu]]) -> dict[tuple[str, int], Note]:
    """The GPUs that stand out, by host and index, each with its reason."""
    everyone = [gpu for each in gpus.values() for gpu in each]
    usual = Usual(
        power=_median(_share(gpu) for gpu in everyone),
        clock=_median(gpu.clock_mhz for gpu in everyone),
        heat=_median(gpu.temperature_c for gpu in everyone),
    )
    found = {}
    for host, each in gpus.items():
        for gpu in each:
            if notes := list(_oddities(gpu, usual)):
                joined = Note("+".join(note.key for note in notes), "; ".join(note.words for note in notes))
                found[host, gpu.index] = joined
    return found


class Usual(NamedTuple):
    """Medians over all GPUs of the run; None where too few tell."""

    power: float | None  # of the limit
    clock: float | None  # MHz
    heat: float | None  # °C


def _oddities(gpu: Gpu, usual: Usual) -> Iterator[Note]:
    """What stands out of one GPU."""
    if gpu.fault:
        yield Note("fault", gpu.fault)
    if gpu.slowed:
        yield Note("slowed", f"slowed by {', '.join(gpu.slowed)}")
    if gpu.ecc_errors:
        yield Note("ecc", f"{gpu.ecc_errors} uncorrected ECC errors")
    if usual.power is not None and usual.power > BUSY:
        yield from _below(gpu, usual, usual.power)
    hot = gpu.temperature_c
    if hot is not None and usual.heat is not None and hot >= HOT_C and hot > usual.heat + HOTTER_C:
        yield Note("heat", f"{hot} °C where the median is {usual.heat:.0f}")


def _below(gpu: Gpu, usual: Usual, power: float) -> Iterator[Note]:
    """Power and clock below those of the others, which work."""
    share = _share(gpu)
    if share is not None and share < LOW_POWER * power:
        yield Note("power", f"power {100 * share:.0f}% where the median is {100 * power:.0f}%")
    if gpu.clock_mhz is not None and usual.clock is not None and gpu.clock_mhz < LOW_CLOCK * usual.clock:
        yield Note("clock", f"clock {gpu.clock_mhz} MHz where the median is {usual.clock:.0f}")


def slow_ranks(beats: Mapping[str, Sequence[Beat]], step_s: float | None) -> dict[str, list[Note]]:
    """By host, the ranks that keep the others waiting: stopped, or slow in what each does alone: its batch, its update."""
    found: dict[str, list[Note]] = {}
    for host, each in beats.items():
        for beat in each:
            if beat.state == "T":
                found.setdefault(host, []).append(Note(f"stopped {beat.rank}", f"rank {beat.rank}: {STUCK['T']}"))
    if step_s is None:
        return found
    everyone = [(host, beat) for host, each in beats.items() for beat in each]
    for what, parts in (
        ("its batch", [(host, beat.rank, beat.data_s) for host, beat in everyone]),
        ("clipping and update", [(host, beat.rank, beat.optimizer_s) for host, beat in everyone]),
    ):
        median = _median(took for _, _, took in parts)
        for host, rank, took in parts:
            if median is None or took is None or took <= SLOW * median or took - median <= SLOW_PART * step_s:
                continue
            words = f"rank {rank}: {what} took {took:.2f} s where the median is {median:.2f} s"
            found.setdefault(host, []).append(Note(f"slow {rank} {what}", words))
    return found


def _share(gpu: Gpu) -> float | None:
    return gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) >= FEW else None


def host_notes(frame: Frame, before: Frame, active: Container[tuple[str, str]]) -> list[Note]:
    """What stands out on a host beside its GPUs.

    ``before``: an earlier frame, for counters that grew since; ``active``: RDMA ports (device, port) that ever were.
    """
    return [*_memory_notes(frame.memory, before.memory), *_disk_notes(frame), *_port_notes(frame, before, active)]


def _memory_notes(memory: Ram, before: Ram) -> Iterator[Note]:
    if memory.oom_kills is not None and before.oom_kills is not None and memory.oom_kills > before.oom_kills:
        killed = memory.oom_kills - before.oom_kills
        yield Note("oom", f"{killed} processes killed for want of memory")
    if memory.total and memory.available is not None and memory.available < LOW_RAM * memory.total:
        yield Note("ram", f"RAM is full: {memory.available / (1 << 30):.1f} GiB left")


def _disk_notes(frame: Frame) -> Iterator[Note]:
    for path, free, total in frame.disks:
        if free < LOW_DISK_BYTES or free < LOW_DISK * total:
            yield Note(f"disk {path}", f"disk is nearly full: {free / (1 << 30):.1f} GiB left at {path}")


def _port_notes(frame: Frame, before: Frame, active: Container[tuple[str, str]]) -> Iterator[Note]:
    earlier = {(port.device, port.port): port.counters for port in before.ib}
    for port in frame.ib:
        name, counters = f"{port.device}/{port.port}", earlier.get((port.device, port.port), {})
        grown = {key: port.counters.get(key, 0) - counters[key] for key in IB_ERRORS if key in counters}
        said = [f"{count} {IB_ERRORS[key]}" for key, count in grown.items() if count > 0]
        if said:
            yield Note(f"{name} errors", f"{name}: {', '.join(said)}")
        if (port.device, port.port) in active and "ACTIVE" not in port.state:
            yield Note(f"{name} down", f"{name} is down")


def hang_words(beat: Beat, age_s: float, gpus: Sequence[Gpu], ages: Sequence[float], *, sure: bool) -> str | None:
    """Why it is a hang, in words; None where the GPUs work or the logs go on, so that it may be none.

    ``ages``: seconds since the last log line on each host. ``sure``: it was one already, or the silence is so long that
    log lines excuse nothing.
    """
    shares = [share for share in map(_share, gpus) if share is not None]
    stuck = STUCK.get(beat.state, "")
    works, talks = shares and max(shares) > IDLE + 0.25, ages and min(ages) < age_s / 4
    if not stuck and (works or (talks and not sure)):
        return None
    words = f"rank {beat.rank} is silent for {age_s:.0f} s at step {beat.step} in phase {beat.phase}"
    if stuck:
        words += f"; {stuck}"
    if shares:
        words += f"; its host's GPUs draw {100 * statistics.mean(shares):.0f}% of their power"
    if ages:
        words += f"; no log line for {min(ages):.0f} s"
    return words


def phase_of(phases: Container[Phase]) -> RunPhase:
    """One word for the ranks' phases: the one that the others wait for."""
    return next((shown for phase, shown in PHASES.items() if phase in phases), RunPhase.STARTING)


class Judgement(NamedTuple):
    """The one word for the whole, why, and the exit code that says it."""

    verdict: Verdict
    why: str
    exit_code: int


def verdict(
    hosts: Sequence[HostRow],
    training: Training | None,
    hang: Hang | None,
    failures: Sequence[Failure],
    stall: str,
) -> Judgement:
    """Judge the whole: what ends a run before what slows it, and that before what is not yet known."""
    if hang:
        return Judgement(Verdict.HUNG, f"{hang.host}: {hang.words}", 3)
    if failures:
        worst = first_failure(failures)
        return Judgement(Verdict.FAILED, f"{worst.host}: {trouble_words(worst)}", 3)
    lost = [row for row in hosts if SEVERITY[row.state] == 2]
    if lost:
        more = f", and {len(lost) - 1} more" if lost[1:] else ""
        return Judgement(Verdict.DOWN, f"{lost[0].name}: {lost[0].state} {lost[0].why}{more}", 3)
    if reasons := _reasons(hosts, training, stall):
        more = f", and {len(reasons) - 1} more" if reasons[1:] else ""
        return Judgement(Verdict.DEGRADED, f"{reasons[0]}{more}", 1)
    waiting = [row.name for row in hosts if row.state is HostState.CONNECTING]
    if waiting:
        return Judgement(Verdict.CONNECTING, f"waiting for {len(waiting)} hosts", 1)
    return Judgement(Verdict.HEALTHY, "", 0)


def _reasons(hosts: Sequence[HostRow], training: Training | None, stall: str) -> list[str]:
    """What slows the run, or may, worst first."""
    reasons = []
    if training and training.network == "SOCKET":
        reasons.append("training runs over TCP sockets")
    if stall:
        reasons.append(stall)
    if training and training.guard is GuardShown.GONE and training.phase not in (RunPhase.DONE, RunPhase.STOPPED):
        reasons.append("its guard is gone: nobody restarts this run")
    reasons += [f"{row.name}: {row.state} {row.why}" for row in hosts if SEVERITY[row.state] == 1]
    return reasons + [f"{row.name}: {row.notes[0]}" for row in hosts if row.notes]


def trouble_words(failure: Failure) -> str:
    """What a failure is: of a node runner that has ended, or of a rank that will be in a moment."""
    if failure.state:
        return failure_words(failure)
    said = clean(said_by_rank(failure.cause))
    return f"rank {failure.cause.rank} failed{f': {said}' if said else ''}"
