"""What status derives from the hosts' answers: values in, values out."""

import pytest
from fakes import FakeFleet, over

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.errors import UserError
from llama405b.contract.plan import Node, Plan
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import judge
from llama405b_tools.run.query import ask_hosts, failures_of, newest_checkpoint


def plan(name="r", created=1.0):
    nodes = tuple(Node(host, 1, i, "/w", "/py", "", "", {}) for i, host in enumerate("ab"))
    return Plan(name, 1, created, f"{name}-1-x", "a:1", ("-m", "mine"), (), nodes)


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with FakeFleet(("a", "b")) as found:
        for host in found.fakes.values():
            host.plan, host.alive = plan(), True
        yield found


def test_a_run_that_lives(fleet):
    run, seen = ask_hosts(fleet, None)
    assert (run, failures_of(seen)) == ("r", [])


def test_the_host_where_it_began_is_first(fleet):
    causes = {"a": Cause(CauseKind.LOST_PEER, "a", 0), "b": Cause(CauseKind.RANK_KILLED, "b", 1, signal=9)}
    for name, cause in causes.items():
        host = fleet.fakes[name]
        host.alive, host.status = False, over(name, cause).node.status
    failures = failures_of(ask_hosts(fleet, "r")[1])
    assert [failure.cause for failure in failures] == list(causes.values())
    assert judge.first_failure(failures).host == "b"


def test_a_host_that_cannot_be_asked_is_a_failure_and_hides_no_other(fleet):
    fleet.fakes["a"].faults["status"] = HostError("gone")
    run, seen = ask_hosts(fleet, None)
    assert (run, [failure.cause.kind for failure in failures_of(seen)]) == ("r", [CauseKind.UNREACHABLE])
    fleet.fakes["b"].faults["status"] = HostError("gone")
    with pytest.raises(HostError):
        ask_hosts(fleet, None)


def test_a_host_that_does_not_know_the_run(fleet):
    fleet.fakes["b"].plan = None
    assert [failure.cause.kind for failure in failures_of(ask_hosts(fleet, "r")[1])] == [CauseKind.NO_RUN]
    with pytest.raises(UserError):
        ask_hosts(fleet, "other")


def test_the_newest_checkpoint_that_any_host_sees(fleet):
    assert newest_checkpoint(fleet, "r") is None
    fleet.fakes["a"].checkpoint, fleet.fakes["b"].checkpoint = "/c/step-00000090", "/c/step-00000100"
    assert newest_checkpoint(fleet, "r").name == "step-00000100"
