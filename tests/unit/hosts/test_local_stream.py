"""A command on this machine ends when its stream is closed, even one that is stopped; one that was only told to end may finish."""

import os
import signal

import pytest

from llama405b_tools.agent import processes
from llama405b_tools.hosts import transport
from llama405b_tools.hosts.transport import Local
from ops_rig import wait_for


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(transport, "CLOSE_TIMEOUT_S", 0.3)


def test_a_command_that_is_stopped_is_killed_with_what_it_started(impatient):
    stream = Local().stream("sleep 600 & echo $!; exec cat", "")
    lines = iter(stream)
    started = int(next(lines))
    os.killpg(stream.child.pid, signal.SIGSTOP)
    wait_for(lambda: processes.process_state(stream.child.pid) == "T", 10)
    stream.close()
    try:
        wait_for(lambda: stream.child.poll() is not None, 10)
    except AssertionError:
        os.killpg(stream.child.pid, signal.SIGKILL)
        raise
    assert list(lines) == []
    assert stream.child.returncode == -signal.SIGKILL
    wait_for(lambda: processes.process_state(started) in ("", "Z"), 10)


def test_one_that_ends_with_its_input_is_not_killed():
    stream = Local().stream("cat; echo has ended", "")
    stream.close()
    assert list(stream) == ["has ended\n"]
    assert stream.child.returncode == 0


@pytest.mark.slow
def test_one_whose_input_was_ended_may_finish(impatient):
    stream = Local().stream("cat; sleep 1.5; echo has finished", "")
    stream.end_input()
    stream.close()
    assert list(stream) == ["has finished\n"]
