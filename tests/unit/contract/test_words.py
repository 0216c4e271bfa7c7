"""Every kind of cause, and every state of a run on a host, has words."""

import pytest

from llama405b.contract.records import Cause, CauseKind, describe_cause
from llama405b_tools.run.judge import Failure, HostRunState, RunState, failure_words, format_state

FULL = {
    "host": "a", "rank": 3, "peer": 1, "signal": 9, "exit_code": 1, "phase": "train", "step": 7, "age_s": 61.0, "count": 2,
    "by": "me@here", "detail": "why",
}  # fmt: skip


@pytest.mark.parametrize("kind", CauseKind)
def test_every_kind_can_be_said(kind):
    said = describe_cause(Cause(kind, **FULL))
    assert "{" not in said
    assert "None" not in said


def test_what_a_person_reads():
    assert describe_cause(Cause(CauseKind.RANK_KILLED, rank=1, signal=9)) == "rank 1 was killed by SIGKILL"
    assert (
        describe_cause(Cause(CauseKind.RANK_KILLED, rank=5, signal=9, gpu="1"))
        == "rank 5 (GPU 1) was killed by SIGKILL"
    )
    assert describe_cause(Cause(CauseKind.RANK_EXIT, rank=5, exit_code=1, gpu="0")) == "rank 5 (GPU 0) exited with 1"
    assert describe_cause(Cause(CauseKind.HUNG, rank=5, gpu="7", age_s=9.0)).startswith(
        "hung: rank 5 (GPU 7) is silent for 9 s"
    )
    assert describe_cause(Cause(CauseKind.FOLLOWED, rank=0, exit_code=2, peer=1, detail="x")) == (
        "rank 0 exited with 2: rank 1 failed: x"
    )
    hung = Cause(CauseKind.HUNG, rank=1, phase="train", step=7, age_s=61.0, process_state="T")
    assert (
        describe_cause(hung) == "hung: rank 1 is silent for 61 s, in phase train at step 7; it is stopped by a signal"
    )
    killed = Failure("h", Cause(CauseKind.RANK_KILLED, rank=1, signal=9), HostRunState(RunState.EXITED, 1))
    assert failure_words(killed) == "exited 1: rank 1 was killed by SIGKILL"
    left = HostRunState(RunState.LEFTOVERS, cause=Cause(CauseKind.LEFTOVERS, count=2))
    assert format_state(left) == "LEFTOVERS (2 processes)"
    old = Failure("h", Cause(CauseKind.UNKNOWN, detail="what it was"), HostRunState(RunState.EXITED, 1))
    assert failure_words(old) == "exited 1: what it was"
    assert "\x1b" not in failure_words(Failure("h", Cause(CauseKind.UNKNOWN, detail="\x1b[31mred")))
