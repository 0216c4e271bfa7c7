"""Messages for passing a request to a run that trains, and for its answer. Pure."""

import dataclasses

from llama405b.contract.events import RunEvent
from llama405b.contract.records import RequestKind


@dataclasses.dataclass(frozen=True, slots=True)
class AskRequest:
    """Pass a request to a run that trains; sent to the head."""

    run: str
    kind: RequestKind
    by: str
    steps: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class AskReply:
    """The request was written."""

    id: str  # its answer is an event with this id; "": the run is not alive here


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Look for the answer to a request; sent to the head."""

    run: str
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerReply:
    """The answer, if there is one, and whether the run lives, which alone can give it."""

    answer: RunEvent | None
    alive: bool
