"""What status derives from the hosts' answers: values in, values out."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from fakes import over, running_fleet
from run_rig import plan

from llama405b.contract.errors import UserError
from llama405b.contract.records import Cause, CauseKind, NodeState, Phase
from llama405b_tools.agent.messages import NodeUpdate, RankHeartbeat, StreamMessage
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import judge, log_reader
from llama405b_tools.run.follow import watch_run
from llama405b_tools.run.hang import Pace
from llama405b_tools.run.judge import Failure, RunState, failure_words
from llama405b_tools.run.query import ask_hosts, newest_checkpoint, run_row
from llama405b_tools.verbs import status


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "mine", attempt=1, created=1.0)) as found:
        yield found


def test_a_run_that_lives(fleet):
    seen = ask_hosts(fleet, None)
    assert (seen.run, seen.failures()) == ("r", [])


def test_the_host_where_it_began_is_first(fleet):
    causes = {"a": Cause(CauseKind.LOST_PEER, "a", 0), "b": Cause(CauseKind.RANK_KILLED, "b", 1, signal=9)}
    for name, cause in causes.items():
        host = fleet.fakes[name]
        host.alive, host.node_status = False, over(name, cause).node.status
    failures = ask_hosts(fleet, "r").failures()
    assert [failure.cause for failure in failures] == list(causes.values())
    assert judge.first_failure(failures).host == "b"


def test_a_host_that_cannot_be_asked_is_a_failure_and_hides_no_other(fleet):
    fleet.fakes["a"].faults["status"] = HostError("gone")
    seen = ask_hosts(fleet, None)
    assert (seen.run, [failure.cause.kind for failure in seen.failures()]) == ("r", [CauseKind.UNREACHABLE])
    fleet.fakes["b"].faults["status"] = HostError("gone")
    with pytest.raises(HostError):
        ask_hosts(fleet, None)


def test_a_host_that_does_not_know_the_run(fleet):
    fleet.fakes["b"].plan = None
    for host in fleet.fakes.values():
        host.members = ("a",)
    assert [failure.cause.kind for failure in ask_hosts(fleet, "r").failures()] == [CauseKind.NO_RUN]
    with pytest.raises(UserError):
        ask_hosts(fleet, "rr")


def test_a_host_back_without_its_files_is_not_one_that_was_never_started(fleet):
    fleet.fakes["b"].plan = None
    seen = ask_hosts(fleet, "r")
    assert [failure.cause.kind for failure in seen.failures()] == [CauseKind.FILES_GONE]
    assert seen.states()["b"].state is RunState.FILES_GONE


@pytest.mark.parametrize(("on_b", "standing"), [(None, RunState.FILES_GONE), ("plan", RunState.NEVER_STARTED)])
def test_a_host_that_a_launch_has_not_come_to_yet_is_starting(fleet, on_b, standing):
    a, b = fleet.fakes["a"], fleet.fakes["b"]
    b.alive, b.plan, real = False, on_b and b.plan, a.run
    assert ask_hosts(fleet, "r").states()["b"].state is standing
    a.run = lambda: dataclasses.replace(real(), launching=True)
    seen = ask_hosts(fleet, "r")
    assert ({name: each.state for name, each in seen.states().items()}["b"], seen.failures()) == (
        RunState.STARTING,
        [],
    )
    assert "never started" not in run_row("r", seen.host_runs)[3]


def hang(fleet):
    """Rank 1 of a run on a and b falls silent, and whoever follows the run ends it."""
    following = plan("-m", "llama405b.train", attempt=1, created=1.0)
    old = RankHeartbeat(1, "b", 5, 0.0, 7, Phase.TRAIN, -5.0, state="T")
    for name, host in fleet.fakes.items():
        beats = (old,) if name == "b" else ()
        host.lives = [[StreamMessage(node=NodeUpdate(True, None, "")), StreamMessage(beats=beats, now=1000.0)]]
    watch = watch_run(fleet, following, Pace(load_s=3540.0, min_hang_s=300.0))
    for name, host in fleet.fakes.items():  # what each node runner saw of it
        seen = Cause(CauseKind.SIGNAL, name, signal=15)
        host.node_status = dataclasses.replace(over(name, seen).node.status, state=NodeState.KILLED, signal=15)
    return watch.worst_failure()


def test_a_hang_is_told_by_every_verb_as_whoever_ended_it_decided(fleet):
    decided = hang(fleet)
    assert (decided.host, decided.cause.kind) == ("b", CauseKind.HUNG)
    seen = ask_hosts(fleet, "r")
    named = judge.first_failure(seen.failures())
    assert (named.host, named.cause) == ("b", decided.cause)
    failed, lines = log_reader.find_first_error(seen)
    assert failed
    assert failure_words(named) in lines[0]


def test_a_hang_of_an_attempt_before_is_told_as_well(fleet):
    decided = hang(fleet)
    for host in fleet.fakes.values():
        host.ends, host.alive, host.plan = (
            (host.node_status,),
            True,
            plan("-m", "mine", created=1.0),
        )
        host.node_status = dataclasses.replace(host.node_status, state=NodeState.RUNNING, attempt=2, cause=None)
    seen = ask_hosts(fleet, "r")
    assert seen.failures() == []
    failed, lines = log_reader.find_first_error(seen)
    assert failed
    assert "attempt 1" in lines[0]
    assert failure_words(Failure("b", decided.cause)) in lines[0]


def test_ends_are_ordered_whatever_the_hosts_clocks_say(fleet):
    killed = {name: Cause(CauseKind.RANK_KILLED, name, rank, signal=9) for rank, name in enumerate("ab")}
    for name, (clock, ago) in {"a": (5000.0, 3.0), "b": (9000.0, 4.0)}.items():
        host = fleet.fakes[name]
        end = dataclasses.replace(over(name, killed[name]).node.status, time=clock - ago)
        host.ends, host.now, host.node_status = (
            (end,),
            clock,
            dataclasses.replace(end, state=NodeState.RUNNING, cause=None),
        )
    _, lines = log_reader.find_first_error(ask_hosts(fleet, "r"))
    assert "b: " in lines[0]
    assert "and after it: a" in lines[-1]


def test_the_newest_checkpoint_that_any_host_sees(fleet):
    assert newest_checkpoint(fleet, "r") is None
    fleet.fakes["a"].checkpoint, fleet.fakes["b"].checkpoint = "/c/step-00000090", "/c/step-00000100"
    assert newest_checkpoint(fleet, "r").name == "step-00000100"


def test_a_run_whose_saves_fail_is_not_well(fleet, monkeypatch, capsys):
    monkeypatch.setattr(status, "Fleet", lambda _: contextlib.nullcontext(fleet))
    Path("hosts").write_text("a\nb\n")
    for code, unsaved in enumerate(["", "step 400: No space left on device"]):
        fleet.fakes["a"].unsaved = unsaved
        assert status.main([]) == code
        assert (f"NOT SAVED: {unsaved}" in capsys.readouterr().out) == bool(code)
        assert status.main(["--json"]) == code
        assert json.loads(capsys.readouterr().out)["ok"] != bool(code)
