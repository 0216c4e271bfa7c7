"""What of a run may be asked, and what is said if it cannot answer."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import running_fleet
from run_rig import plan

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.records import CauseKind, Metrics, RequestKind
from llama405b_tools.run.backends import HostsBackend
from llama405b_tools.verbs import ask


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["save", "--run", "r", "--steps", "2"], "--steps: only a profile has steps"),
        (["profile", "--run", "r", "--steps", "0"], "--steps: 0; use 1 to 100"),
        (["profile", "--run", "r", "--steps", "101"], "--steps: 101; use 1 to 100"),
        (["save", "--run", "../r"], "not a valid run name"),
        (["all", "--run", "r"], "'all'"),
    ],
)
def test_bad_input_is_refused(argv, words):
    with pytest.raises(UserError, match=re.escape(words)):
        ask.main(argv)


def test_the_words_that_it_takes_are_named_as_they_are_typed():
    with pytest.raises(UserError, match=r"save.*profile.*memory.*stacks.*restart") as refused:
        ask.main(["dance"])
    assert "RequestKind" not in str(refused.value)


def test_a_program_of_the_users_own_takes_no_requests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "mine", attempt=1, created=1.0)) as fleet:
        with pytest.raises(UserError, match="run r runs your own program, which takes no requests"):
            ask.find_head(fleet, "r")
        for host in fleet.fakes.values():
            host.alive = False
        with pytest.raises(UserError, match=r"run r is not running; `.*status.*--run r` says how it ended"):
            ask.find_head(fleet, "r")


def test_a_restart_is_for_runs_with_a_guard_that_guards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "llama405b.train", attempt=1, created=1.0)) as fleet:
        for guard in (None, SimpleNamespace(is_guarding=False)):
            monkeypatch.setattr(ask, "guard_of_hosts", lambda *_, guard=guard: guard)
            with pytest.raises(
                UserError, match=r"run r has no guard to restart it; `.* stop .*r`, then repeat the launch"
            ):
                ask.check_guarded(fleet, "r", [])
        monkeypatch.setattr(ask, "guard_of_hosts", lambda *_: SimpleNamespace(is_guarding=True))
        ask.check_guarded(fleet, "r", [])


def test_a_run_of_which_one_host_is_left_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "llama405b.train", attempt=1, created=1.0)) as fleet:
        fleet.fakes["b"].alive = False
        head, found, _ = ask.find_head(fleet, None)
        assert (head, found.run) == ("a", "r")


def test_a_run_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(ask, "POLL_S", 0.01)
    with running_fleet(("a",), plan("-m", "llama405b.train", attempt=1, created=1.0)) as fleet:
        faults = fleet.fakes["a"].faults
        faults |= {"ask": '{"result": "1"}', "answer": '{"result": {"answer": null, "alive": true}}'}
        with pytest.raises(
            RunError, match=r"run r has not answered for 0\.1s: its step is longer than that, or it hangs"
        ):
            ask.send_request(fleet, "a", "r", RequestKind.STACKS, 0.1)
        faults["answer"] = '{"result": {"answer": null, "alive": false}}'
        with pytest.raises(RunError, match="run r ended before it answered"):
            ask.send_request(fleet, "a", "r", RequestKind.STACKS, 5.0)
        faults["ask"] = '{"result": ""}'
        with pytest.raises(RunError, match="run r is not running on a, the host of its rank 0"):
            ask.send_request(fleet, "a", "r", RequestKind.STACKS, 5.0)


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    """A fleet whose run has a guard; and what its hosts are told to stop."""
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "llama405b.train", attempt=3, created=1.0)) as fleet:
        fleet.fakes["a"].checkpoint = "/c/step-00000010"
        yield fleet


def stops(fleet):
    return [asked for action, asked in fleet.fakes["b"].heard if action == "stop"]


def test_a_restart_lets_the_run_save_at_its_end_and_says_who_asked(guarded, capsys):
    head, found, told = ask.find_head(guarded, "r")
    assert ask.restart(guarded, HostsBackend("r", Path("hosts")), head, found, told, 60.0) == 0
    [stop] = stops(guarded)
    assert (stop.grace_s, stop.by, stop.blame.attempt, stop.blame.cause.kind) == (60.0, "", 3, CauseKind.STOPPED)
    assert not [action for action, _ in guarded.fakes["a"].heard if action == "ask"]  # it has saved before
    assert "attempt 3 is ended" in capsys.readouterr().out


def test_a_run_that_cannot_save_is_not_ended(guarded):
    guarded.fakes["b"].unsaved = "step 12: No space left on device"
    head, found, told = ask.find_head(guarded, "r")
    with pytest.raises(RunError, match=r"No space left on device.*The run was not ended"):
        ask.restart(guarded, HostsBackend("r", Path("hosts")), head, found, told, 60.0)
    assert stops(guarded) == []
    assert ask.restart(guarded, HostsBackend("r", Path("hosts")), head, found, told, 0.0) == 0
    assert [stop.grace_s for stop in stops(guarded)] == [0.0]


@pytest.mark.parametrize(
    ("step", "saved", "words"),
    [
        (12, "/c/step-00000012", " after step 12, which is saved: /c/step-00000012"),
        (14, "/c/step-00000012", " after step 14; 2 steps since /c/step-00000012 will be repeated"),
        (14, None, " after step 14; 14 steps since its beginning will be repeated"),
    ],
)
def test_what_a_restart_repeats_is_said(guarded, step, saved, words):
    [node] = guarded.fakes["a"].status_reply("r").runs
    metrics = Metrics(step, 1.0, 2.0, 1.0, 1e-3, 10, 1.0, 1.0, 0.1, 0.4, 0.4, 0.1)
    assert ask._describe_end([dataclasses.replace(node, metrics=metrics, checkpoint=saved)]) == words
