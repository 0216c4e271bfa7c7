"""A long wait for an update is a phase of its own, and leaves no trace in the one before."""

import pytest
import torch

from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Heartbeat, Phase
from llama405b.distributed.ranks import Rank
from llama405b.training.context import RankContext
from llama405b.training.journal import HeartbeatWriter


@pytest.mark.parametrize(("visible", "gpu"), [(None, "1"), ("", "1"), ("4,6", "6")])
def test_a_heartbeat_has_the_number_of_the_gpu(tmp_path, monkeypatch, visible, gpu):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for device, shown in ((torch.device("cuda", 1), gpu), (torch.device("cpu"), "")):
        me = Rank(9, 16, 1, "b", device)
        heartbeat = HeartbeatWriter(RunDir(tmp_path), me)
        RankContext.from_rank(me, heartbeat).heartbeat.enter_phase(Phase.TRAIN)
        assert read_record(Heartbeat, RunDir(tmp_path).heartbeat(9)).gpu == shown


def test_after_a_long_wait_the_phase_has_lasted_as_long_as_before(tmp_path):
    heartbeat = HeartbeatWriter(RunDir(tmp_path), Rank(0, 1, 0, "a", torch.device("cpu")))
    heartbeat.enter_phase(Phase.TRAIN)
    began = heartbeat.record.phase_since
    heartbeat.record_update_wait(True)
    assert heartbeat.record.phase is Phase.UPDATE
    heartbeat.record_update_wait(False)
    assert (heartbeat.record.phase, heartbeat.record.phase_since) == (Phase.TRAIN, began)
    assert heartbeat.record.time > began
