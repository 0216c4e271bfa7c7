import pytest

from llama405b.contract.errors import UserError
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Heard


def run(name, created=0.0, alive=False, **status):
    state = {"state": "exited", "exit_code": 0, "signal": None, "reason": ""} | status
    return {"run": name, "created": created, "alive": alive, "leftovers": [], "status": state}


def test_the_only_live_run_else_the_newest():
    assert judge.choose({"a": [run("x", 1, alive=True), run("y", 2)]}, None) == "x"
    assert judge.choose({"a": [run("x", 1)], "b": [run("y", 2)]}, None) == "y"
    assert judge.choose({"a": [run("x")]}, "x") == "x"
    with pytest.raises(UserError, match="2 runs are alive; say which: x, y"):
        judge.choose({"a": [run("y", alive=True)], "b": [run("x", alive=True)]}, None)
    with pytest.raises(UserError, match="no host knows a run 'z'"):
        judge.choose({"a": [run("x")]}, "z")
    with pytest.raises(UserError, match="no run on these hosts yet"):
        judge.choose({"a": []}, None)


@pytest.mark.parametrize(
    ("described", "state"),
    [
        (None, "no such run"),
        (run("x", alive=True, state="running"), "running"),
        (run("x", state="running"), "vanished"),
        (run("x", exit_code=1), "exited 1"),
        (run("x", state="killed", signal=9), "killed by signal 9"),
        (run("x") | {"leftovers": [4, 5]}, "LEFTOVERS (2 processes)"),
        (run("x") | {"status": None}, "never started"),
        (run("x"), "exited 0"),
    ],
)
def test_states(described, state):
    assert judge.state_of(described) == state
    assert (judge.failure_of("h", described) is None) == (state in ("running", "exited 0"))


def test_the_host_where_it_began_is_named():
    lost = judge.failure_of(
        "a", run("x", exit_code=1, reason="rank 0 exited with 1: lost contact with another rank: …")
    )
    own = judge.failure_of("b", run("x", exit_code=1, reason="rank 1 was killed by SIGKILL"))
    assert judge.first_failure([lost, own]).host == "b"
    assert judge.first_failure([lost]).host == "a"
    for effect in ("rank 0 exited with 2: stopped with rank 1: x", "torchrun failed; see /x"):
        assert judge.failure_of("a", run("x", exit_code=1, reason=effect)).origin == 0
    aborted = judge.failure_of("c", run("x", exit_code=1, reason="rank 2 was killed by SIGABRT"))
    assert judge.first_failure([lost, aborted]).host == "c"
    assert judge.first_failure([aborted, own]).host == "b"


def beat(rank, *, time, step=7, phase="train", since=0.0, state="S"):
    return {"rank": rank, "time": time, "step": step, "phase": phase, "phase_since": since, "state": state}


def test_a_rank_that_is_silent_for_too_long():
    def hung(*beats, now=1000.0, heard_at=50.0, at=50.0):
        return judge.hung({"a": Heard(beats, now, heard_at)}, at, 100.0, 500.0)

    assert hung(beat(0, time=901.0)) is None
    assert "rank 0 is silent for 101 s, in phase train at step 7" in hung(beat(0, time=899.0)).what
    assert "rank 1 " in hung(beat(0, time=700.0), beat(1, time=800.0, step=6)).what  # the one that is behind
    stopped = hung(beat(0, time=700.0), beat(1, time=800.0, state="T")).what
    assert "rank 1 " in stopped
    assert "stopped by a signal" in stopped
    assert hung(beat(0, time=600.0, phase="load")) is None
    assert hung(beat(0, time=600.0, since=600.0)) is None  # the first step takes its time
    assert hung(beat(0, time=400.0, since=400.0)) is not None
    assert hung(beat(0, time=0.0, phase="done")) is None
    assert hung(beat(0, time=899.0), at=80.0) is None  # not heard for half a minute: nothing is known
    assert hung(beat(0, time=980.0), at=60.0) is None


def test_who_is_lost_is_named_before_who_waits_for_it():
    from llama405b.contract.plan import Node, Plan
    from llama405b_tools.run.follow import Limits, Watch

    nodes = tuple(Node(name, 1, i, "/w", "/py", "", "", {}) for i, name in enumerate("ab"))
    watch = Watch(Plan("r", 1, 0.0, "r-1-x", "a:1", ("-m", "llama405b.train"), (), nodes))
    watch.take("b", {"unreachable": "no answer"})
    watch.take("a", {"beats": [beat(0, time=0.0, since=-5.0)], "now": 1000.0})
    watch.look_for_hang(Limits(300.0, 3600.0))
    assert watch.worst().host == "b"
    assert "no answer" in watch.worst().what
