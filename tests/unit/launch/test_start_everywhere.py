"""All or nothing: every host starts, or nothing is left running."""

import dataclasses
import re
from pathlib import Path

import pytest
from fakes import FakeFleet

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.records import Cause, CauseKind
from llama405b.contract.software import code_version
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent.messages import Committed, StartFault, StartReply
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.launch import start as starting
from llama405b_tools.launch.preflight import KnownBug
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.launch.start import StartError, launch, start_run
from llama405b_tools.run.backends import HostsBackend

NAMES = ("a", "b", "c")


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with FakeFleet(NAMES) as found:
        yield found


@pytest.fixture
def plan():
    return Plan("r", 1, 5.0, "r-1-x", "a:1", ("-m", "llama405b.train"), (), tuple(
        Node(name, 1, i, "/w", "/py", "10.0.0.1", "eth0", {}) for i, name in enumerate(NAMES)))  # fmt: skip


def alive(fleet):
    return [name for name, host in fleet.fakes.items() if host.alive]


def actions(fleet, name):
    return [action for action, _ in fleet.fakes[name].heard]


def test_every_host_is_told_to_keep_it(fleet, plan, tmp_path):
    start_run(plan, {"TOKEN": "t"}, fleet)
    assert alive(fleet) == list(NAMES)
    assert fleet.fakes["b"].heard[0][1].secrets == {"TOKEN": "t"}
    assert (tmp_path / "runs/r/plan.json").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fault",
    [
        reader.dumps(StartReply(StartFault.TAKEN, by="you")),
        reader.dumps(StartReply(StartFault.ENDED, cause=Cause(CauseKind.NOT_STARTED, detail="no disk"))),
        '{"fault": "a newer one"}',
        '{"fault": 3}',
        "Segmentation fault",
        HostError("gone"),
    ],
    ids=["taken", "ended", "unknown", "malformed", "noise", "unreachable"],
)
def test_one_that_does_not_start_ends_all(fleet, plan, monkeypatch, name, fault):
    if fault == "Segmentation fault":  # no answer follows it
        monkeypatch.setattr(starting, "START_REPLY_TIMEOUT_S", 0.5)
    fleet.fakes[name].faults["start"] = fault
    with pytest.raises((StartError, UserError)) as failed:
        start_run(plan, {}, fleet)
    assert f"{name}: " in str(failed.value)
    assert alive(fleet) == []
    for other in NAMES:
        done = actions(fleet, other)
        assert other == name or "start" not in done or "stop" in done


def test_the_loser_of_two_launches_asks_the_head_alone_and_tells_of_no_other_host(fleet, plan, capsys):
    fleet.fakes["a"].faults["start"] = reader.dumps(StartReply(StartFault.TAKEN, by="you@there"))
    for again, refused in ((True, StartError), (False, UserError)):  # a guard tries once more
        with pytest.raises(refused) as failed:
            start_run(plan, {}, fleet, is_restart=again)
        assert str(failed.value) == "a: run r was just started by you@there. Nothing was started"
    assert [actions(fleet, name) for name in NAMES] == [["start"] * 2, [], []]
    assert capsys.readouterr().out == ""


def test_only_hosts_that_were_asked_are_told_of(fleet, plan, capsys):
    fleet.fakes["b"].faults["start"] = reader.dumps(StartReply(StartFault.TAKEN, by="you@there"))
    with pytest.raises(StartError):
        start_run(plan, {}, fleet)
    assert actions(fleet, "b") == ["start"]  # it is another launch's: there is nothing to end
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == list(NAMES)
    fleet.fakes["a"].faults["start"] = reader.dumps(StartReply(StartFault.TMUX, detail="no server"))
    with pytest.raises(StartError):
        start_run(plan, {}, fleet)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["a"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), HostError("the link broke")])
def test_a_terminal_that_dies_between_the_two_steps_leaves_nothing(fleet, plan, fault):
    fleet.fakes["b"].faults["keep"] = fault
    with pytest.raises((KeyboardInterrupt, StartError)):
        start_run(plan, {}, fleet)
    assert alive(fleet) == []


def test_a_host_that_was_stopped_while_the_others_started_ends_them(fleet, plan):
    fleet.fakes["a"].keep = lambda: [reader.dumps(Committed("you@there"))]
    with pytest.raises(StartError, match="a: run r was stopped by you@there"):
        start_run(plan, {}, fleet)
    assert [name for name in alive(fleet) if name != "a"] == []
    assert actions(fleet, "b")[-1] == "stop"


def test_hosts_hear_of_the_stop_that_a_launch_has_seen(fleet):
    fleet.fakes["b"].stopped_at = 5.0
    launch(
        parse_launch(["--run", "r", "--", "-m", "mine"], 0.0), list(fleet.hosts.values()), fleet, on_line=lambda _: None
    )
    known = [host.heard[-1][1].known_stop for host in fleet.fakes.values()]
    assert known == [0.0, 5.0, 0.0]


def test_an_answer_that_never_comes_is_named(fleet, plan, monkeypatch):
    monkeypatch.setattr(starting, "START_REPLY_TIMEOUT_S", 0.5)
    fleet.fakes["c"].keep = list
    with pytest.raises(StartError, match="c: did not answer within"):
        start_run(plan, {}, fleet)
    assert alive(fleet) == []


def test_what_cannot_be_asked_is_not_called_ended(fleet, plan):
    fleet.fakes["b"].faults |= {"start": HostError("gone"), "stop": HostError("gone")}
    with pytest.raises(StartError, match="stop --run r` once b can be reached"):
        start_run(plan, {}, fleet)


def test_one_machine_under_two_names_is_said(fleet):
    fleet.fakes["b"].machine = "a"
    said = []
    launch(
        parse_launch(["--run", "r", "--", "-m", "mine"], 0.0), list(fleet.hosts.values()), fleet, on_line=said.append
    )
    assert said[0] == "note: a,b are the same machine; keep one of them in the hosts file"


def test_stop_asks_every_host_and_says_who_did_not_answer(fleet, plan):
    start_run(plan, {}, fleet)
    fleet.fakes["c"].faults["stop"] = HostError("gone")
    ends = HostsBackend("r", Path("hosts")).stop(fleet, "r", "me@here", 30.0)
    assert [name for name, end in ends.items() if isinstance(end, HostError)] == ["c"]
    assert all(not ends[name].survivors and ends[name].was_alive and ends[name].stopped_by for name in "ab")
    assert fleet.fakes["a"].heard[-1][1].grace_s == 30.0


def test_a_launch_warns_of_pure_bf16_at_a_small_learning_rate(fleet):
    words = ["--run", "r", "--model.path", "m", "--data.paths", "d", "--training.global_batch_size", "0"]

    def said(*more):
        lines = []
        launch(parse_launch([*words, *more], 0.0), list(fleet.hosts.values()), fleet, on_line=lines.append)
        for host in fleet.fakes.values():
            host.alive = False
        return "\n".join(lines)

    assert "note: with numerics pure-bf16 a step at learning rate 1e-05 changes about 2.7% of the weights; " in said(
        "--parallel.numerics", "pure-bf16"
    )
    assert "pure-bf16" not in said()


def test_a_launch_tells_and_refuses_what_is_known_to_go_wrong_with_the_hosts_versions(fleet, monkeypatch):
    words = ["--run", "r", "--model.path", "m", "--data.paths", "d", "--training.global_batch_size", "0"]
    request, lines = parse_launch([*words, "--parallel.offload", "optimizer"], 0.0), []
    for host in fleet.fakes.values():
        monkeypatch.setattr(host, "probe", lambda request, probe=host.probe: _with_versions(probe(request)))
    launch(request, list(fleet.hosts.values()), fleet, on_line=lines.append)
    told = [line for line in lines if line.startswith("note: torch 2.15.0 keeps the FP32 gradients of every unit")]
    assert told
    assert told[0].endswith(
        "use an older torch, or --parallel.offload all (https://github.com/pytorch/pytorch/pull/179443)"
    )
    bug = KnownBug("torch", "2.15", "refuse", "cannot be used", "use 2.13")
    monkeypatch.setattr("llama405b_tools.launch.preflight.load_known_bugs", lambda: (bug,))
    for host in fleet.fakes.values():
        host.alive = False
    with pytest.raises(UserError, match=r"^torch 2\.15\.0 cannot be used; use 2\.13\. Nothing was started$"):
        launch(request, list(fleet.hosts.values()), fleet)
    assert alive(fleet) == []


def _with_versions(facts, **versions):
    return dataclasses.replace(facts, versions=versions or {"torch": "2.15.0"})


@pytest.mark.parametrize("odd", [(), ("b",), NAMES])
def test_hosts_with_other_code_are_refused_and_an_operator_with_other_code_is_told(fleet, monkeypatch, odd):
    for name, host in fleet.fakes.items():
        code = "0.2.0+0000" if name in odd else code_version()
        monkeypatch.setattr(
            host, "probe", lambda request, probe=host.probe, it=code: _with_versions(probe(request), llama405b=it)
        )
    request, lines = parse_launch(["--run", "r", "--", "mine.py"], 0.0), []
    if odd == ("b",):
        said = rf"llama405b is {re.escape(code_version())} on most hosts, but b has 0\.2\.0\+0000; .* or run `.*llama405b setup`"
        with pytest.raises(RunError, match=said):
            launch(request, list(fleet.hosts.values()), fleet)
    else:
        launch(request, list(fleet.hosts.values()), fleet, on_line=lines.append)
    told = [
        line
        for line in lines
        if line.startswith(f"note: the hosts run llama405b 0.2.0+0000, and this machine {code_version()}")
    ]
    assert len(told) == (odd == NAMES)
