"""How long each rank itself computes: a slow one is told from those that wait for it, and nothing else changes."""

import time

import pytest
import torch

from ranks_rig import run_ranks
from update_rig import build, slow, take

SLOW_S, SLOW_RANK = 0.1, 1
STEPS = (1, 2, 3)  # of which the one counts that whatever else runs here held up least
FORMS = {
    "none": {"offload": "none", "overlap": False},
    "optimizer": {"offload": "optimizer", "overlap": True},
    "all": {"offload": "all", "overlap": True},
    "units within layers": {"offload": "none", "overlap": False, "fsdp_unit": "sublayer"},
    "embedding in the root": {"offload": "none", "overlap": False, "fsdp_embedding": False},
}
SLEEPS = {"layers": SLOW_S, "head": 4 * SLOW_S, "embedding": 4 * SLOW_S}  # how long what is slow takes, each time


def _slow_down(model, place):
    """Have a rank sleep in the forward of each layer or of the head, or in the embedding's backward."""

    def sleep(*_):
        time.sleep(SLEEPS[place])

    def sleep_in_backward(_, __, x):
        x.register_hook(sleep)

    if place == "layers":
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(sleep)
    elif place == "head":
        model.lm_head.register_forward_pre_hook(sleep)
    else:
        model.model.embed_tokens.register_forward_hook(sleep_in_backward)


def _measured(me, directory, form, place, accumulation):
    """Train, with one rank slow; returns the least that was measured in a step, and whether the losses are those of without."""
    from llama405b.parallel.busy import BusyMeter

    plain, updater = build(me, directory, **FORMS[form])
    expected = [take(me, plain, updater, step, accumulation) for step in STEPS]
    module, updater = build(me, directory, **FORMS[form])
    meter = BusyMeter(me.device)
    meter.attach(module)
    if me.index == SLOW_RANK:
        _slow_down(module, place)
    seen, busy = [], []
    for step in STEPS:
        seen.append(take(me, module, updater, step, accumulation))
        busy.append(meter.seconds())
    updater.wait()
    return min(busy), seen == expected


@pytest.mark.parametrize(
    ("form", "place", "accumulation"),
    [
        ("none", "layers", 1),
        ("optimizer", "layers", 2),
        ("all", "layers", 1),
        pytest.param("units within layers", "layers", 1, marks=pytest.mark.soak),
        pytest.param("embedding in the root", "layers", 1, marks=pytest.mark.soak),
        ("none", "head", 2),  # in the backward, the others wait where they gather the last layer again
        ("none", "embedding", 2),  # and where FSDP2 ends it
    ],
)
def test_a_slow_rank_is_told_from_those_that_wait_for_it(tiny, form, place, accumulation):
    (fast_s, same), (slow_s, same_there) = run_ranks(2, _measured, tiny, form, place, accumulation)
    assert same
    assert same_there
    times = 2 * 4 if place == "layers" else 1  # of 4 layers, in the forward and where the backward computes it again
    slept_s = times * SLEEPS[place] * accumulation
    assert slept_s <= slow_s < 1.9 * slept_s  # once each
    assert 0 < fast_s < slept_s / 2  # although its step takes as long


def _between(me, directory):
    """Train with slow updates, and a pause after each backward; returns the least that was measured in a step, and what was waited."""
    from llama405b.parallel.busy import BusyMeter

    module, updater = build(me, directory, **FORMS["all"])
    meter = BusyMeter(me.device)
    meter.attach(module)
    slow(updater, SLOW_S)
    take(me, module, updater, 1)
    meter.seconds()
    busy, waited = [], []
    for step in STEPS[1:]:
        updater.work()
        take(
            me,
            module,
            updater,
            step,
            accumulation=2,
            on_phase_end=lambda part: time.sleep(4 * SLOW_S * (part == "backward")),
        )
        busy.append(meter.seconds())
        waited.append(updater.work().exposed_s)
    return min(busy), min(waited)


def test_a_rank_is_not_busy_before_a_unit_is_updated_nor_after_a_backward(tiny):
    (busy_s, waited_s), *_ = run_ranks(2, _between, tiny)
    assert waited_s > 3 * SLOW_S
    assert busy_s < 2 * SLOW_S


def _looked(me, directory):
    from llama405b.parallel.busy import BusyMeter

    module, updater = build(me, directory, **FORMS["none"])
    meter = BusyMeter(me.device)
    meter.attach(module)
    take(me, module, updater, 1)
    measured = meter.seconds()
    with torch.no_grad():
        module(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
    return measured, meter.seconds()


def test_an_evaluation_is_no_part_of_a_step(tiny):
    measured, looked = run_ranks(1, _looked, tiny)[0]
    assert measured > 0
    assert looked is None
