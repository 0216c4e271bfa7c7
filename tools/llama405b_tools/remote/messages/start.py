"""Messages for starting a host's part of a run: the request, its outcome, and the order to keep it. Pure."""

import dataclasses
import enum
from collections.abc import Mapping

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.plan import Plan
from llama405b.contract.records import GuardState

KEEP = "keep\n"  # sent to a starting host once all hosts are up
TMUX_WITHIN_S = 60.0  # for tmux to start a session
START_WITHIN_S = 120.0  # for the node runner to start torchrun, however busy the machine is
ANSWER_WITHIN_S = TMUX_WITHIN_S + START_WITHIN_S + 30.0  # for a host to report it


@dataclasses.dataclass(frozen=True, slots=True)
class StartRequest:
    """Start this host's part of a plan."""

    host: str
    plan: Plan
    secrets: Mapping[str, str]
    ranks: tuple[int, ...]
    again: bool = False  # a restart, refused if somebody has stopped the run meanwhile
    guard: GuardState | None = None  # that was asked for; in a restart the guard itself says what it does
    known_stop: float = 0.0  # the time of the stop that this launch ends, by the host's clock; 0: there was none


class StartFault(enum.StrEnum):
    """Why a host did not start."""

    TAKEN = "taken"  # somebody else has just started the run
    STOPPED = "stopped"  # somebody stopped the run
    STOPPED_SINCE = "stopped since"  # somebody stopped what was started here
    TMUX = "tmux"  # could not start a session
    ENDED = "ended"  # the node runner ended immediately
    SLOW = "slow"  # torchrun was not started in time


NOT_OURS = (StartFault.TAKEN, StartFault.STOPPED)  # this launch did nothing on the host, and has nothing to end there


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """Whether the host started, and why not."""

    fault: StartFault | None = None
    by: str = ""
    cause: Cause = Cause(CauseKind.UNKNOWN, detail="it does not say why")  # if the node runner ended
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The host has received the order to keep its part, and does so unless it was stopped meanwhile."""

    stopped_by: str = ""  # who did
