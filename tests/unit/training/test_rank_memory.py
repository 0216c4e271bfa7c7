"""What a rank shows of itself: read from outside, while it can say nothing."""

import os
import signal
import subprocess
import sys

import pytest

from llama405b.contract.records import POSITION_BYTES, STACKS_SIGNAL, UNIT_BYTES, TrainingPosition, parse_position
from llama405b.training.journal import LiveProgress, unit_label
from llama405b_tools.agent import evidence
from llama405b_tools.agent.evidence import (
    ProcessCounters,
    RankMemoryReader,
    handles_signal,
    parse_proc_address,
    rank_processes,
)
from llama405b_tools.agent.processes import MARKER
from ops_rig import wait_for

RANK = """
import ctypes, sys, threading, time
from llama405b.training.journal import LiveProgress, unit_label
memory = LiveProgress()
memory.show_step(4711)
memory.show_unit(unit_label("layers.71", "backward"))
print("ready", flush=True)
c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
c.pthread_mutex_lock(mutex)
c.pthread_mutex_lock(mutex)  # for ever, with the interpreter's lock
"""
STRANGER = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def process(tmp_path):
    """Start Python with a program, as a rank of a run."""
    children = []

    def start(program, **more):
        env = os.environ | {MARKER: f"{tmp_path}:host", "RANK": "21", "LOCAL_RANK": "5"} | more
        child = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def test_a_rank_that_holds_the_interpreters_lock_shows_where_it_is(process, tmp_path):
    child = process(RANK, PYTHONPATH=":".join(sys.path))
    assert rank_processes(f"{tmp_path}:host") == {5: child.pid}
    memory = RankMemoryReader.from_pid(child.pid)
    assert memory.read_position() == TrainingPosition(4711, "layers.71 backward")

    def line():
        memory.request_stacks()
        [main] = memory.wait_for_stacks()
        assert [frame.function for frame in main.frames] == ["<module>"]
        return main.frames[0].line

    wait_for(lambda: line() == 10)
    assert line() == 10  # the first dump is not read twice
    assert memory.read_position() == TrainingPosition(4711, "layers.71 backward")
    assert memory.path.stat().st_size < 2 * POSITION_BYTES + 200
    assert child.poll() is None


def test_a_process_that_does_not_catch_the_signal_is_not_sent_it(process):
    child = process(STRANGER)
    assert RankMemoryReader.from_pid(child.pid) is None
    assert not handles_signal(child.pid, STACKS_SIGNAL)
    child.send_signal(STACKS_SIGNAL)
    assert child.wait(10) == -STACKS_SIGNAL  # as it would end


def test_a_rank_that_is_stopped_is_not_waited_for(process, monkeypatch):
    child = process(RANK, PYTHONPATH=":".join(sys.path))
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: evidence.processes.process_state(child.pid) == "T")
    memory = RankMemoryReader.from_pid(child.pid)
    memory.request_stacks()
    monkeypatch.delattr(evidence, "time")  # nothing looks at the clock
    assert memory.wait_for_stacks() == ()
    assert memory.read_position().step == 4711


def test_of_a_rank_and_its_own_children_the_rank_is_taken(process, tmp_path):
    parent = process(
        "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('ready', flush=True); time.sleep(60)"
    )
    wait_for(lambda: len(evidence.processes.find_marked(f"{tmp_path}:host")) == 2)
    assert rank_processes(f"{tmp_path}:host") == {5: parent.pid}
    for pid in evidence.processes.find_marked(f"{tmp_path}:host"):
        if pid != parent.pid:
            os.kill(pid, signal.SIGKILL)


def test_where_memory_cannot_be_had_nothing_is_shown(monkeypatch):
    def refuse(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = LiveProgress()
    memory.show_step(1)
    memory.show_unit(unit_label("layers.0", "forward"))
    assert parse_position(bytes(memory.memory)) == TrainingPosition(1, "layers.0 forward")


def test_a_long_unit_keeps_its_end():
    label = unit_label("encoder." * 20 + "layers.71", "backward")
    assert len(label) == UNIT_BYTES
    assert label.rstrip(b"\0").endswith(b"layers.71 backward")
    assert parse_position(b"short") == TrainingPosition()


def test_what_a_process_did_and_an_address():
    assert ProcessCounters(1.0, 2.0, 0.0, 3, 4).activity_until(ProcessCounters(1.5, 2.0, 0.0, 10, 4)).moved_bytes == 7
    assert ProcessCounters.from_pid(2**22 + 1) == ProcessCounters()
    assert parse_proc_address("0100007F") == "127.0.0.1"
    assert parse_proc_address("0000000000000000FFFF00000100007F") == "127.0.0.1"
    assert parse_proc_address("B80D01200000000067452301EFCDAB89") == "2001:0db8:0000:0000:0123:4567:89ab:cdef"
