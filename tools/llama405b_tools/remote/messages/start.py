"""Starting a host's part of a run: the question, what comes of it, and the word to go on. Pure."""

import dataclasses
import enum
from collections.abc import Mapping

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.plan import Plan

KEEP = "keep\n"  # what a starting host is told once all hosts are up
START_WITHIN_S = 120.0  # for the node runner to start torchrun, on a machine however busy
ANSWER_WITHIN_S = START_WITHIN_S + 30.0  # for a host to say so


@dataclasses.dataclass(frozen=True, slots=True)
class StartRequest:
    """Start this host's part of a plan."""

    host: str
    plan: Plan
    secrets: Mapping[str, str]
    ranks: tuple[int, ...]
    again: bool = False  # a restart, which a stop that somebody asked for meanwhile forbids


class StartFault(enum.StrEnum):
    """Why a host did not start."""

    TAKEN = "taken"  # the run was started just now, by somebody else
    STOPPED = "stopped"  # somebody asked for its end
    TMUX = "tmux"  # would not start a session
    ENDED = "ended"  # the node runner did, at once
    SLOW = "slow"  # torchrun was not started in time


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """Whether it did."""

    fault: StartFault | None = None
    by: str = ""
    cause: Cause = Cause(CauseKind.UNKNOWN, detail="it does not say why")  # where the node runner ended
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The host heard that it is to go on."""

    kept: bool
