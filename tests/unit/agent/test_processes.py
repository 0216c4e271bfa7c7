"""Real processes are found and ended, including orphans and those that ignore signals."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest

from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.software import module_argv
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent import hostprobe, processes, sampler, starting
from llama405b_tools.agent.processes import MARKER, take_lock
from llama405b_tools.agent.streaming import _SecretValues
from ops_rig import wait_for


def test_sweep_ends_orphans_and_the_stubborn_and_no_one_else(tmp_path):
    value = f"{tmp_path}:host"
    stubborn = (
        "import signal,time,os,sys;signal.signal(15,1);os.fork() or os.setsid();print(1,flush=True);time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess,sys;subprocess.Popen([sys.executable,'-c',{stubborn!r}]);"],
        env=os.environ | {MARKER: value},
        stdout=subprocess.DEVNULL,
    )
    other = subprocess.Popen(["sleep", "60"], env=os.environ | {MARKER: value + "2"})
    try:
        parent.wait(120)
        wait_for(lambda: len(processes.find_marked(value)) == 2)
        ended, left = processes.kill_marked(value)
        assert (ended, left) == (2, [])
        assert processes.find_marked(value) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_sweep_waits_for_those_that_tell_no_environment(monkeypatch):
    """In the middle of an exec, and late in its end, a process is not among the marked."""
    looks = iter([[], [7], [], [], [], []])
    alive = iter([11, 11, 11, None, None])  # its start time, until it is a zombie
    monkeypatch.setattr(processes, "find_marked", lambda value: next(looks))
    monkeypatch.setattr(processes, "start_time", lambda pid: next(alive))
    killed = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: killed.append(pid))
    assert processes.kill_marked("run:host") == (1, [])
    assert killed == [7, 7, 7]  # seen once more after it had told no environment, and until it was gone


def test_sweep_waits_for_an_exec(monkeypatch):
    looks, execs = iter([[], [], [], [7], [], []]), iter([[7], [7], [7], [], []])
    killed = []
    monkeypatch.setattr(processes, "find_marked", lambda value: next(looks))
    monkeypatch.setattr(processes, "find_in_exec", lambda: next(execs))
    monkeypatch.setattr(processes, "start_time", lambda pid: None if killed else 11)
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: killed.append(pid))
    assert processes.kill_marked("run:host") == (1, [])
    assert killed == [7]


def test_zombies_and_threads_of_the_kernel_are_in_no_exec():
    child = subprocess.Popen(["true"])
    wait_for(lambda: processes.process_state(child.pid) == "Z")
    assert not {child.pid, 2} & set(processes.find_in_exec())  # both tell no environment and no arguments
    child.wait()


def test_a_pid_alone_proves_nothing():
    began = processes.start_time(os.getpid())
    assert processes.is_same_process(os.getpid(), began)
    assert not processes.is_same_process(os.getpid(), began + 1)
    assert processes.start_time(2**22 + 1) is None


def test_the_values_of_a_runs_secrets_are_known_while_it_lives(tmp_path):
    plan = Plan("r", 1, 0.0, "r-1-x", "a:1", ("x",), ("MY_KEY", "OTHER"), ())
    secrets = _SecretValues(RunDir(tmp_path / "r"), "a")
    env = {MARKER: f"{tmp_path}/r:a", "MY_KEY": "correct horse", "PATH": os.environ["PATH"]}
    child = subprocess.Popen(["sleep", "60"], env=env)
    try:
        wait_for(lambda: processes.find_marked(env[MARKER]))
        assert secrets.pieces(plan, alive=True) == ["correct horse"]
    finally:
        child.kill()
        child.wait()
    assert secrets.pieces(plan, alive=False) == ["correct horse"]  # what is read last is hidden, too


@contextlib.contextmanager
def _process_of(value, *before):
    child = subprocess.Popen([*before, "sleep", "60"], env=os.environ | {MARKER: value})
    try:
        wait_for(lambda: processes.find_marked(value))
        yield child
    finally:
        child.kill()
        child.wait()


def _is_left(value):
    """Whether doctor and `stop --orphans` call a run's processes leftovers; they agree."""
    told = value in {each.value for each in starting.orphans(end=False)}
    assert (value in hostprobe.find_leftovers()) is told
    return told


def test_a_run_in_another_directory_is_no_leftover_while_its_node_runner_lives(tmp_path):
    value = f"{tmp_path}/elsewhere/runs/theirs:h"
    run = RunDir(tmp_path / "elsewhere/runs/theirs")
    with _process_of(value):
        lock = take_lock(run.lock("h"))
        assert not _is_left(value)
        write_json(run.plan, Plan("theirs", 1, 0.0, "x", "other:1", (), (), (Node("other", 1, 0, "", "", "", "", {}),)))
        assert _is_left(value)  # nobody can see or stop it: the run is another launch's now
        os.close(lock)
        assert _is_left(value)


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="NOT RUN: needs root and unshare")
def test_a_run_in_a_container_is_no_leftover_though_its_directory_is_not_seen_from_here(tmp_path):
    value = f"{tmp_path}/inside/r:h"
    (tmp_path / "inside").mkdir()
    lock, hold = f"{tmp_path}/inside/r/status/h.lock", f"touch {tmp_path}/up; exec sleep 60"
    inside = (
        f"mount -t tmpfs none {tmp_path}/inside; mkdir -p $(dirname {lock}); exec flock --no-fork {lock} sh -c '{hold}'"
    )
    with _process_of(value, "unshare", "--mount", "sh", "-c", inside):
        wait_for((tmp_path / "up").exists)
        assert not (tmp_path / "inside/r").exists()
        assert not _is_left(value)


def test_a_command_of_ours_is_shown_by_its_module(tmp_path):
    child = subprocess.Popen(
        [*module_argv("llama405b_tools.cli"), "top", "--replay", "-"], stdin=subprocess.PIPE, cwd=tmp_path
    )
    try:
        shown = wait_for(lambda: sampler.read_command(child.pid))
    finally:
        child.kill()
        child.communicate()
    assert shown == f"{sys.executable} -m llama405b_tools.cli top --replay -"
