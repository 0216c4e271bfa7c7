"""Which run is meant, its state on a host, and where a failure began: values in, values out."""

import dataclasses
import signal

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.records import Cause, CauseKind, NodeState, NodeStatus, Phase
from llama405b_tools.agent.messages import HostRun, RankHeartbeat
from llama405b_tools.run import judge
from llama405b_tools.run.hang import HostHeartbeats, Pace, find_hung_rank, find_silent_rank
from llama405b_tools.run.judge import RunState


def status(state=NodeState.EXITED, cause=None, *, exit_code=0, number=None):
    return NodeStatus("h", state, 1, 10, 20, exit_code=exit_code, signal=number, cause=cause)


def run(name="x", created=0.0, *, alive=False, leftovers=(), known=True, **more):
    found = status(**more) if known else None
    return HostRun(name, created, 1, "", 0, alive, leftovers, found, (), (), "", None, None, 0.0)


def test_the_only_live_run_else_the_newest():
    assert judge.choose_run({"a": [run("x", 1, alive=True), run("y", 2)]}) == "x"
    assert judge.choose_run({"a": [run("x", 1)], "b": [run("y", 2)]}) == "y"
    with pytest.raises(UserError):
        judge.choose_run({"a": [run("y", alive=True)], "b": [run("x", alive=True)]})


@pytest.mark.parametrize(
    ("described", "standing", "kind"),
    [
        (None, RunState.NO_RUN, CauseKind.NO_RUN),
        (run(alive=True, state=NodeState.RUNNING), RunState.RUNNING, None),
        (run(alive=True, known=False), RunState.STARTING, None),
        (run(state=NodeState.RUNNING), RunState.VANISHED, CauseKind.VANISHED),
        (run(exit_code=1, cause=Cause(CauseKind.RANK_EXIT, rank=3)), RunState.EXITED, CauseKind.RANK_EXIT),
        (run(exit_code=1), RunState.EXITED, CauseKind.UNKNOWN),
        (run(state=NodeState.KILLED, number=9), RunState.KILLED, CauseKind.UNKNOWN),
        (run(leftovers=(4, 5)), RunState.LEFTOVERS, CauseKind.LEFTOVERS),
        (run(known=False), RunState.NEVER_STARTED, CauseKind.NEVER_STARTED),
        (run(state=NodeState.STOPPED, cause=Cause(CauseKind.STOPPED, by="me")), RunState.STOPPED, None),
        (run(), RunState.EXITED, None),
    ],
)
def test_standings_and_failures(described, standing, kind):
    state = judge.state_of_run(described)
    failure = judge.failure_of("h", state)
    assert (state.state, failure and failure.cause.kind) == (standing, kind)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_node_runner_that_outlives_the_run_for_a_moment_hides_no_exit_code(exit_code):
    cause = Cause(CauseKind.RANK_EXIT, rank=3) if exit_code else None
    state = judge.state_of_run(run(alive=True, exit_code=exit_code, cause=cause))
    assert (state.state, state.exit_code, state.cause) == (RunState.EXITED, exit_code, cause)
    assert state.is_good is not bool(exit_code)


def test_a_node_runner_that_was_stopped_before_it_could_say_anything():
    stopped = dataclasses.replace(run(known=False), stopped_by="you@there")
    assert judge.state_of_run(stopped).state is RunState.STOPPED
    assert judge.state_of_run(dataclasses.replace(stopped, alive=True)).state is RunState.STARTING


def test_the_host_where_it_began_is_named():
    def failure(host, *cause, **more):
        return judge.failure_of(
            host, judge.state_from_status(status(exit_code=1, cause=Cause(*cause, **more)), alive=False)
        )

    lost = failure("a", CauseKind.LOST_PEER, rank=0)
    own = failure("b", CauseKind.RANK_KILLED, rank=1, signal=signal.SIGKILL)
    aborted = failure("c", CauseKind.RANK_KILLED, rank=2, signal=signal.SIGABRT)
    ended = failure("d", CauseKind.SIGNAL, signal=signal.SIGTERM)
    assert judge.first_failure([lost, own]).host == "b"
    assert judge.first_failure([lost]).host == "a"
    assert judge.first_failure([lost, aborted]).host == "c"
    assert judge.first_failure([aborted, own]).host == "b"
    assert judge.first_failure([ended, lost, own]).host == "b"
    assert judge.first_failure([own, dataclasses.replace(lost, is_decided=True)]).host == "a"
    for kind in (CauseKind.FOLLOWED, CauseKind.TORCHRUN_FAILED):
        assert failure("a", kind, peer=1).origin_score == 0
    for kind in (CauseKind.REFUSED, CauseKind.RANK_EXIT, CauseKind.SOCKETS, CauseKind.VANISHED, CauseKind.HUNG):
        assert failure("a", kind).origin_score == 2


def beat(rank, *, time, step=7, phase=Phase.TRAIN, since=0.0, state="S"):
    return RankHeartbeat(rank, "a", 100 + rank, time, step, phase, since, state=state)


def test_an_evaluation_before_the_first_step_may_be_as_slow_as_loading():
    def silent(step):
        """A rank between two forwards of an evaluation that began long ago."""
        return find_silent_rank({"a": [(beat(0, time=50.0, step=step, phase=Phase.EVAL), 90.0)]}, Pace(load_s=540.0))

    assert silent(0) is None
    assert silent(1).beat.rank == 0


def test_a_rank_that_is_silent_for_too_long():
    def hung(*beats, now=1000.0, heard_at=50.0, at=50.0):
        found = find_hung_rank({"a": HostHeartbeats(beats, now, heard_at)}, at, Pace(load_s=440.0, min_hang_s=100.0))
        return found and found.cause

    assert hung(beat(0, time=901.0)) is None
    assert hung(beat(0, time=899.0)) == Cause(
        CauseKind.HUNG, "a", 0, phase=Phase.TRAIN, step=7, age_s=101.0, process_state="S"
    )
    assert hung(beat(0, time=700.0), beat(1, time=800.0, step=6)).rank == 1  # the one that is behind
    stopped = hung(beat(0, time=700.0), beat(1, time=800.0, state="T"))
    assert (stopped.rank, stopped.process_state) == (1, "T")
    assert hung(beat(0, time=600.0, phase=Phase.LOAD)) is None
    assert hung(beat(0, time=600.0, since=600.0)) is None  # the first step takes its time
    assert hung(beat(0, time=400.0, since=400.0)) is not None
    assert hung(beat(0, time=600.0, since=600.0, phase=Phase.UPDATE)).phase is Phase.UPDATE  # no step is so slow
    assert hung(beat(0, time=0.0, phase=Phase.DONE)) is None
    assert hung(beat(0, time=899.0), at=80.0) is None  # not heard for half a minute: nothing is known
    assert hung(beat(0, time=980.0), at=60.0) is None
