"""Causes as text, for people only: no program parses it."""

import signal

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.phrases import given

STUCK = {
    "T": "it is stopped by a signal",
    "D": "it is waiting for a disk or driver that does not respond",
}  # by process state
SAID_BY_RANK = {  # how a rank reports its own end; other kinds: the detail alone
    CauseKind.LOST_PEER: "lost contact with another rank in phase {phase}: {detail}",
    CauseKind.FOLLOWED: "stopped with rank {peer}: {detail}",
}
WORDS = {
    CauseKind.STOPPED: "stopped by {by}",
    CauseKind.SIGNAL: "stopped by {signal}",
    CauseKind.RUNNER_KILLED: "the node runner was killed",
    CauseKind.NOT_STARTED: "torchrun could not be started ({detail})",
    CauseKind.SETUP_FAILED: "the setup line failed with exit code {exit_code}: {detail}",
    CauseKind.TORCHRUN_KILLED: "torchrun was killed by {signal}",
    CauseKind.TORCHRUN_FAILED: "torchrun failed; see {detail}",
    CauseKind.RANK_KILLED: "rank {rank} was killed by {signal}",
    CauseKind.SOCKETS: "NCCL fell back to TCP sockets although RDMA ports are up ({detail}); "
    "set NCCL_IB_HCA with --env, or add --allow-sockets",
    CauseKind.VANISHED: "its processes disappeared without a trace; was the machine restarted?",
    CauseKind.NOT_KEPT: "its launch was interrupted before every host had started",
    CauseKind.HALF_STOPPED: "still running here, although {by} stopped the run on other hosts; `stop` it here, too",
    CauseKind.FILES_GONE: "it took part, but has no files of the run any more; was it reinstalled, or is a disk not mounted?",
    CauseKind.HUNG: "hung: rank {rank} is silent for {age_s:.0f} s, in phase {phase} at step {step}",
    CauseKind.UNREACHABLE: "cannot be reached: {detail}",
    CauseKind.UNKNOWN: "{detail}",
}


def words(cause: Cause) -> str:
    """Say in a clause what happened; '' if the kind says it all."""
    if cause.kind in WORDS:
        return _filled(WORDS[cause.kind], cause) + given("; {}", STUCK.get(cause.process_state))
    if cause.rank is None:
        return cause.detail
    return f"rank {cause.rank} exited with {cause.exit_code}{given(': {}', said_by_rank(cause))}"


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
    values = {name: getattr(cause, name) for name in ("rank", "peer", "exit_code", "phase", "step", "by", "detail")}
    return form.format(**values, age_s=cause.age_s or 0.0, signal=signal_name(cause.signal or 0))
