"""What there is to tell of a run, as it happens: ``runs/<run>/events/<writer>.jsonl``, one writer each.

An event is never changed; readers merge the files. What a person reads is made from it where it is shown.
"""

import dataclasses
import enum

from llama405b.contract.causes import Cause


class EventKind(enum.StrEnum):
    """What happened."""

    STARTED = "started"  # training begins after ``step``, from the model's weights
    RESUMED = "resumed"  # from the checkpoint ``path``, of ``step``
    PASSED_OVER = "passed over"  # the checkpoint ``path``, renamed aside: ``detail`` says why
    SAVED = "saved"  # the checkpoint ``path`` after ``step``
    SKIPPED = "skipped"  # ``step``, in which every target is masked; the ``count``-th of this attempt
    STOPPED = "stopped"  # after ``step``, as somebody asked
    REFUSED = "refused"  # the trainer its input: ``cause``
    FAILED = "failed"  # the run, as its guard saw it: ``cause``
    RESTARTED = "restarted"  # by the guard, from ``path`` ("": the model's weights), for the ``count``-th time
    ANSWERED = (
        "answered"  # the request ``request``: carried out after ``step``, with ``path``; or not, and ``detail`` why
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that happened to a run."""

    time: float  # writer's clock, seconds since the epoch
    writer: str  # rank-0, guard
    kind: EventKind
    attempt: int = 0
    step: int | None = None
    path: str = ""
    count: int = 0
    cause: Cause | None = None
    request: str = ""
    detail: str = ""  # for a person to read; never read by a program
