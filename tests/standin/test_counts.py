"""What a run asks of the device, counted: waits, copies from memory that is not pinned, allocations, communicators."""

import itertools
import json

import pytest

from llama405b.distributed.host_memory import STAGE_BYTES

WAITS = {  # of a step, for the number of targets and for the loss; and of eager attention, twice: are documents packed?
    "none": 6,  # two for the norm, whose squares are on the device
    "optimizer": 4,
    "all": 4,
}
DEVICE_WAITS = 1  # of a step: its parts have been timed
READ_BYTES = 1024  # of sums of squares, which are read at once
NUMBERS_BYTES = 1024  # where documents end, as many as there are


@pytest.fixture(scope="module", params=WAITS)
def place(request):
    return request.param


@pytest.fixture(scope="module")
def trained(place, standin):
    """A run on two ranks with two micro-batches, whose rank 0 sends the weights."""
    flags = ("--parallel.numerics", "fp32-master", "--parallel.offload", place, "--model.load", "rank0")
    return standin.train(*flags, "--evaluation.every", 0, "--checkpoint.every", 0, accumulation=2, world=2)


@pytest.fixture(scope="module")
def later_steps(trained):
    """Every step of every rank but its first two: torch makes room for the batches of two steps."""
    return list(itertools.chain(*(steps[2:] for steps in trained.steps)))


def _calls(steps, kind):
    return {step[kind][0] for step in steps}


def test_a_step_waits_only_for_what_decides(place, later_steps):
    assert len(later_steps) == 4
    assert _calls(later_steps, "stream_sync") == {WAITS[place]}
    assert _calls(later_steps, "device_sync") == {DEVICE_WAITS}


def test_each_rank_measures_what_it_computes_without_waiting_for_that(trained):
    beats = [json.loads(path.read_text()) for path in sorted(trained.run.glob("heartbeat/rank-*.json"))]
    assert len(beats) == 2
    assert all(beat["busy_s"] > 0 for beat in beats)
    last = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text().splitlines()][-1]
    assert beats[0]["step"] == last["step"]
    assert beats[0]["busy_s"] < last["forward_s"] + last["backward_s"]


def test_no_step_copies_from_or_to_pageable_memory(later_steps):
    assert _calls(later_steps, "pageable_up") == {0}
    assert _calls(later_steps, "blocking_copy") == {0}
    assert max(step["pageable_down"][1] for step in later_steps) <= READ_BYTES


def test_no_later_step_allocates_host_memory(later_steps):
    assert max(step["host_alloc"][1] for step in later_steps) <= NUMBERS_BYTES
    assert _calls(later_steps, "host_register") == {0}


def test_the_first_step_pins_little(trained):
    """Only batches, and numbers that are read: what crosses in every step was pinned before."""
    for steps in trained.steps:
        assert sum(step["host_alloc"][1] for step in steps) <= 1 << 17


def test_copies_of_what_is_saved_are_pinned_at_once_and_no_larger(standin):
    """With states on the GPU: as large as they are, before the first step; torch would round each tensor's up."""
    flags = ("--parallel.numerics", "fp32", "--parallel.offload", "none", "--evaluation.every", 0)
    trained = standin.train(*flags, world=2)
    size = sum(path.stat().st_size for path in trained.run.glob("checkpoints/step-00000004/*.safetensors")) / 2
    for counts, steps in zip(trained.counts, trained.steps, strict=True):
        assert counts["host_register"][0] == 1
        assert 0.98 * size <= counts["host_register"][1] <= 1.02 * size
        assert counts["host_alloc"][1] <= 2 * STAGE_BYTES + (1 << 17)  # those of loading
        assert sum(step["host_register"][0] for step in steps) == 0


def test_a_run_whose_rank_0_sends_the_weights_has_one_communicator(trained):
    assert [counts["communicator"][0] for counts in trained.counts] == [1, 1]
