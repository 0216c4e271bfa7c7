"""The node runner's own log, where each attempt's line comes before what its torchrun writes; and secrets in the others."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from conftest import ROOT
from llama405b.contract.files import read_record, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, Heartbeat, NodeState, NodeStatus, Phase, StopMark
from llama405b.spec.plan import Node, Plan, read_plan
from llama405b_tools.agent import node as node_runner
from llama405b_tools.agent.node import NodeRunner
from llama405b_tools.agent.processes import write_secrets
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure
from ops_rig import wait_for


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "runs/r")
    write_json(found.plan, Plan("r", 3, 5.0, "r-3-x", "a:1", ("-m", "mine"), (),
                                (Node("a", 1, 0, str(tmp_path), "/py", "10.0.0.1", "lo", {}),)))  # fmt: skip
    found.logs("a").mkdir(parents=True)
    return found


class Pane:
    """A terminal that takes nothing until it is told to."""

    def __init__(self):
        self.waits, self.takes = threading.Event(), threading.Event()

    def print(self, *_, **__):
        self.waits.set()
        self.takes.wait(120)


class Child:
    code = None

    def poll(self):
        return self.code


@pytest.mark.slow
def test_the_times_of_log_lines_do_not_wait_for_the_pane(run, monkeypatch):
    pane, child, runner, log = Pane(), Child(), NodeRunner(run, "a"), run.logs("a") / "rank.log"
    monkeypatch.setattr(node_runner, "print", pane.print, raising=False)
    threads = runner.watch_logs(child)
    try:
        for size in (4, 8):
            with log.open("a") as file:
                file.write("one\n")
            assert pane.waits.wait(120)  # from here on it is stuck
            wait_for(lambda size=size: run.times("a").exists() and f" {size} rank.log\n" in run.times("a").read_text())
    finally:
        child.code = 0
        runner.torchrun_ended.set()
        pane.takes.set()
        for thread in threads:
            thread.join(30)


def test_the_line_of_an_attempt_is_on_disk_before_torchrun_starts(run, monkeypatch):
    seen = []
    monkeypatch.setattr(node_runner.subprocess, "Popen", lambda *_, **__: seen.append(run.agent_log("a").read_bytes()))
    NodeRunner(run, "a").start_torchrun()
    assert seen[0].startswith(b'\nattempt 3: ["/py", "-P", "-m", "torch.distributed.run"')


def test_where_somebody_ended_torchrun_it_began_not_where_its_peers_lost_contact(run):
    run.agent_log("a").write_text(
        (ROOT / "tests/data/foreign/torchrun/ended.log").read_text().replace("attempt 1", "attempt 3")
    )
    own = NodeRunner(run, "a").find_first_failure(1)
    assert own == Cause(CauseKind.TORCHRUN_KILLED, "a", signal=15, exit_code=1)
    peers = [Failure(name, Cause(CauseKind.LOST_PEER, name)) for name in ("b", "c")]
    assert judge.first_failure([*peers, Failure("a", own)]).host == "a"


@pytest.fixture
def two_failed(run):
    """The node runner of a host with two ranks, both of which torchrun saw fail within a second: so it names the first."""
    write_json(
        run.plan, dataclasses.replace(plan := read_plan(run), nodes=(dataclasses.replace(plan.nodes[0], slots=2),))
    )
    recorded = (ROOT / "tests/data/foreign/torchrun/two-failed.log").read_text()
    run.agent_log("a").write_text(recorded.replace("attempt 1", "attempt 3"))
    return NodeRunner(run, "a")


@pytest.mark.parametrize("ends", [{}, {0: 70.0, 1: 70.0}, {0: 70.0, 1: 70.9}, {1: 70.0, 0: 70.3}])
def test_a_word_of_a_lost_peer_is_not_the_cause_where_the_end_of_the_peer_is_known(two_failed, run, ends):
    lost = Cause(CauseKind.LOST_PEER, "a", 0, phase="train")
    write_json(run.heartbeat(0), Heartbeat(0, "a", 1, 0.0, 0, Phase.FAILED, 0.0, cause=lost))
    two_failed.rank_end_times = ends
    assert two_failed.find_first_failure(1) == Cause(CauseKind.RANK_KILLED, "a", 1, signal=9)
    write_json(
        run.heartbeat(0), Heartbeat(0, "a", 1, 0.0, 0, Phase.TRAIN, 0.0)
    )  # or it leaves no word, as a program of the user's own
    assert two_failed.find_first_failure(1).rank == (0 if ends.get(0, 0.0) < ends.get(1, 0.0) else 1)
    write_json(run.heartbeat(0), Heartbeat(0, "a", 1, 0.0, 0, Phase.FAILED, 0.0, cause=lost))
    two_failed.rank_end_times = {0: 70.0, 1: 100.0}  # torchrun ended it, as it did not go
    assert two_failed.find_first_failure(1).kind is CauseKind.LOST_PEER


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_ended_first_is_named_whichever_torchrun_names(two_failed, monkeypatch, first):
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    monkeypatch.setattr(node_runner, "rank_processes", lambda _: {n: rank.pid for n, rank in enumerate(ranks)})
    watch = threading.Thread(target=two_failed.watch_ranks)
    watch.start()
    for n in (first, 1 - first):
        ranks[n].kill()
        wait_for(lambda n=n: n in two_failed.rank_end_times)
    watch.join(60)
    assert two_failed.find_first_failure(1).rank == first
    for rank in ranks:
        rank.wait()


def test_a_failure_has_its_ranks_gpu_and_the_time_at_which_that_was_seen_to_end(two_failed, run, monkeypatch):
    write_json(run.heartbeat(1), Heartbeat(1, "a", 1, 0.0, 0, Phase.TRAIN, 0.0, gpu="3"))
    monkeypatch.setattr(node_runner.time, "time", lambda: 1000.0)
    monkeypatch.setattr(node_runner.time, "monotonic", lambda: 90.0)
    two_failed.rank_end_times = {1: 70.0, 0: 84.0}
    two_failed.write_final_status(1)
    status = read_record(NodeStatus, run.status("a"))
    assert status.cause == Cause(CauseKind.RANK_KILLED, "a", 1, signal=9, gpu="3")
    assert status.time == 980.0


def test_where_torchrun_failed_without_a_rank_its_last_line_is_told(run):
    runner, log = NodeRunner(run, "a"), run.agent_log("a")
    runner.secret_parts = ["canary"]
    for text, last in (("Traceback:\nImportError: no canary here\n", " (ImportError: no …REDACTED here)"), ("", "")):
        log.write_text(f'attempt 2: []\nold\nattempt 3: ["py"]\n{text}')
        assert runner.find_first_failure(1).detail == f"{log}{last}"


@pytest.mark.parametrize(("by", "state"), [("me", NodeState.STOPPED), ("", NodeState.EXITED)])
def test_where_a_stop_reached_another_host_first_the_run_was_stopped(run, by, state):
    recorded = (ROOT / "tests/data/foreign/torchrun/rank-exited.log").read_text()
    run.agent_log("a").write_text(re.sub(r"attempt \d", "attempt 3", recorded))
    write_json(run.heartbeat(0), Heartbeat(0, "a", 1, 0.0, 0, Phase.EVAL, 0.0, cause=Cause(CauseKind.LOST_PEER, "a")))
    if by:
        write_json(run.stop("a"), StopMark(by))
    NodeRunner(run, "a").write_final_status(1)
    assert read_record(NodeStatus, run.status("a")).state is state


@pytest.mark.parametrize("victim", ["nobody", "node runner"])
def test_a_secret_that_the_program_prints_is_in_no_file_once_the_run_is_over(run, tmp_path, victim):
    canary, log = "canary 9b1c44", run.logs("a") / "r-3-12345678_x/attempt_0/0/stdout.log"
    torchrun, hold = tmp_path / "py", "exec sleep 600" if victim == "node runner" else ":"
    torchrun.write_text(f'#!/bin/sh\nmkdir -p {log.parent}\necho "it is $KEY!" | tee {log} >&2\n{hold}\n')
    torchrun.chmod(0o755)
    plan = Plan("r", 3, 5.0, "r-3-x", "a:1", ("mine.py",), ("KEY",),
                (Node("a", 1, 0, str(tmp_path), str(torchrun), "10.0.0.1", "lo", {}),))  # fmt: skip
    write_json(run.plan, plan)
    write_secrets(run.secrets("a"), {"KEY": canary})
    runner = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.agent.node", str(run.path), "a"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"},
        stdout=subprocess.DEVNULL,
    )
    if victim == "node runner":
        wait_for(lambda: log.exists() and log.read_text().endswith("!\n"))
        runner.send_signal(signal.SIGKILL)
    runner.wait(120)
    over = (NodeState.EXITED, NodeState.KILLED)
    wait_for(lambda: (status := read_record(NodeStatus, run.status("a"))) and status.state in over)
    assert log.read_text() == "it is REDACTED*****!\n"
    for path in filter(os.path.isfile, run.path.rglob("*")):
        assert canary not in path.read_text(), path
