"""What version 0.1 wrote in words, read as values: why a host's part of a run ended. Its words are fixed; ours are never read."""

import re
import signal

from llama405b.contract.causes import Cause, CauseKind

FORMS = (  # of ``reason`` in a status, in the order in which they are tried
    (
        re.compile(
            r"rank (?P<rank>\d+) exited with (?P<code>\d+): lost contact with another rank in phase (?P<phase>\w+)"
        ),
        CauseKind.LOST_PEER,
    ),
    (re.compile(r"rank (?P<rank>\d+) exited with (?P<code>\d+): stopped with rank (?P<peer>\d+)"), CauseKind.FOLLOWED),
    (re.compile(r"rank (?P<rank>\d+) exited with (?P<code>\d+)"), CauseKind.RANK_EXIT),
    (re.compile(r"rank (?P<rank>\d+) was killed by (?P<signal>SIG[A-Z0-9]+)"), CauseKind.RANK_KILLED),
    (re.compile(r"torchrun was killed by (?P<signal>SIG[A-Z0-9]+)"), CauseKind.TORCHRUN_KILLED),
    (re.compile(r"torchrun failed; see "), CauseKind.TORCHRUN_FAILED),
    (re.compile(r"stopped by (?P<signal>SIG[A-Z0-9]+)"), CauseKind.SIGNAL),
)


def cause_of(host: str, reason: str) -> Cause:
    """The cause that a reason tells; of kind UNKNOWN, in its own words, where it is of no known form."""
    for form, kind in FORMS:
        if match := form.match(reason):
            found = {"rank": None, "peer": None, "code": None, "signal": None, "phase": ""} | match.groupdict()
            return Cause(
                kind,
                host,
                _number(found["rank"]),
                _number(found["peer"]),
                signal=_signal(found["signal"]),
                exit_code=_number(found["code"]),
                phase=found["phase"] or "",
                detail=reason[match.end() :].lstrip(": "),
            )
    return Cause(CauseKind.UNKNOWN, host, detail=reason)


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _signal(name: str | None) -> int | None:
    return int(signal.Signals[name]) if name and name in signal.Signals.__members__ else None
