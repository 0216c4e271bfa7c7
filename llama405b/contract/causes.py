"""Why a rank, a host or a run ended, as values, and in words: decisions use the values, and no program parses the words."""

import dataclasses
import enum
import signal

from llama405b.contract.phrases import given


class CauseKind(enum.StrEnum):
    """What happened."""

    STOPPED = "stopped"  # on request: ``by``
    SIGNAL = "signal"  # the node runner received ``signal``, and nobody had asked it to stop
    RUNNER_KILLED = "runner killed"  # the node runner was killed; its guardian ended the rest
    NOT_STARTED = "not started"  # torchrun could not be started: ``detail``
    SETUP_FAILED = "setup failed"  # ``exit_code`` and ``detail``: the setup line
    TORCHRUN_KILLED = "torchrun killed"  # by ``signal``
    TORCHRUN_FAILED = "torchrun failed"  # without naming a rank of this host; ``detail``: its log, and how that ends
    RANK_KILLED = "rank killed"  # ``rank`` by ``signal``
    RANK_EXIT = "rank exit"  # ``rank`` with ``exit_code``; ``detail``: what it raised
    REFUSED = "refused"  # the trainer refused its input, on ``rank``: it would refuse it again
    FOLLOWED = "followed"  # ``rank`` stopped because ``peer`` refused its input
    LOST_PEER = "lost peer"  # ``rank`` lost contact with another, in ``phase``: it began there; ``detail``: for the log
    SPIKE = "loss spike"  # and training.on_loss_spike is stop
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
    finding: str = ""  # what an autopsy found, for people
    gpu: str = ""  # of ``rank``: its number on the host


STUCK = {
    "T": "it is stopped by a signal",
    "D": "it is waiting for a disk or driver that does not respond",
    "Z": "its process has ended, and torchrun has not noticed",
}  # by process state
SAID_BY_RANK = {  # how a rank reports its own end; other kinds: the detail alone
    CauseKind.LOST_PEER: "lost contact with another rank in phase {phase}",
    CauseKind.FOLLOWED: "rank {peer} failed: {detail}",
}
WORDS = {
    CauseKind.STOPPED: "stopped by {by}",
    CauseKind.SIGNAL: "stopped by {signal}",
    CauseKind.RUNNER_KILLED: "the node runner was killed",
    CauseKind.NOT_STARTED: "torchrun could not be started ({detail})",
    CauseKind.SETUP_FAILED: "the setup line failed with exit code {exit_code}: {detail}",
    CauseKind.TORCHRUN_KILLED: "torchrun was killed by {signal}",
    CauseKind.TORCHRUN_FAILED: "torchrun failed; see {detail}",
    CauseKind.RANK_KILLED: "{who} was killed by {signal}",
    CauseKind.SOCKETS: "NCCL fell back to TCP sockets although RDMA ports are up ({detail}); "
    "set NCCL_IB_HCA with --env, or add --allow-sockets",
    CauseKind.VANISHED: "its processes disappeared without a trace; was the machine restarted?",
    CauseKind.NOT_KEPT: "its launch was interrupted before every host had started",
    CauseKind.HALF_STOPPED: "still running here, although {by} stopped the run on other hosts; `stop` it here, too",
    CauseKind.FILES_GONE: "it took part, but has no files of the run any more; was it reinstalled, or is a disk not mounted?",
    CauseKind.HUNG: "hung: {who} is silent for {age_s:.0f} s, in phase {phase} at step {step}",
    CauseKind.UNREACHABLE: "cannot be reached: {detail}",
    CauseKind.UNKNOWN: "{detail}",
}


def words(cause: Cause) -> str:
    """Say in a clause what happened; '' if the kind says it all."""
    if cause.kind in WORDS:
        found = given("; autopsy: {}", cause.finding) or given("; {}", STUCK.get(cause.process_state))
        return _filled(WORDS[cause.kind], cause) + found
    if cause.rank is None:
        return cause.detail
    return f"{rank_words(cause)} exited with {cause.exit_code}{given(': {}', said_by_rank(cause))}"


def rank_words(cause: Cause) -> str:
    """Name a rank and its GPU: ``rank 5 (GPU 1)``."""
    return f"rank {cause.rank}{given(' (GPU {})', cause.gpu)}"


def said_by_rank(cause: Cause) -> str:
    """Word what the rank itself reported about its end; '' if nothing."""
    return _filled(SAID_BY_RANK.get(cause.kind, "{detail}"), cause)


def signal_name(number: int) -> str:
    """Name a signal: ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _filled(form: str, cause: Cause) -> str:
    values = {name: getattr(cause, name) for name in ("peer", "exit_code", "phase", "step", "by", "detail")}
    return form.format(**values, who=rank_words(cause), age_s=cause.age_s or 0.0, signal=signal_name(cause.signal or 0))
