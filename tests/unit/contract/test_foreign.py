"""The output of gloo, torch's store and torchrun: each form as recorded, and all parsed in one place."""

import pytest
import torch.distributed as dist

from conftest import ROOT
from llama405b.distributed.peer_errors import is_lost_peer, says_lost_peer
from llama405b_tools.machine.program_output import ended_by, root_cause

FOREIGN = ROOT / "tests/data/foreign"


@pytest.mark.parametrize("path", sorted((FOREIGN / "lost-peer").iterdir()), ids=lambda path: path.stem)
def test_a_lost_peer(path):
    assert says_lost_peer(path.read_text())


def test_what_is_no_lost_peer():
    assert is_lost_peer(dist.DistNetworkError("whatever it says"))
    for error in (ValueError("loss is nan"), RuntimeError("CUDA out of memory"), KeyError("step")):
        assert not is_lost_peer(error)


@pytest.mark.parametrize(("name", "found"), [("rank-killed", (0, -9)), ("rank-exited", (0, 1))])
def test_torchruns_summary(name, found):
    assert root_cause((FOREIGN / f"torchrun/{name}.log").read_text()) == found


@pytest.mark.parametrize(("name", "number"), [("ended", 15), ("rank-killed", None), ("rank-exited", None)])
def test_the_signal_that_ended_torchrun(name, number):
    assert ended_by((FOREIGN / f"torchrun/{name}.log").read_text()) == number


def test_a_log_without_a_summary():
    assert root_cause("ModuleNotFoundError: No module named 'x'") is None
