"""What stands out: the GPU or host that deviates from the others, and whether the run hangs. Pure.

Deviations are judged against the median of the run's GPUs of that model, because a run is as fast as its slowest rank. Unknown
values are never judged.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from llama405b.capacity.disk import nearly_full
from llama405b.contract.causes import STUCK, rank_words, said_by_rank
from llama405b.contract.phrases import given
from llama405b.contract.records import Phase
from llama405b_tools.machine.gpus import GpuReport
from llama405b_tools.remote.messages.host_run import Beat
from llama405b_tools.run.judge import Failure, failure_words
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import Frame, Ram
from llama405b_tools.top.state.picture import known

ALONE = {"data_s": "its batch", "optimizer_s": "clipping and update"}  # what each rank does alone
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
    """Something that stands out."""

    key: str  # words without the numbers that change
    words: str
    fields: tuple[str, ...] = ()  # of the row or cell that is drawn: those that show it


HALTED = {
    "T": Note("stopped", STUCK["T"], ("state",)),
    "Z": Note("ended", STUCK["Z"], ("state",)),
    "": Note("gone", "its process is gone", ("state",)),
}  # by the state of a rank's process: the others wait for it, whatever else stands out


class Hang(NamedTuple):
    """A rank that is silent, or a host that the others wait for."""

    host: str
    age_s: float
    words: str
    beat: BeatId


def odd_gpus(
    gpus: Mapping[str, Sequence[GpuReport]], compared: Mapping[str, Collection[int]]
) -> dict[tuple[str, int], Note]:
    """Return the GPUs that stand out, by host and index, each with its reason.

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
    """Yield what stands out about one GPU."""
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
    """Yield power and clock below those of the others, which are busy."""
    share = _share(gpu)
    if share is not None and share < thresholds.LOW_POWER * usual.power:
        yield Note("power", f"power {100 * share:.0f}% (median {100 * usual.power:.0f}%)", ("power_w",))
    if gpu.clock_mhz is not None and gpu.clock_mhz < thresholds.LOW_CLOCK * usual.clock:
        yield Note("clock", f"clock {gpu.clock_mhz} MHz (median {usual.clock:.0f})", ("clock_mhz",))


def halted_ranks(everyone: Sequence[tuple[str, Beat]]) -> Iterator[tuple[str, Beat, Note]]:
    """Yield host and heartbeat of the ranks that cannot go on: their process is stopped, has ended or is gone.

    A host on which no rank's process is found does not see them (they are in a container).
    """
    seen = {host for host, beat in everyone if beat.state}
    for host, beat in everyone:
        if beat.state in HALTED and host in seen and beat.phase not in (Phase.DONE, Phase.FAILED):
            yield host, beat, HALTED[beat.state]


def slow_ranks(everyone: Sequence[tuple[str, Beat]], step_s: float) -> Iterator[tuple[str, int, Note]]:
    """Yield host and number of the ranks that delay the others: slow in what each does alone (batch, update)."""
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
    """Yield the rank that computes longer than the median rank, and what that costs: the others wait for it in every step.

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
    """Return what stands out on a host other than its GPUs.

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
    """Return the paths that a run writes to whose disk is nearly full, each with the bytes left."""
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
    """Whether a silence is a hang: it may not be one if the rank's GPUs are busy or log lines arrive.

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
    """Describe a failure: of a node runner that has ended, or of a rank whose node runner is about to end."""
    if failure.state or failure.decided or failure.cause.rank is None:
        return failure_words(failure)
    return f"{rank_words(failure.cause)} failed{given(': {}', clean(said_by_rank(failure.cause)))}"
