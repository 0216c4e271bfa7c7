"""Rungs on hosts: their results as they come, what becomes of a host that fails, and that nothing is left."""

import pytest
from fakes import FakeFleet, over

from llama405b.contract import reader
from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.errors import RunError
from llama405b.contract.rungs import SIGN, Figure, Rung, RungResult
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote.messages.stream import StreamMessage
from llama405b_tools.run import follow
from llama405b_tools.run.ladder import climb_on
from llama405b_tools.run.request import parse_launch
from llama405b_tools.verbs import bench

GOOD = RungResult(Rung.START, 2, 2, "cpu", "2.13", 1.0, (Figure("first", 0.1, "s"),))
LINKS = RungResult(Rung.COLLECTIVES, 2, 2, "cpu", "2.13", 1.0)


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    monkeypatch.setattr(follow, "PEER_GRACE_S", 0.05)
    with FakeFleet(("a", "b")) as found:
        yield found


def said(*results):
    return [StreamMessage(entries=((0.0, "a/0/stdout.log", SIGN + reader.dumps(result)),)) for result in results]


def climbed(fleet, on_a, on_b, rungs):
    fleet.fakes["a"].lives, fleet.fakes["b"].lives = [on_a], [on_b]
    told = []
    request = parse_launch(["--run", "r", "--preset", "demo"], 0.0)
    found = climb_on(request, list(fleet.hosts.values()), fleet, rungs, 60.0, told.append, on_cpu=True)
    assert found == told
    for host in fleet.fakes.values():
        assert "stop" in [heard for heard, _ in host.heard]  # a last question may still be under way
        assert not host.alive
    return found


def test_results_are_told_and_the_rest_is_ended(fleet):
    rungs = [Rung.START, Rung.COLLECTIVES, Rung.UPDATE]  # the last is for one rank
    assert climbed(fleet, said(GOOD, LINKS), [], rungs) == [GOOD, LINKS]
    [start] = [request for heard, request in fleet.fakes["b"].heard if heard == "start"]
    program = start.plan.program
    assert program[:2] == ("-m", "llama405b.commands.ladder.program")
    assert program[program.index("--tests") + 1] == "start,collectives,update"
    assert program[program.index("--device") + 1] == "cpu"


def test_results_are_found_among_whatever_else_is_printed(fleet):
    noise = [StreamMessage(entries=((0.0, "a/0/stdout.log", f"NCCL INFO {i}"),)) for i in range(4000)]
    assert climbed(fleet, [*said(GOOD), *noise, *said(LINKS)], [], [Rung.START, Rung.COLLECTIVES]) == [GOOD, LINKS]


def test_what_cannot_be_ended_is_said(fleet):
    fleet.fakes["b"].faults["stop"] = HostError("gone")
    with pytest.raises(RunError, match="b: could not be queried: gone"):
        climbed(fleet, said(GOOD), [], [Rung.START])


def test_without_gpus_they_are_hidden(fleet):
    climbed(fleet, said(GOOD), [], [Rung.START])
    [start] = [request for heard, request in fleet.fakes["b"].heard if heard == "start"]
    assert start.plan.nodes[1].env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_rung_that_fails_is_the_last(fleet):
    bad = RungResult(Rung.COLLECTIVES, 2, 2, "cpu", "2.13", 1.0, fault="all-gather gives 1 instead of 2")
    ended = over("a", Cause(CauseKind.RANK_EXIT, "a", 0, detail="x"))
    assert climbed(fleet, [*said(GOOD, bad), ended], [over("b")], [Rung.START, Rung.COLLECTIVES, Rung.COPIES]) == [
        GOOD,
        bad,
    ]


def test_a_host_that_fails_is_named_with_the_rung_it_was_on(fleet):
    killed = over("b", Cause(CauseKind.RANK_KILLED, "b", 1, signal=9))
    found = climbed(fleet, said(GOOD), [killed], [Rung.START, Rung.COLLECTIVES])
    assert found[0] == GOOD
    assert (found[1].rung, found[1].good) == (Rung.COLLECTIVES, False)
    assert found[1].fault == "b: exited 1: rank 1 was killed by SIGKILL"


def test_a_program_that_ends_without_a_result_has_not_climbed(fleet):
    [found] = climbed(fleet, [over("a")], [over("b")], [Rung.START])
    assert (found.rung, found.good) == (Rung.START, False)


@pytest.mark.parametrize(("failed", "scopes"), [(Rung.LAYER_NONE, 3), (Rung.COPIES, 1)])
def test_only_what_all_else_needs_ends_the_ladder(monkeypatch, tmp_path, capsys, failed, scopes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2 address=127.0.0.1\nb slots=2 address=127.0.0.1\n")
    seen = []

    def climb(request, hosts, fleet, rungs, within_s, say):
        seen.append([(host.name, host.slots) for host in hosts])
        say(result := RungResult(failed, 1, 1, fault="no memory" * (len(seen) == 1)))
        return [result]

    monkeypatch.setattr(bench, "climb_on", climb)
    assert bench.main(["hosts", "--out", "found", "--env", "A=1", "--setup-line", "true"]) == 1
    assert seen == [[("a", 1)], [("a", 2)], [("a", 2), ("b", 2)]][:scopes]
    assert "FAILED" in capsys.readouterr().out
