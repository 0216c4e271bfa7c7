"""Parse the reasons that version 0.1 wrote as text: why a run ended on a host. Those texts are fixed; ours are never parsed."""

import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

from llama405b.contract.causes import Cause, CauseKind

FORMS = (  # of ``reason`` in a status, in the order they are tried; the groups are fields of ``Cause``
    (
        r"rank (?P<rank>\d+) exited with (?P<exit_code>\d+): lost contact with another rank in phase (?P<phase>\w+)",
        CauseKind.LOST_PEER,
    ),
    (r"rank (?P<rank>\d+) exited with (?P<exit_code>\d+): stopped with rank (?P<peer>\d+)", CauseKind.FOLLOWED),
    (r"rank (?P<rank>\d+) exited with (?P<exit_code>\d+)", CauseKind.RANK_EXIT),
    (r"rank (?P<rank>\d+) was killed by (?P<signal>SIG[A-Z0-9]+)", CauseKind.RANK_KILLED),
    (r"torchrun was killed by (?P<signal>SIG[A-Z0-9]+)", CauseKind.TORCHRUN_KILLED),
    (r"torchrun failed; see ", CauseKind.TORCHRUN_FAILED),
    (r"stopped by (?P<signal>SIG[A-Z0-9]+)", CauseKind.SIGNAL),
)
SIGNALS = {name: int(number) for name, number in signal.Signals.__members__.items()}
READERS: Mapping[str, Callable[[str], Any]] = {"phase": str, "signal": SIGNALS.get}  # the others are numbers


def cause_of(host: str, reason: str) -> Cause:
    """Parse a reason into a cause; a reason of no known form becomes UNKNOWN, with its text as detail."""
    for form, kind in FORMS:
        if match := re.match(form, reason):
            found = {name: READERS.get(name, int)(text) for name, text in match.groupdict().items()}
            return Cause(kind, host, detail=reason[match.end() :].lstrip(": "), **found)
    return Cause(CauseKind.UNKNOWN, host, detail=reason)
