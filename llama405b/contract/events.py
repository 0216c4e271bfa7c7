"""Events of a run, as they happen: ``runs/<run>/events/<writer>.jsonl``, one writer each.

An event is never changed; readers merge the files. Whoever shows an event words it.
"""

import dataclasses
import enum

from llama405b.contract.causes import Cause


class EventKind(enum.StrEnum):
    """What happened."""

    STARTED = "started"  # training begins after ``step``, from the model's weights
    RESUMED = "resumed"  # from the checkpoint ``path`` of ``step``
    PASSED_OVER = "passed over"  # the checkpoint ``path``, renamed aside: ``detail`` says why
    SAVED = "saved"  # the checkpoint ``path`` after ``step``, in ``took_s``; ``digest``: of its manifest
    NOT_SAVED = "not saved"  # the state after ``step``: ``detail`` says why; training went on
    AFTER_SAVE = "after save"  # the user's command succeeded for the checkpoint after ``step``, in ``took_s``
    AFTER_SAVE_FAILED = "after save failed"  # it did not: ``detail`` says where and why; it is tried again
    BUDGET = "budget"  # of GPU-hours: ``detail`` says how much is spent
    COPIED = "copied"  # a host's part of the checkpoint ``path`` after ``step``, to the next host
    # ``step``, whose loss was far above the last ones'; ``detail``: how far, what was done, its documents
    SPIKE = "spike"
    NOT_FINITE = "not finite"  # the loss or gradient of ``step``; ``detail``: what was done, its documents
    SKIPPED = "skipped"  # ``step``, in which every target is masked; the ``count``-th of this attempt
    STOPPED = "stopped"  # after ``step``, on request
    REFUSED = "refused"  # the trainer refused its input: ``cause``
    FAILED = "failed"  # the run failed, as its guard saw it: ``cause``
    RESTARTED = "restarted"  # by the guard, from ``path`` ("": the model's weights), for the ``count``-th time
    # the request ``request`` was carried out after ``step``, with ``path``; or ``detail`` says why not
    ANSWERED = "answered"


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
    detail: str = ""  # for people; never parsed
    digest: str = ""  # SHA-256
    took_s: float = 0.0
    blocked_s: float = 0.0  # of ``took_s``: how long training waited, or was slower
