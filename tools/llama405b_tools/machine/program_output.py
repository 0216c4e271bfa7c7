"""Parse what programs write that are not ours: torchrun when it fails, macOS's ps, and shells. Pure."""

import calendar
import datetime
import re

ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*: \d+ \(local_rank: (\d+)\).*?exitcode\s*: (-?\d+)", re.DOTALL
)
SIGNALED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
STARTED = "%a %b %d %H:%M:%S %Y"  # 24 characters, in local time
NO_DIRECTORY = re.compile(r"\bcd: ")
NO_PROGRAM = re.compile(
    r"\bexec: .*(not found|cannot execute|Permission denied)|\bline \d+: .*: No such file or directory$"
)
NO_MODULE = re.compile(r"No module named '?(\w+)")


def root_cause(text: str) -> tuple[int, int] | None:
    """Return the local rank that torchrun saw fail first on its host, and its exit code (negative: signal), or None."""
    match = ROOT_CAUSE.search(text)
    return (int(match[1]), int(match[2])) if match else None


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
