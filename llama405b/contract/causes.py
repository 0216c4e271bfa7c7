"""Why a rank, a host or a run ended, as values: decisions use these values; text is made only where it is shown."""

import dataclasses
import enum


class CauseKind(enum.StrEnum):
    """What happened."""

    STOPPED = "stopped"  # on request: ``by``
    SIGNAL = "signal"  # the node runner received ``signal``, and nobody had asked it to stop
    RUNNER_KILLED = "runner killed"  # the node runner was killed; its guardian ended the rest
    NOT_STARTED = "not started"  # torchrun could not be started: ``detail``
    SETUP_FAILED = "setup failed"  # ``exit_code`` and ``detail``: the setup line
    TORCHRUN_KILLED = "torchrun killed"  # by ``signal``
    TORCHRUN_FAILED = "torchrun failed"  # without naming a rank of this host; ``detail``: its log
    RANK_KILLED = "rank killed"  # ``rank`` by ``signal``
    RANK_EXIT = "rank exit"  # ``rank`` with ``exit_code``; ``detail``: what it raised
    REFUSED = "refused"  # the trainer refused its input, on ``rank``: it would refuse it again
    FOLLOWED = "followed"  # ``rank`` stopped because ``peer`` refused its input
    LOST_PEER = "lost peer"  # ``rank`` lost contact with another, in ``phase``: the failure began elsewhere
    SPIKE = "loss spike"  # and training.on_spike is stop
    NOT_FINITE = "not finite"  # the loss or the gradient of a step, on every rank
    SOCKETS = "sockets"  # NCCL fell back to TCP although there is RDMA; ``detail``: its log line
    VANISHED = "vanished"  # the host's processes are gone and left no status
    LEFTOVERS = "leftovers"  # ``count`` processes of an earlier attempt
    NEVER_STARTED = "never started"
    NOT_KEPT = "not kept"  # whoever launched it never heard that all hosts had started, so the host ended its part
    HALF_STOPPED = "half stopped"  # it goes on here, although ``by`` stopped it on other hosts
    FILES_GONE = "files gone"  # the host ran the run, but has no files of it any more
    NO_RUN = "no run"  # the host does not know the run
    HUNG = "hung"  # ``rank`` has been silent for ``age_s``, in ``phase`` at ``step``
    UNREACHABLE = "unreachable"  # the operator's machine cannot reach the host; ``detail``: why
    UNKNOWN = "unknown"  # nothing says why


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """What happened, with its data; fields that do not apply keep their defaults."""

    kind: CauseKind
    host: str = ""
    rank: int | None = None
    peer: int | None = None  # the other rank involved
    signal: int | None = None
    exit_code: int | None = None
    phase: str = ""
    step: int | None = None
    age_s: float | None = None
    count: int | None = None
    process_state: str = ""  # as the kernel writes it: R, S, D, T, …
    by: str = ""  # user@machine
    detail: str = ""  # a program's own message, for people; never parsed
