"""The estimates against figures from elsewhere: torch's memory tracker on fake groups, and a published run."""

import json

import pytest

from llama405b.capacity.estimate import GIB, RUNTIME_BYTES, Load, estimate
from llama405b.contract.config import PRESET_DIR
from llama405b.contract.weights import parse_llama

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
LARGE = parse_llama(SHAPES["llama3.1-405b"], "405b")


@pytest.mark.parametrize(
    ("numerics", "offload", "tracked_gib"),
    [("pure-bf16", False, 76.7), ("fp32-master", True, 46.8), ("pure-bf16", True, 41)],
)
def test_gpu_memory_is_what_torch_tracks(numerics, offload, tracked_gib):
    needs = estimate(Load(LARGE, numerics, offload, 64))
    assert (needs.gpu_bytes - RUNTIME_BYTES) / GIB == pytest.approx(tracked_gib, rel=0.02)


@pytest.mark.parametrize(("numerics", "tracked_gib"), [("fp32-master", 827), ("pure-bf16", 413)])
def test_pinned_memory_is_what_torch_rounds_it_to(numerics, tracked_gib):
    assert estimate(Load(LARGE, numerics, True, 64)).host_bytes / GIB == pytest.approx(tracked_gib, rel=0.02)


def test_a_step_takes_as_long_as_the_published_one():
    assert estimate(Load(LARGE, "pure-bf16", True, 64, overlap=False)).step_s == pytest.approx(30, rel=0.05)


def test_an_update_under_the_forward_takes_what_the_forward_does_not_hide():
    hidden, sequential = (estimate(Load(LARGE, "fp32-master", True, 64, overlap=on)).step_s for on in (True, False))
    small = [estimate(Load(LARGE, "fp32-master", True, 64, seq_len=256, overlap=on)).step_s for on in (True, False)]
    assert sequential - hidden == pytest.approx(5.8, abs=1.0)  # all but the norm
    assert 0.8 * small[1] < small[0] < small[1]  # a short forward hides little


def test_more_ranks_need_less_each():
    large, small = (estimate(Load(LARGE, "fp32-master", False, world)) for world in (64, 128))
    assert small.gpu_bytes < large.gpu_bytes
    assert small.step_s == pytest.approx(large.step_s / 2)
    assert (small.weights_bytes, small.checkpoints_bytes) == (large.weights_bytes, large.checkpoints_bytes)


def test_no_time_is_claimed_for_numerics_that_nobody_timed():
    assert estimate(Load(LARGE, "fp32", False, 64)).step_s is None
