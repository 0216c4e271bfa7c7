"""A long wait for an update is a phase of its own, and leaves no trace in the one before."""

import torch

from llama405b.contract.paths import RunDir
from llama405b.contract.records import Phase
from llama405b.distributed.ranks import Rank
from llama405b.training.heartbeat import HeartbeatWriter


def test_after_a_long_wait_the_phase_has_lasted_as_long_as_before(tmp_path):
    heartbeat = HeartbeatWriter(RunDir(tmp_path), Rank(0, 1, 0, "a", torch.device("cpu")))
    heartbeat.phase(Phase.TRAIN)
    began = heartbeat.record.phase_since
    heartbeat.waits_for_update(True)
    assert heartbeat.record.phase is Phase.UPDATE
    heartbeat.waits_for_update(False)
    assert (heartbeat.record.phase, heartbeat.record.phase_since) == (Phase.TRAIN, began)
    assert heartbeat.record.time > began
