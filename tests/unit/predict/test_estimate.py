"""The estimates against figures from elsewhere: torch's pinned allocator, and a published run."""

import json

import pytest

from llama405b.predict.estimate import GIB, estimate
from llama405b.predict.run_shape import PredictedRun
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama

SHAPES = json.loads((PRESET_DIR / "architectures.json").read_text())
LARGE = parse_llama(SHAPES["llama3.1-405b"], "405b")


def test_states_on_the_host_cost_what_their_dtypes_do():
    states, full = (estimate(PredictedRun(LARGE, "fp32-master", offload, 64)) for offload in ("optimizer", "all"))
    rounded = estimate(PredictedRun(LARGE, "fp32-master", "optimizer", 64, overlap=False, moments="bf16"))
    n = LARGE.parameters
    assert states.gpu_bytes - full.gpu_bytes == pytest.approx(2 * n / 64, rel=1e-3)
    passing = 6 * 3_187_703_808 / 8  # of a layer, in FP32 and BF16
    assert (states.host_bytes, rounded.host_bytes) == pytest.approx((16 * n / 8 + passing, 12 * n / 8 + passing))
    assert rounded.step_s < estimate(PredictedRun(LARGE, "fp32-master", "optimizer", 64, overlap=False)).step_s
    assert rounded.checkpoints_bytes == states.checkpoints_bytes * 8 / 12


@pytest.mark.parametrize(("numerics", "expected_gib"), [("fp32-master", 792), ("pure-bf16", 396)])
def test_pinned_gradients_are_what_torch_rounds_them_to(numerics, expected_gib):
    assert estimate(PredictedRun(LARGE, numerics, "all", 64)).host_bytes / GIB == pytest.approx(expected_gib, rel=0.02)


def test_a_step_takes_as_long_as_the_published_one():
    assert estimate(PredictedRun(LARGE, "pure-bf16", "all", 64, overlap=False)).step_s == pytest.approx(30, rel=0.05)


def test_an_update_under_the_forward_takes_what_the_forward_does_not_hide():
    hidden, sequential = (
        estimate(PredictedRun(LARGE, "fp32-master", "all", 64, overlap=on)).step_s for on in (True, False)
    )
    small = [
        estimate(PredictedRun(LARGE, "fp32-master", "all", 64, seq_len=256, overlap=on)).step_s for on in (True, False)
    ]
    assert sequential - hidden == pytest.approx(6.7, abs=0.1)  # of 7.1
    assert 0.8 * small[1] < small[0] < small[1]  # a short forward hides little


def test_sums_of_gradients_apart_are_counted_wherever_they_are():
    def host_bytes(**how):
        return estimate(PredictedRun(LARGE, "fp32-master", "all", 64, global_batch=128, **how)).host_bytes

    assert host_bytes(overlap=False) < host_bytes(overlap=True)
    rounded = host_bytes(overlap=False, moments="bf16")
    assert rounded == host_bytes(overlap=True, moments="bf16") > host_bytes(overlap=False) - 4 * LARGE.parameters / 8


def test_more_ranks_need_less_each():
    large, small = (estimate(PredictedRun(LARGE, "fp32-master", "none", world)) for world in (64, 128))
    assert small.gpu_bytes < large.gpu_bytes
    assert small.step_s == pytest.approx(large.step_s, rel=0.02)  # of twice the sequences: none is split between ranks
    assert (small.weights_bytes, small.checkpoints_bytes) == (large.weights_bytes, large.checkpoints_bytes)


def test_no_time_is_claimed_for_numerics_that_nobody_timed():
    assert estimate(PredictedRun(LARGE, "fp32", "none", 64)).step_s is None
