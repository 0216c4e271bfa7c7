"""The output of gloo, torch's store and torchrun: each form as recorded, and all parsed in one place."""

import dataclasses

import pytest
import torch.distributed as dist

from conftest import ROOT
from llama405b.contract.records import describe_cause
from llama405b.distributed.collectives import is_lost_peer, says_lost_peer
from llama405b.train import report_end
from llama405b.training.context import cause_of
from llama405b_tools.parsers import parse_failed_ranks, parse_torchrun_signal

FOREIGN = ROOT / "tests/data/foreign"


@pytest.mark.parametrize("path", sorted((FOREIGN / "lost-peer").iterdir()), ids=lambda path: path.stem)
def test_a_lost_peer(path):
    assert says_lost_peer(path.read_text())


def test_what_gloo_says_of_a_lost_peer_is_in_the_log_of_the_rank_alone(capsys):
    cause = cause_of(dist.DistBackendError((FOREIGN / "lost-peer/gloo-peer-died.txt").read_text()), None)
    assert "pair.cc" in cause.detail
    assert describe_cause(dataclasses.replace(cause, rank=3, exit_code=1, phase="train")) == (
        "rank 3 exited with 1: lost contact with another rank in phase train"
    )
    report_end(cause, None)
    assert capsys.readouterr().err.splitlines()[1:] == [cause.detail]


def test_what_is_no_lost_peer():
    assert is_lost_peer(dist.DistNetworkError("whatever it says"))
    for error in (ValueError("loss is nan"), RuntimeError("CUDA out of memory"), KeyError("step")):
        assert not is_lost_peer(error)


@pytest.mark.parametrize(("name", "found"), [
    ("rank-killed", {0: -9}), ("rank-exited", {0: 1}), ("two-failed", {0: 1, 1: -9}),
])  # fmt: skip
def test_torchruns_summary(name, found):
    assert parse_failed_ranks((FOREIGN / f"torchrun/{name}.log").read_text()) == found


@pytest.mark.parametrize(("name", "number"), [("ended", 15), ("rank-killed", None), ("rank-exited", None)])
def test_the_signal_that_ended_torchrun(name, number):
    assert parse_torchrun_signal((FOREIGN / f"torchrun/{name}.log").read_text()) == number


def test_a_log_without_a_summary():
    assert parse_failed_ranks("ModuleNotFoundError: No module named 'x'") == {}
