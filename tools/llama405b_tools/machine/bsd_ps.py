"""The output of macOS's ``ps -o stat=,lstart= -p PID`` in the C locale. Pure."""

import calendar
import datetime

STARTED = "%a %b %d %H:%M:%S %Y"  # 24 characters, in local time


def began_at(text: str) -> int | None:
    """Return when the process started, in seconds by its clock; None if it is gone or a zombie."""
    state, _, started = text.strip().partition(" ")
    if not state or state.startswith("Z"):
        return None
    try:
        return calendar.timegm(datetime.datetime.strptime(started.strip(), STARTED).timetuple())
    except ValueError:
        return None
