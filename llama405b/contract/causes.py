"""Why a rank, a host or a run ended, as values: what is decided is decided by these, and words are made where they are shown."""

import dataclasses
import enum


class CauseKind(enum.StrEnum):
    """What happened."""

    STOPPED = "stopped"  # somebody asked for the end: ``by``
    SIGNAL = "signal"  # the node runner was told to end by ``signal``, and nobody asked for it
    RUNNER_KILLED = "runner killed"  # the node runner was; its guardian ended the rest
    NOT_STARTED = "not started"  # torchrun could not be started: ``detail``
    SETUP_FAILED = "setup failed"  # the setup line: ``exit_code`` and the line
    TORCHRUN_KILLED = "torchrun killed"  # by ``signal``
    TORCHRUN_FAILED = "torchrun failed"  # and named no rank of this host; ``detail``: its log
    RANK_KILLED = "rank killed"  # ``rank`` by ``signal``
    RANK_EXIT = "rank exit"  # ``rank`` with ``exit_code``; ``detail``: what it raised
    REFUSED = "refused"  # the trainer its input, on ``rank``: the same again would be refused again
    FOLLOWED = "followed"  # ``rank`` refused, as ``peer`` did
    LOST_PEER = "lost peer"  # ``rank`` lost contact with another, in ``phase``: the fault began elsewhere
    NOT_FINITE = "not finite"  # the loss or the gradient of a step, on every rank
    SOCKETS = "sockets"  # NCCL fell back to TCP although there is RDMA; ``detail``: its line
    VANISHED = "vanished"  # the host's processes are gone without a word
    LEFTOVERS = "leftovers"  # ``count`` processes of an earlier attempt
    NEVER_STARTED = "never started"
    NO_RUN = "no run"  # the host does not know it
    HUNG = "hung"  # ``rank`` is silent for ``age_s``, in ``phase`` at ``step``
    UNREACHABLE = "unreachable"  # the host, from the operator's machine; ``detail``: why
    UNKNOWN = "unknown"  # as an earlier version wrote it, in its own words: ``detail``


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """What happened, with its data; what does not apply keeps its default."""

    kind: CauseKind
    host: str = ""
    rank: int | None = None
    peer: int | None = None  # another rank that has to do with it
    signal: int | None = None
    exit_code: int | None = None
    phase: str = ""
    step: int | None = None
    age_s: float | None = None
    count: int | None = None
    process_state: str = ""  # as the kernel writes it: R, S, D, T, …
    by: str = ""  # user@machine
    detail: str = ""  # what a program said, for a person to read; never read by a program
