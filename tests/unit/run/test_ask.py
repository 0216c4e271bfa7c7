"""What of a run may be asked, and what is said if it cannot answer."""

import re

import pytest
from fakes import running_fleet
from run_rig import plan

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.records import RequestKind
from llama405b_tools.remote.messages.ask_request import AskRequest
from llama405b_tools.verbs import ask


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["r", "save", "--steps", "2"], "--steps: only a profile has steps"),
        (["r", "profile", "--steps", "0"], "--steps: 0; use 1 to 100"),
        (["r", "profile", "--steps", "101"], "--steps: 101; use 1 to 100"),
        (["../r", "save"], "not a valid run name"),
        (["r", "all"], "'all'"),
    ],
)
def test_bad_input_is_refused(argv, words):
    with pytest.raises(UserError, match=re.escape(words)):
        ask.main(argv)


def test_a_program_of_the_users_own_takes_no_requests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "mine", attempt=1, created=1.0)) as fleet:
        with pytest.raises(UserError, match="run r is a program of your own, which takes no requests"):
            ask.find_head(fleet, "r")
        for host in fleet.fakes.values():
            host.alive = False
        with pytest.raises(UserError, match=r"run r is not running; `.*status.*--run r` says how it ended"):
            ask.find_head(fleet, "r")


def test_a_run_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(ask, "LOOK_EVERY_S", 0.01)
    wanted = AskRequest("r", RequestKind.STACKS, "me@here")
    with running_fleet(("a",), plan("-m", "llama405b.train", attempt=1, created=1.0)) as fleet:
        faults = fleet.fakes["a"].faults
        faults |= {"ask": '{"id": "1"}', "answer": '{"answer": null, "alive": true}'}
        with pytest.raises(
            RunError, match=r"run r has not answered for 0\.1s: its step is longer than that, or it hangs"
        ):
            ask.request(fleet, "a", wanted, 0.1)
        faults["answer"] = '{"answer": null, "alive": false}'
        with pytest.raises(RunError, match="run r ended before it answered"):
            ask.request(fleet, "a", wanted, 5.0)
        faults["ask"] = '{"id": ""}'
        with pytest.raises(RunError, match="run r is not running on a, where its rank 0 is"):
            ask.request(fleet, "a", wanted, 5.0)
