"""A hosts file that lacks hosts of a run: stop and status name and reach them, and say nothing of what they did not ask."""

import contextlib
import dataclasses

import pytest
from fakes import FakeFleet
from run_rig import plan

from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, FailureRecord, GuardState, NodeState, NodeStatus
from llama405b_tools.agent import processes
from llama405b_tools.agent.messages import StatusReply
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run.judge import RunState
from llama405b_tools.run.query import ask_hosts
from llama405b_tools.verbs import status, stop


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    """The run is alive on a and b; the hosts file has b and c, which has no part in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("b\nc\n")
    with FakeFleet(("a", "b", "c")) as found:
        for name in "ab":
            found.fakes[name].plan, found.fakes[name].alive = plan("-m", "mine", created=1.0), True
            found.fakes[name].node_status = NodeStatus(name, NodeState.RUNNING, 2, 1, 1)
        del found.hosts["a"]
        for verb in (stop, status):
            monkeypatch.setattr(verb, "Fleet", lambda hosts: contextlib.nullcontext(found))
        yield found


def without_c(handle):
    return dataclasses.replace(handle, replies={name: reply for name, reply in handle.replies.items() if name != "c"})


def alive(fleet):
    return [name for name, host in fleet.fakes.items() if host.alive]


def rows(text):
    return {line.split("  ")[0]: line for line in text.splitlines()}


def test_stop_ends_the_hosts_that_the_file_lacks_and_names_those_that_have_no_part(fleet, capsys):
    assert stop.main(["--run", "r", "--grace", "0"]) == 0
    assert alive(fleet) == []
    told = rows(capsys.readouterr().out)
    assert "no process left" in told["a"]
    assert "no process left" in told["b"]
    assert told["c"].endswith("not a host of this run")


def test_a_host_that_the_file_lacks_is_reached_by_its_address_if_its_name_leads_nowhere(fleet, capsys):
    tried = []

    def connection(name):
        tried.append(fleet.hosts[name].name)
        if fleet.hosts[name].name == "a":
            raise HostError("the name does not resolve")
        return FakeFleet.connection(fleet, name)

    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    fleet.fakes["b"].plan = plan("-m", "mine", created=1.0, addresses=addresses)
    fleet.connection = connection
    assert stop.main(["--run", "r", "--grace", "0"]) == 0
    assert alive(fleet) == []
    assert tried[tried.index("a") :].count("10.0.0.1") > 0


def test_a_host_that_cannot_be_reached_is_not_called_ended(fleet, capsys):
    fleet.fakes["a"].faults["connect"] = HostError("no route")
    assert stop.main(["--run", "r", "--grace", "0"]) == 1
    assert "NOT VERIFIED: no route" in rows(capsys.readouterr().out)["a"]
    assert alive(fleet) == ["a"]
    assert status.main(["--run", "r"]) == 1
    assert "UNREACHABLE: no route" in rows(capsys.readouterr().out)["a"]


def test_status_asks_the_hosts_that_the_file_lacks(fleet, capsys):
    (fleet.fakes["a"].alive, fleet.fakes["a"].node_status) = (False, None)
    del fleet.hosts["c"]
    assert status.main(["--run", "r"]) == 1
    assert "never started" in rows(capsys.readouterr().out)["a"]


def test_a_file_that_names_all_hosts_differently_is_refused_with_their_names(fleet):
    for host in fleet.fakes.values():
        host.status_reply = lambda named: StatusReply((), ("a", "b"))
    with pytest.raises(UserError, match="--run: 'r' was launched on a,b; name the hosts file that has them"):
        stop.main(["--run", "r"])


def test_a_refused_stop_leaves_the_guard(fleet, tmp_path):
    for host in fleet.fakes.values():
        host.plan = None
    pid = processes.start_time(1)
    guard = GuardState("r", 1, pid, processes.machine_id(), 1)
    write_json(RunDir.from_name("r").guard, guard)
    ended = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "dismiss_guard", ended.append)
        with pytest.raises(UserError, match="no host has 'r'"):
            stop.main(["--run", "r", "--grace", "0"])
    assert ended == []
    assert all(action != "stop" for host in fleet.fakes.values() for action, _ in host.heard)


def test_a_run_that_is_stopped_on_some_hosts_only_is_not_well(fleet):
    fleet.hosts |= {"a": fleet.hosts["b"]}
    stopped = fleet.fakes["b"]
    stopped.alive, stopped.stopped_by = False, "me@here"
    stopped.node_status = NodeStatus("b", NodeState.STOPPED, 2, 1, 1)
    (failure,) = without_c(ask_hosts(fleet, "r")).failures()
    assert (failure.host, failure.cause.kind, failure.cause.by) == ("a", CauseKind.HALF_STOPPED, "me@here")
    fleet.fakes["a"].node_status = NodeStatus("a", NodeState.RUNNING, 3, 1, 1)  # a new launch, which is on its way to b
    assert without_c(ask_hosts(fleet, "r")).failures() == []


def test_a_host_that_an_interrupted_launch_did_not_reach_has_lost_no_files(fleet):
    fleet.hosts |= {"a": fleet.hosts["b"]}
    fleet.fakes["b"].plan = None
    assert ask_hosts(fleet, "r").states()["b"].state is RunState.FILES_GONE
    fleet.fakes["a"].blames = (FailureRecord(2, "a", Cause(CauseKind.NOT_KEPT, "a")),)
    fleet.fakes["a"].alive, fleet.fakes["a"].node_status = False, NodeStatus("a", NodeState.KILLED, 2, 1, 1, signal=15)
    seen = ask_hosts(fleet, "r")
    assert seen.states()["b"].state is RunState.NEVER_STARTED
    assert CauseKind.NOT_KEPT not in [failure.cause.kind for failure in seen.failures()]


def test_the_plan_comes_from_a_host_where_the_run_is_alive(fleet):
    fleet.hosts["a"] = fleet.hosts["b"]  # after b
    fleet.fakes["b"].alive = False
    fleet.fakes["a"].plan = dataclasses.replace(fleet.fakes["a"].plan, attempt=7)
    handle = ask_hosts(fleet, "r")
    assert ([*handle.host_runs], handle.live_hosts, handle.fetch_plan().attempt) == (["b", "a"], ["a"], 7)
    fleet.fakes["a"].alive = False
    assert ask_hosts(fleet, "r").fetch_plan().attempt == fleet.fakes["b"].plan.attempt
