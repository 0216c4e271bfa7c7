"""How the node runner waits for torchrun: what it looks at, how often, and what ends the wait. With a clock of its own."""

import time
import types

import pytest

from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent import node as node_runner
from llama405b_tools.agent.node import NodeRunner

LASTS_S = 10.0


class Torchrun:
    """Ends by itself after a while, or when it is told to."""

    def __init__(self, clock):
        self.clock, self.told = clock, False

    def poll(self):
        return 0 if self.clock.now > LASTS_S else None

    def send_signal(self, _number=None):
        self.told = True

    kill = send_signal

    def wait(self, _):
        return -15


@pytest.fixture
def waited(tmp_path, monkeypatch):
    """Wait for torchrun; returns how often the stop file was looked at, the exit code, and whether torchrun was told."""
    clock = types.SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    times = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep, time=time.time)  # other threads have theirs
    monkeypatch.setattr(node_runner, "time", times)

    def call(slurm_job, stopped_at=LASTS_S):
        clock.now, looks = 0.0, []

        def stop(_):
            looks.append(clock.now)
            return types.SimpleNamespace(exists=lambda: clock.now >= stopped_at)

        run = RunDir(tmp_path / "r")
        nodes = (Node("a", 1, 0, str(tmp_path), "/py", "10.0.0.1", "lo", {}),)
        write_json(run.plan, Plan("r", 1, 5.0, "r-1-x", "a:1", ("-m", "mine"), (), nodes, slurm_job=slurm_job))
        runner, child = NodeRunner(run, "a"), Torchrun(clock)
        call.runner = runner
        monkeypatch.setattr(node_runner, "read_stop_mark", lambda *_: types.SimpleNamespace(by="", grace_s=0.0))
        with monkeypatch.context() as patch:
            patch.setattr(RunDir, "stop", lambda _, host: stop(host))
            code = runner.wait(child)
        return len(looks), code, child.told

    return call


def test_the_stop_file_is_for_slurm_alone(waited):
    assert waited("", stopped_at=0.0) == (0, 0, False)


def test_the_stop_file_is_looked_at_once_a_second(waited):
    looks, code, told = waited("7", stopped_at=LASTS_S + 5)
    assert (code, told) == (0, False)
    assert looks <= LASTS_S + 3  # and once when torchrun has ended
    looks, code, told = waited("7", stopped_at=3.0)
    assert (code, told) == (-15, True)


def test_torchrun_that_ended_at_the_word_of_another_host_was_stopped(waited):
    """Its ranks saved with those of a host whose runner read its stop file a moment before."""
    _, code, told = waited("7", stopped_at=LASTS_S + 0.05)
    assert (code, told) == (0, False)
    assert waited.runner.stop_signal


def test_a_disk_that_takes_no_log_ends_no_training(tmp_path):
    """What copies checkpoints is started again, and writes to torchrun's log: on a disk that has become read-only."""
    run = RunDir(tmp_path / "r")
    nodes = (Node("a", 1, 0, str(tmp_path), "/py", "10.0.0.1", "lo", {}),)
    write_json(run.plan, Plan("r", 1, 5.0, "r-1-x", "a:1", ("-m", "mine"), (), nodes, replicates=True))
    runner = NodeRunner(run, "a")
    assert not runner.run.agent_log("a").parent.exists()
    runner.ensure_replicator()
    assert runner.replicator is None
    assert runner.replicator_started_at  # it is tried again later
