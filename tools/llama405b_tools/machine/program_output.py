"""Parse what programs write that are not ours: torchrun when it fails, macOS's ps, and shells. Pure."""

import calendar
import datetime
import re

FAILED_RANK = re.compile(r"^  rank\s*: \d+ \(local_rank: (\d+)\)\n  exitcode\s*: (-?\d+)", re.MULTILINE)
SIGNALED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
STARTED = "%a %b %d %H:%M:%S %Y"  # 24 characters, in local time
NO_DIRECTORY = re.compile(r"\bcd: ")
NO_PROGRAM = re.compile(
    r"\bexec: .*(not found|cannot execute|Permission denied)|\bline \d+: .*: No such file or directory$"
)
NO_MODULE = re.compile(r"No module named '?(\w+)")


def failed_ranks(text: str) -> dict[int, int]:
    """Return the local ranks that torchrun saw fail on its host, each with its exit code (negative: signal).

    The first is its "first observed failure": the lowest of those that it saw within a second.
    """
    return {int(local_rank): int(exit_code) for local_rank, exit_code in reversed(FAILED_RANK.findall(text))}


def load_per_core(text: str) -> float:
    """Return how many processes want each core, from ``/proc/loadavg`` and the number of cores; 1 if that is not told."""
    try:
        first, *_, cores = text.split()
        return float(first) / int(cores)
    except (ValueError, ZeroDivisionError):
        return 1.0


def ended_by(text: str) -> int | None:
    """Return the signal that torchrun itself was ended with, and that it passed on to its ranks; None if there was none."""
    match = SIGNALED.search(text)
    return int(match[1]) if match else None


def began_at(text: str) -> int | None:
    """Return when the process started, in seconds by its clock; None if it is gone or a zombie."""
    state, _, started = text.strip().partition(" ")
    if not state or state.startswith("Z"):
        return None
    try:
        return calendar.timegm(datetime.datetime.strptime(started.strip(), STARTED).timetuple())
    except ValueError:
        return None
