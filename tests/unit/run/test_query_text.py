"""What is said about a run that no host has, and about a guard that is gone."""

import time

import pytest
from fakes import running_fleet
from run_rig import plan

from llama405b.contract.errors import UserError
from llama405b.contract.records import GuardState
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import query
from llama405b_tools.run.query import ask_hosts


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with running_fleet(("a", "b"), plan("-m", "mine", attempt=1, created=1.0)) as found:
        yield found


def test_a_run_that_no_host_has_is_answered_with_those_that_are_there(fleet):
    fleet.fakes["b"].plan = None
    with pytest.raises(UserError) as refused:
        ask_hosts(fleet, "rr")
    assert str(refused.value).startswith("--run: no host has 'rr' in /w/runs; there are r; `")
    assert str(refused.value).endswith("llama405b status --all` lists more")
    fleet.fakes["a"].plan = None
    fleet.fakes["b"].faults["status"] = HostError("gone")
    with pytest.raises(UserError) as refused:
        ask_hosts(fleet, "rr")
    assert str(refused.value) == (
        "--run: no host has 'rr' in /w/runs; there are none yet (b could not be queried: gone)"
    )
    with pytest.raises(
        UserError, match=r"no run on these hosts yet \(b could not be queried: gone\); `.*llama405b launch …`"
    ):
        ask_hosts(fleet, None)


@pytest.mark.parametrize(
    ("pid", "words"), [(7, "last heard at {} (process 7 on far died"), (0, "asked for at {} (it never")]
)
def test_of_a_guard_that_is_gone_it_is_told_when_it_was_heard_and_not_since_when(pid, words):
    gone = query.GuardStatus(GuardState("r", pid, 1, "far x y", 2), query.GuardLiveness.SILENT, 0.0)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    assert query.guard_line(gone).startswith(f"guard: GONE, {words.format(at)}")
