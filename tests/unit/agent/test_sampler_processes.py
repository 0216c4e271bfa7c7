"""What else is on the GPUs, and whether a process still reads and writes."""

import mmap
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from llama405b.contract.records import NodeState, NodeStatus, Phase
from llama405b_tools.agent import sampler, watching
from llama405b_tools.agent.messages import RankHeartbeat, WatchRequest
from ops_rig import wait_for

GONE = 1 << 22  # no process has this number: the kernel's most


@pytest.fixture
def start():
    """Starts programs that wait for their end."""
    children = []

    def begin(*argv, **more):
        children.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more))
        wait_for(lambda: sampler.read_command(children[-1].pid))  # in its exec it shows none yet
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def listed(*pids):
    return "".join(f"{pid}, GPU-{i}, 9000\n" for i, pid in enumerate(pids))


def test_processes_on_gpus_that_are_not_of_the_run_are_told_with_user_and_command(start):
    waits = "import time; time.sleep(602)"
    of_run, other = start("sleep", "601"), start(sys.executable, "-c", waits, "x" * 300)
    below = start("sh", "-c", "sleep 603 >&- & echo $!; wait")
    started = int(below.stdout.readline())
    me = pwd.getpwuid(os.getuid()).pw_name
    command = f"{sys.executable} -c {waits} {'x' * 300}"[: sampler.MAX_COMMAND_CHARS]
    apps = listed(of_run.pid, other.pid, other.pid, started, GONE)  # one process may be on several GPUs
    assert sampler.foreign_processes(apps, {of_run.pid, below.pid}) == [[other.pid, me, command], [GONE, "", ""]]
    assert sampler.foreign_processes(apps, {os.getpid()}) == [[GONE, "", ""]]  # which has started all of them
    os.kill(started, 9)


def test_what_is_no_list_has_no_processes():
    assert sampler.foreign_processes(None, set()) is None
    assert sampler.foreign_processes("", set()) == []
    assert sampler.foreign_processes("NVIDIA-SMI has failed\n[N/A], GPU-1, 5\n99999999999, GPU-1, 5\n", set()) == []


def test_a_run_of_another_user_is_known_by_what_its_files_say(monkeypatch):
    run = watching.WatchedRun(WatchRequest("a", None, "", 1.0, 60.0, 30.0))
    run.heartbeats = (RankHeartbeat(0, "a", 7, 0.0, 1, Phase.TRAIN, 0.0),)
    run.status = NodeStatus("a", NodeState.RUNNING, 1, 8, 1)
    for is_active, pids in ((True, {7, 8}), (False, set())):  # others may have the numbers now
        monkeypatch.setattr(watching, "is_run_active", lambda *_, alive=is_active: alive)
        assert run.pids() == pids


def test_a_user_without_a_name_is_a_number(monkeypatch):
    sampler.find_user_name.cache_clear()
    assert sampler.find_user_name(0) == "root"
    assert sampler.find_user_name(4_123_456_789) == "4123456789"
    monkeypatch.setenv("PATH", "/nowhere")
    assert sampler.find_user_name(4_123_456_788) == "4123456788"  # there is nothing to ask


def test_names_that_are_slow_to_come_are_not_waited_for(tmp_path, monkeypatch):
    sampler.find_user_name.cache_clear()
    (tmp_path / "getent").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "getent").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sampler, "USER_WAIT_S", 0.1)
    assert sampler.find_user_name(4_123_456_787) == "4123456787"


def test_a_process_that_ends_leaves_the_list(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\ncase "$*" in *compute-apps*) cat {tmp_path}/apps ;; *) echo 0 ;; esac\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi = sampler.Smi(30.0)

    def apps():
        smi.start_query(True)
        return smi.state().get("apps")

    for text in (listed(7), ""):
        (tmp_path / "apps").write_text(text)
        wait_for(lambda text=text: apps() == text, 30)


READS = """
import mmap, sys
file = open(sys.argv[1], "rb")
for line in sys.stdin:
    if line == "read\\n":
        file.seek(0)
        file.read()
    print(line, end="", flush=True)
"""


def test_bytes_that_a_process_reads_are_counted(start, tmp_path):
    size = 64 * mmap.PAGESIZE
    (tmp_path / "data").write_bytes(b"x" * size)
    child = start(sys.executable, "-c", READS, tmp_path / "data", text=True, bufsize=1)

    def after(line):
        child.stdin.write(line)
        child.stdin.flush()
        assert child.stdout.readline() == line
        return sampler.sample_io([child.pid])[0][1]

    first, idle, moved = after("wait\n"), after("wait\n"), after("read\n")
    assert idle - first < 1000
    assert moved - idle >= size


def test_what_the_kernel_does_not_tell_is_left_out(tmp_path, monkeypatch):
    counts = {
        f"/proc/{pid}/io": text for pid, text in ((5, ""), (6, "rchar: 10\nwchar: 7\nsyscr: 900\nread_bytes: 4096\n"))
    }
    monkeypatch.setattr(sampler, "read_text", lambda path: counts[path])
    assert sampler.sample_io([5, 6]) == [[6, 4113]]
    monkeypatch.undo()
    assert sampler.sample_io([GONE]) == []
    assert Path(f"/proc/{os.getpid()}/io").exists()
