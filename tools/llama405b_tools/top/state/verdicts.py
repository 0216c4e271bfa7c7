"""What stands out: the GPU or host that deviates from the others, and whether the run hangs. Pure.

A deviation is judged against the median of all GPUs of the run, because a run goes as fast as its slowest rank; nothing is
judged on what is not known.
"""

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from llama405b_tools.machine.gpus import Gpu
from llama405b_tools.run.judge import STATES, Failure, first_failure
from llama405b_tools.top.state import picture
from llama405b_tools.top.state.picture import HostRow, Training

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
    "start": "STARTING",
    "data": "LOADING",
    "load": "LOADING",
    "resume": "LOADING",
    "train": "TRAIN",
    "eval": "EVAL",
}
PHASES |= {"checkpoint": "CKPT", "done": "DONE", "failed": "FAILED"}
IB_ERRORS = {
    "symbol_error": "symbol errors",
    "link_downed": "link downs",
    "port_rcv_errors": "receive errors",
    "out_of_sequence": "packets out of order",
    "packet_seq_err": "sequence errors",
}


class Hang(NamedTuple):
    """A rank that is silent."""

    host: str
    age_s: float
    words: str


def odd_gpus(gpus: Mapping[str, Sequence[Gpu]]) -> dict[tuple[str, int], str]:
    """The GPUs that stand out, by host and index, each with its reason."""
    everyone = [gpu for each in gpus.values() for gpu in each]
    power = _median(_share(gpu) for gpu in everyone)
    clock = _median(gpu.clock_mhz for gpu in everyone)
    heat = _median(gpu.temperature_c for gpu in everyone)
    found = {}
    for host, each in gpus.items():
        for gpu in each:
            words = [gpu.fault] if gpu.fault else []
            words += [f"slowed by {', '.join(gpu.slowed)}"] if gpu.slowed else []
            words += [f"{gpu.ecc_errors} uncorrected ECC errors"] if gpu.ecc_errors else []
            share, busy = _share(gpu), power is not None and power > BUSY
            if share is not None and power is not None and busy and share < LOW_POWER * power:
                words.append(f"power {100 * share:.0f}% where the median is {100 * power:.0f}%")
            if gpu.clock_mhz is not None and clock is not None and busy and gpu.clock_mhz < LOW_CLOCK * clock:
                words.append(f"clock {gpu.clock_mhz} MHz where the median is {clock:.0f}")
            hot = gpu.temperature_c
            if hot is not None and heat is not None and hot >= HOT_C and hot > heat + HOTTER_C:
                words.append(f"{hot} °C where the median is {heat:.0f}")
            if words:
                found[host, gpu.index] = "; ".join(words)
    return found


def slow_ranks(beats: Mapping[str, Sequence[Mapping[str, Any]]], step_s: float | None) -> dict[str, list[str]]:
    """By host, the ranks that keep the others waiting: stopped, or slow in what each does alone: its batch, its update."""
    found: dict[str, list[str]] = {}
    for host, each in beats.items():
        stopped = [f"rank {beat['rank']}: {STATES['T']}" for beat in each if beat["state"] == "T"]
        found |= {host: stopped} if stopped else {}
    for key, words in (("data_s", "its batch"), ("optimizer_s", "clipping and update")):
        median = _median(beat.get(key) for each in beats.values() for beat in each)
        if median is None or step_s is None:
            continue
        for host, each in beats.items():
            for beat in each:
                took = beat.get(key)
                if took is not None and took > SLOW * median and took - median > SLOW_PART * step_s:
                    found.setdefault(host, []).append(
                        f"rank {beat['rank']}: {words} took {took:.2f} s where the median is {median:.2f} s"
                    )
    return found


def _share(gpu: Gpu) -> float | None:
    return gpu.power_w / gpu.power_limit_w if gpu.power_w is not None and gpu.power_limit_w else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) >= FEW else None


def host_notes(frame: Mapping[str, Any], before: Mapping[str, Any], active: Container[tuple[str, str]]) -> list[str]:
    """What stands out on a host beside its GPUs.

    ``before``: an earlier frame, for counters that grew since; ``active``: RDMA ports (device, port) that ever were.
    """
    notes = []
    memory, old = frame["memory"], before["memory"]
    if memory["oom_kills"] is not None and old["oom_kills"] is not None and memory["oom_kills"] > old["oom_kills"]:
        notes.append(f"{memory['oom_kills'] - old['oom_kills']} processes killed for want of memory")
    if memory["total"] and memory["available"] is not None and memory["available"] < LOW_RAM * memory["total"]:
        notes.append(f"RAM is full: {memory['available'] / (1 << 30):.1f} GiB left")
    for path, free, total in frame["disks"]:
        if free < LOW_DISK_BYTES or free < LOW_DISK * total:
            notes.append(f"disk is nearly full: {free / (1 << 30):.1f} GiB left at {path}")
    earlier = {(port["device"], port["port"]): port for port in before["ib"]}
    for port in frame["ib"]:
        name = f"{port['device']}/{port['port']}"
        counters = earlier.get((port["device"], port["port"]), {}).get("counters", {})
        grown = [
            f"{port['counters'][key] - counters[key]} {words}"
            for key, words in IB_ERRORS.items()
            if key in counters and port["counters"].get(key, 0) > counters[key]
        ]
        notes += [f"{name}: {', '.join(grown)}"] if grown else []
        if (port["device"], port["port"]) in active and "ACTIVE" not in port["state"]:
            notes.append(f"{name} is down")
    return notes


def hang_words(
    beat: Mapping[str, Any], age_s: float, gpus: Sequence[Gpu], ages: Sequence[float], *, sure: bool
) -> str | None:
    """Why it is a hang, in words; None where the GPUs work or the logs go on, so that it may be none.

    ``ages``: seconds since the last log line on each host. ``sure``: it was one already, or the silence is so long that
    log lines excuse nothing.
    """
    shares = [share for share in map(_share, gpus) if share is not None]
    stuck = STATES.get(beat["state"], "")
    works, talks = shares and max(shares) > IDLE + 0.25, ages and min(ages) < age_s / 4
    if not stuck and (works or (talks and not sure)):
        return None
    words = f"rank {beat['rank']} is silent for {age_s:.0f} s at step {beat['step']} in phase {beat['phase']}"
    words += f"; {stuck}" if stuck else ""
    words += f"; its host's GPUs draw {100 * statistics.mean(shares):.0f}% of their power" if shares else ""
    words += f"; no log line for {min(ages):.0f} s" if ages else ""
    return words


def phase_of(phases: Sequence[str]) -> str:
    """One word for the ranks' phases: the one that the others wait for."""
    order = ("failed", "start", "data", "load", "resume", "checkpoint", "eval", "train", "done")
    known = [phase for phase in order if phase in phases]
    return PHASES[known[0]] if known else "STARTING"


def verdict(
    hosts: Sequence[HostRow],
    training: Training | None,
    hang: Hang | None,
    failures: Sequence[Failure],
    stall: str,
) -> tuple[str, str, int]:
    """The one word for the whole, why, and the exit code."""
    if hang:
        return "HUNG", f"{hang.host}: {hang.words}", 3
    if failures:
        worst = first_failure(failures)
        return "FAILED", f"{worst.host}: {worst.what}", 3
    lost = [row for row in hosts if picture.SEVERITY[row.state] == 2]
    if lost:
        return (
            "DOWN",
            f"{lost[0].name}: {lost[0].state} {lost[0].why}" + (f", and {len(lost) - 1} more" if lost[1:] else ""),
            3,
        )
    reasons = [stall] if stall else []
    if training and "GONE" in training.guard and training.phase not in ("DONE", "STOPPED"):
        reasons.append("its guard is gone: nobody restarts this run")
    reasons += [f"{row.name}: {row.state} {row.why}" for row in hosts if picture.SEVERITY[row.state] == 1]
    reasons += [f"{row.name}: {row.notes[0]}" for row in hosts if row.notes]
    if training and training.network == "SOCKET":
        reasons.insert(0, "training runs over TCP sockets")
    if reasons:
        return "DEGRADED", reasons[0] + (f", and {len(reasons) - 1} more" if reasons[1:] else ""), 1
    waiting = [row.name for row in hosts if row.state == picture.CONNECTING]
    return ("CONNECTING", f"waiting for {len(waiting)} hosts", 1) if waiting else ("HEALTHY", "", 0)
