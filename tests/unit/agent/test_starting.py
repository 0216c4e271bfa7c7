"""Starting a host's part, with a real tmux: whatever is not kept the host ends by itself, whoever still listens."""

import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.contract import reader
from llama405b.contract.errors import RunError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import CauseKind, GuardState, NodeState, NodeStatus, StopMark
from llama405b.spec.plan import Node, Plan, read_plan
from llama405b_tools.agent import describe, launch_facts, machine, processes, starting
from llama405b_tools.agent.launch_facts import ProbeRequest
from llama405b_tools.agent.machine import DirectoryCheck, DirectoryFault
from llama405b_tools.agent.messages import (
    COMMIT,
    RELEASE,
    START_REPLY_TIMEOUT_S,
    StartFault,
    StartReply,
    StartRequest,
)
from llama405b_tools.agent.processes import tmux_socket
from llama405b_tools.hosts import calls
from ops_rig import wait_for


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory, with the terminal gone: standard input is at its end."""
    monkeypatch.chdir(tmp_path)
    nobody = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(sys, "stdin", os.fdopen(nobody))
    before = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGHUP)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def start_with(node_runner: str, work: Path, monkeypatch) -> dict:
    """What is answered where ``node_runner`` (a shell line) is what tmux starts."""
    program = work / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {work}/pid\n{node_runner}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    plan = Plan(f"r{os.getpid()}", 1, time.time(), "r-1-x", "a:1", ("-m", "llama405b.train"), (),
                (Node("a", 1, 0, str(work), "/py", "10.0.0.1", "eth0", {}),))  # fmt: skip
    starting.start(StartRequest("a", plan, {"TOKEN": "t"}, (0,)))
    monkeypatch.undo()
    assert not list((work / "runs").rglob("*secrets*"))
    server = tmux_socket(RunDir(work / "runs" / plan.run))
    tmux = [shutil.which("tmux"), "-L", server, "has-session"]
    assert subprocess.run(tmux, capture_output=True, timeout=10).returncode != 0
    assert not Path(f"/tmp/tmux-{os.getuid()}/{server}").exists()
    return json.loads(said.getvalue())


def give_up_once_it_runs(monkeypatch, work):
    """Have the time for the start be over once what tmux starts has written its number."""
    passed = []

    def monotonic():
        passed.append((work / "pid").exists() and (work / "pid").read_text().endswith("\n"))
        return starting.START_TIMEOUT_S * sum(passed)

    monkeypatch.setattr(starting, "time", types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


def test_a_launch_ends_the_guard_of_an_earlier_one_on_this_machine(work, monkeypatch):
    guard = subprocess.Popen(["sleep", "600"])
    run = RunDir(work / "runs" / f"r{os.getpid()}")
    began = processes.start_time(guard.pid)
    write_json(run.guard, GuardState(run.name, guard.pid, began, processes.machine_id(), 1))
    start_with("exit 3", work, monkeypatch)
    assert guard.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize(("alive", "again", "taken"), [(True, False, True), (False, False, False), (True, True, False)])
def test_a_run_is_its_directory_on_a_machine_whatever_its_host_is_called(work, monkeypatch, alive, again, taken):
    run, pid = RunDir(work / "runs/r"), os.getpid() if alive else 2**22 + 1
    write_json(run.status("gpu-1"), NodeStatus("gpu-1", NodeState.RUNNING, 1, pid, processes.start_time(os.getpid())))
    nodes = tuple(Node(name, 1, 0, str(work), "/py", "", "", {}) for name in ("gpu-1", "gpu-2"))
    mine = Plan("r", 1, 0.0, "r-1-x", "a:1", (), (), nodes, owner="ann@desk")
    write_json(run.plan, mine)
    monkeypatch.setattr(starting, "start_session", lambda *_: (_ for _ in ()).throw(RunError("no tmux")))
    # also that of another machine with the same directory, where its pid is not alive
    held = processes.take_lock(run.lock("gpu-1"))
    asked = reader.loads(
        ProbeRequest, '{"run": "r", "host": "10.0.0.1", "port": 0, "token": "", "packages": [], "places": {}}', ""
    )
    facts = launch_facts._collect_facts(asked)
    assert (facts.alive, facts.alive_as) == (False, ("gpu-1",) if alive else ())
    assert launch_facts._collect_facts(dataclasses.replace(asked, run="other")).others == (("r",) if alive else ())
    other = Plan("r", 2, 0.0, "r-2-y", "10.0.0.1:1", (), (), (Node("10.0.0.1", 1, 0, str(work), "/py", "", "", {}),))
    claims = []
    monkeypatch.setattr(starting, "take_lock", lambda *args: claims.append(processes.take_lock(*args)) or claims[-1])
    assert starting._start_node_runner(StartRequest("gpu-2", mine, {}, (0,), again)).fault is StartFault.TMUX
    assert processes.find_live_names(run, {"gpu-1"}) == ["gpu-2"]  # as long as its agent starts it
    os.close(claims[-1])
    fault = StartFault.TAKEN if taken else StartFault.TMUX
    assert starting._start_node_runner(StartRequest("10.0.0.1", other, {}, (0,), again)).fault is fault
    assert read_plan(run).rdzv_id == ("r-1-x" if taken else "r-2-y")
    os.close(held)


@pytest.mark.slow
def test_of_two_launches_under_two_names_of_a_host_one_is_refused_at_whatever_moment(work, monkeypatch):
    met = threading.Barrier(2)

    def write_files(request, run):
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(1)  # for the other to have seen that nobody starts it, if it may look now
        write_json(run.plan, request.plan)

    monkeypatch.setattr(starting, "_write_files", write_files)
    monkeypatch.setattr(starting, "start_session", lambda *_: (_ for _ in ()).throw(RunError("no tmux")))
    nodes = [Node(name, 1, 0, str(work), "/py", "", "", {}) for name in ("gpu-1", "10.0.0.1")]
    plans = [Plan("r", 1, 0.0, f"r-1-{node.name}", "", (), (), (node,), owner="ann@desk") for node in nodes]
    requests = [StartRequest(plan.nodes[0].name, plan, {}, (0,)) for plan in plans]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        told = list(pool.map(starting._start_node_runner, requests))
    assert {each.fault: each.by for each in told} == {StartFault.TMUX: "", StartFault.TAKEN: "ann@desk"}


def test_one_that_has_yet_to_wait_for_its_turn_is_not_in_the_way(work, monkeypatch):
    """It holds its own lock for a moment: both would be refused."""
    run = processes.resolve_run_dir("r")
    monkeypatch.setattr(starting, "start_session", lambda *_: (_ for _ in ()).throw(RunError("no tmux")))
    other = processes.take_lock(run.start_lock("10.0.0.1"))
    threading.Timer(0.4, lambda: os.close(other)).start()
    node = Node("gpu-1", 1, 0, str(work), "/py", "", "", {})
    plan = Plan("r", 1, 0.0, "r-1", "", (), (), (node,), owner="ann@desk")
    assert starting._start_node_runner(StartRequest("gpu-1", plan, {}, (0,))).fault is StartFault.TMUX


def test_hosts_of_one_launch_that_share_a_directory_do_not_refuse_each_other(work, monkeypatch):
    monkeypatch.setattr(starting, "start_session", lambda *_: (_ for _ in ()).throw(RunError("no tmux")))
    run, nodes = RunDir(work / "runs/r"), [Node(name, 1, 0, str(work), "/py", "", "", {}) for name in ("a", "b")]
    held = processes.take_lock(run.start_lock("a"))  # which ends what an earlier attempt left to be copied
    write_json(run.plan, Plan("r", 1, 0.0, "r-1-x", "", (), (), tuple(nodes)))
    again = StartRequest("b", Plan("r", 2, 0.0, "r-2-x", "", (), (), tuple(nodes)), {}, (0,))
    assert starting._start_node_runner(again).fault is StartFault.TMUX
    os.close(held)


def test_a_run_of_the_same_name_in_another_directory_is_not_ended(work, monkeypatch):
    give_up_once_it_runs(monkeypatch, work)
    monkeypatch.setattr(starting, "stop", lambda *_, **__: None)  # its start is kept
    monkeypatch.setattr(starting.sys, "stdout", io.StringIO())
    (work / "python").write_text(f"#!/bin/sh\necho $$ > {work}/pid\nexec sleep 600\n")
    (work / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(work / "python"))
    plan = Plan(f"r{os.getpid()}", 1, time.time(), "r-1-x", "a:1", (), (), (Node("a", 1, 0, "/w", "/py", "", "", {}),))
    starting.start(StartRequest("a", plan, {}, (0,)))
    monkeypatch.undo()
    runner = int((work / "pid").read_text())
    (work / "other").mkdir()
    monkeypatch.chdir(work / "other")
    assert not starting.stop(plan.run, "a").known
    assert processes.start_time(runner) is not None
    monkeypatch.chdir(work)
    starting.stop(plan.run, "a")
    wait_for(lambda: processes.start_time(runner) is None)  # tmux has ended it, and the kernel takes its time


@pytest.mark.parametrize("cut", [False, True])
def test_a_tethered_run_ends_with_its_operator(work, monkeypatch, cut):
    run, marker = RunDir(work / "runs" / "r"), {"LLAMA405B_NODE": f"{work}/runs/r:a"}
    run.path.mkdir(parents=True)
    runner = subprocess.Popen(["sleep", "600"], env=os.environ | marker)
    command = [sys.executable, "-m", "llama405b_tools.agent.agent", "tether"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
    agent = subprocess.Popen(command, cwd=work, env=os.environ | path, stdin=subprocess.PIPE, text=True)
    agent.stdin.write(calls.encode_arguments(starting.tether, "r", "a") + "\n" + (RELEASE if cut else ""))
    agent.stdin.close()  # as when the operator's process is killed
    assert agent.wait(60) == 0
    lives = runner.poll() is None
    runner.kill()
    assert lives is cut


def test_a_node_runner_that_never_starts_torchrun_is_ended(work, monkeypatch):
    give_up_once_it_runs(monkeypatch, work)
    assert start_with("exec sleep 600", work, monkeypatch)["fault"] == "slow"
    assert processes.start_time(int((work / "pid").read_text())) is None


def test_a_node_runner_that_ends_without_a_word_is_not_waited_for(work, monkeypatch):
    assert start_with("exit 3", work, monkeypatch)["fault"] == "ended"  # "slow": where it was


def test_one_that_nobody_keeps_is_ended(work, monkeypatch):
    status = '{"host": "a", "state": "running", "attempt": 1, "pid": 1, "pid_start": 1}'
    runner = f"mkdir -p runs/r{os.getpid()}/status; echo '{status}' > runs/r{os.getpid()}/status/a.json; exec sleep 600"
    assert not start_with(runner, work, monkeypatch).get("fault")
    assert processes.start_time(int((work / "pid").read_text())) is None


def test_a_node_runner_and_a_tmux_that_need_more_than_20_s_are_waited_for(work, monkeypatch):
    run, slept = RunDir(work / "runs" / "r"), []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) * 25 == 100:
            write_json(run.status("a"), NodeStatus("a", NodeState.RUNNING, 1, 1, 1))

    monkeypatch.setattr(starting.time, "sleep", sleep)
    monkeypatch.setattr(starting.time, "monotonic", lambda: len(slept) * 25.0)
    assert starting._wait_for_torchrun(run, "a", os.getpid()).fault is None
    assert processes.TMUX_START_TIMEOUT_S > 20
    assert START_REPLY_TIMEOUT_S > processes.TMUX_START_TIMEOUT_S + starting.START_TIMEOUT_S


RUNS = 'mkdir -p $RUN/status; echo "{\\"host\\": \\"a\\", \\"state\\": \\"running\\", ' + (
    '\\"attempt\\": 1, \\"pid\\": 1, \\"pid_start\\": 1}" > $RUN/status/a.json; exec sleep 600'
)


def test_a_node_runner_that_is_stopped_at_once_was_stopped(work):
    run = RunDir(work / "runs" / "r")
    write_json(run.stop("a"), StopMark("you@there"))
    gone = subprocess.Popen(["true"])
    gone.wait()
    started = starting._wait_for_torchrun(run, "a", gone.pid)
    assert (started.fault, started.by) == (StartFault.STOPPED_SINCE, "you@there")


def test_one_that_nobody_keeps_leaves_a_note_that_not_all_hosts_had_started(work, monkeypatch):
    assert not start_with(RUNS.replace("$RUN", f"runs/r{os.getpid()}"), work, monkeypatch).get("fault")
    (blame,) = describe.describe_run(run := RunDir(work / f"runs/r{os.getpid()}"), read_plan(run), "a").blames
    assert (blame.attempt, blame.cause.kind) == (1, CauseKind.NOT_KEPT)


def test_a_stop_that_the_launch_does_not_know_is_meant_for_it(work, monkeypatch):
    run = RunDir(work / "runs" / "r")
    plan = Plan("r", 2, time.time(), "r-2-x", "a:1", ("x",), (), (Node("a", 1, 0, "/w", "/py", "", "", {}),))
    monkeypatch.setattr(starting, "start_session", lambda *_: os.getpid())
    monkeypatch.setattr(starting, "_wait_for_torchrun", lambda *_: StartReply())
    write_json(run.stop("a"), StopMark("you@there", 0.0, 7.0))
    assert starting._start_node_runner(StartRequest("a", plan, {}, (0,), known_stop=7.0)).fault is None
    assert not run.stop("a").exists()
    write_json(run.stop("b"), StopMark("you@there", 0.0, 8.0))
    started = starting._start_node_runner(StartRequest("b", plan, {}, (0,), known_stop=7.0))
    assert (started.fault, started.by) == (StartFault.STOPPED, "you@there")


def test_one_that_was_stopped_meanwhile_is_not_kept(work, monkeypatch):
    run, ended = RunDir(work / "runs" / "r"), []
    plan = Plan("r", 1, time.time(), "r-1-x", "a:1", ("x",), (), ())
    monkeypatch.setattr(
        starting, "_start_node_runner", lambda _: write_json(run.stop("a"), StopMark("you@there")) or StartReply()
    )
    monkeypatch.setattr(starting, "stop", lambda *_, only, **__: ended.append(only))
    monkeypatch.setattr(sys, "stdin", keep := (work / "keep").open("w+"))
    keep.write(COMMIT)
    keep.seek(0)
    monkeypatch.setattr(starting.select, "select", lambda *_: ([keep], [], []))
    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    starting.start(StartRequest("a", plan, {}, (0,)))
    monkeypatch.undo()
    assert json.loads(said.getvalue().splitlines()[1]) == {"stopped_by": "you@there"}
    assert ended == ["r-1-x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("exec sleep 600", "no answer within 0.5 s"),
        ("exit 0", "exit code 0, no output"),
        ("echo hello", "hello"),
        ("echo no server running >&2; exit 1", "no server running"),
    ],
)
def test_a_tmux_that_hangs_or_lies_is_told_and_not_waited_for(work, monkeypatch, program, said):
    (work / "bin").mkdir()
    (work / "bin/tmux").write_text(f"#!/bin/sh\n{program}\n")
    (work / "bin/tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{work}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "TMUX_START_TIMEOUT_S", 0.5 if "0.5 s" in said else 60)
    monkeypatch.setattr(starting, "TMUX_END_TIMEOUT_S", 0.5)
    answer = start_with("exec sleep 600", work, monkeypatch)
    assert (answer["fault"], answer["detail"]) == ("tmux", said)


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("echo tmux 3.3a", ""),
        ("echo hello", "hello"),
        ("exec sleep 600", "no answer within 0.5 s"),
        ("exit 0", "exit code 0"),
        ("echo lost >&2; exit 1", "lost"),
    ],
)
def test_a_tmux_that_does_not_work_is_found_before_the_start(work, monkeypatch, program, fault):
    (work / "tmux").write_text(f"#!/bin/sh\n{program}\n")
    (work / "tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{work}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "VERSION_TIMEOUT_S", 0.5 if "0.5 s" in fault else 60)
    assert machine.tmux_fault() == fault


def test_what_stands_in_the_way_of_a_run_directory(work):
    assert machine.check_writable_directory(str(work / "runs/r")).fault is None
    (work / "runs").symlink_to("/nowhere/runs")
    assert machine.check_writable_directory(str(work / "runs/r")) == DirectoryCheck(
        str(work / "runs/r"), DirectoryFault.DANGLING, str(work / "runs")
    )
    (work / "runs").unlink()
    (work / "runs").touch()
    assert machine.check_writable_directory(str(work / "runs/r")).fault is DirectoryFault.NO_DIRECTORY


def test_an_agent_that_fails_says_why_in_one_line(work):
    (work / "runs").symlink_to("/nowhere/runs")
    request = StartRequest("a", Plan("r", 1, 0.0, "r-1-x", "a:1", ("x",), (), ()), {}, (0,))
    command = [sys.executable, "-m", "llama405b_tools.agent.agent", "start"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
    done = subprocess.run(
        command,
        input=calls.encode_arguments(starting.start, request),
        cwd=work,
        env=os.environ | path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"{work}/runs: File exists\n"
