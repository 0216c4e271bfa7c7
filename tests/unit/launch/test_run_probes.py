"""Probes on hosts: their results as they come, what becomes of a host that fails, and that nothing is left."""

import pytest
from fakes import FakeFleet, over

from llama405b.contract.errors import RunError
from llama405b.contract.records import Cause, CauseKind
from llama405b.spec.probes import Figure, Probe, ProbeResult, encode_result
from llama405b_tools.agent.messages import StreamMessage
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.launch.probes import run_probes
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.run import follow
from llama405b_tools.verbs import bench

GOOD = ProbeResult(Probe.START, 2, 2, "cpu", "2.13", 1.0, (Figure("first", 0.1, "s"),))
LINKS = ProbeResult(Probe.COLLECTIVES, 2, 2, "cpu", "2.13", 1.0)


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "POLL_S", 0.01)
    monkeypatch.setattr(follow, "PEER_GRACE_S", 0.05)
    with FakeFleet(("a", "b")) as found:
        yield found


def said(*results):
    return [
        StreamMessage(entries=((0.0, "a/0/stdout.log", line),)) for result in results for line in encode_result(result)
    ]


def measured(fleet, on_a, on_b, probes, *flags):
    fleet.fakes["a"].lives, fleet.fakes["b"].lives = [on_a], [on_b]
    told = []
    request = parse_launch(["--run", "r", "--preset", "demo", *flags], 0.0)
    found = run_probes(request, list(fleet.hosts.values()), fleet, probes, 60.0, told.append)
    assert found == told
    for host in fleet.fakes.values():
        assert "stop" in [heard for heard, _ in host.heard]  # a last question may still be under way
        assert not host.alive
    return found


def test_results_are_told_and_the_rest_is_ended(fleet):
    probes = [Probe.START, Probe.COLLECTIVES, Probe.UPDATE]  # the last is for one rank
    assert measured(fleet, said(GOOD, LINKS), [], probes, "--parallel.device", "cpu") == [GOOD, LINKS]
    [start] = [request for heard, request in fleet.fakes["b"].heard if heard == "start"]
    program = start.plan.program
    assert program[:2] == ("-m", "llama405b.bench")
    assert program[program.index("--probes") + 1] == "start,collectives,update"
    assert program[program.index("--device") + 1] == "cpu"


def test_results_are_found_among_whatever_else_is_printed(fleet):
    noise = [StreamMessage(entries=((0.0, "a/0/stdout.log", f"NCCL INFO {i}"),)) for i in range(4000)]
    assert measured(fleet, [*said(GOOD), *noise, *said(LINKS)], [], [Probe.START, Probe.COLLECTIVES]) == [GOOD, LINKS]


def test_what_cannot_be_ended_is_said(fleet):
    fleet.fakes["b"].faults["stop"] = HostError("gone")
    with pytest.raises(RunError, match="b: could not be queried: gone"):
        measured(fleet, said(GOOD), [], [Probe.START])


def test_without_gpus_they_are_hidden(fleet):
    measured(fleet, said(GOOD), [], [Probe.START], "--parallel.device", "cpu")
    [start] = [request for heard, request in fleet.fakes["b"].heard if heard == "start"]
    assert start.plan.nodes[1].env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_probe_that_fails_is_the_last(fleet):
    bad = ProbeResult(Probe.COLLECTIVES, 2, 2, "cpu", "2.13", 1.0, fault="all-gather gives 1 instead of 2")
    ended = over("a", Cause(CauseKind.RANK_EXIT, "a", 0, detail="x"))
    assert measured(fleet, [*said(GOOD, bad), ended], [over("b")], [Probe.START, Probe.COLLECTIVES, Probe.COPIES]) == [
        GOOD,
        bad,
    ]


def test_a_host_that_fails_is_named_with_the_probe_it_was_on(fleet):
    killed = over("b", Cause(CauseKind.RANK_KILLED, "b", 1, signal=9))
    found = measured(fleet, said(GOOD), [killed], [Probe.START, Probe.COLLECTIVES])
    assert found[0] == GOOD
    assert (found[1].probe, found[1].passed) == (Probe.COLLECTIVES, False)
    assert found[1].failure_reason == "b: exited 1: rank 1 was killed by SIGKILL"


def test_a_program_that_ends_without_a_result_has_failed(fleet):
    [found] = measured(fleet, [over("a")], [over("b")], [Probe.START])
    assert (found.probe, found.passed) == (Probe.START, False)


@pytest.mark.parametrize(("failed", "scopes"), [(Probe.LAYER_NONE, 3), (Probe.COPIES, 1)])
def test_only_what_all_else_needs_ends_the_tests(monkeypatch, tmp_path, capsys, failed, scopes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2 address=127.0.0.1\nb slots=2 address=127.0.0.1\n")
    seen = []

    def run(request, hosts, fleet, probes, within_s, say):
        seen.append([(host.name, host.slots) for host in hosts])
        say(result := ProbeResult(failed, 1, 1, fault="no memory" * (len(seen) == 1)))
        return [result]

    monkeypatch.setattr(bench, "run_probes", run)
    assert bench.main(["hosts", "--out", "found", "--env", "A=1", "--setup-line", "true"]) == 1
    assert seen == [[("a", 1)], [("a", 2)], [("a", 2), ("b", 2)]][:scopes]
    assert "FAILED" in capsys.readouterr().out
