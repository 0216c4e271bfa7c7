"""How long each rank itself computes: a slow one is told from those that wait for it, and nothing else changes."""

import time

import pytest
import torch

from ranks_rig import run_ranks
from update_rig import build, take

SLOW_S, SLOW_RANK = 0.1, 1
FORMS = [
    {"offload": "none", "overlap": False},
    {"offload": "optimizer", "overlap": True},
    {"offload": "all", "overlap": True},
]


def _steps(me, directory, accumulation, form):
    """Train, with one rank slow in every layer; returns what was measured, the layers, and whether the losses are those of without."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from llama405b.parallel.busy import BusyMeter

    plain, updater = build(me, directory, **form)
    expected = [take(me, plain, updater, step, accumulation) for step in (1, 2)]
    module, updater = build(me, directory, **form)
    meter = BusyMeter(me.device)
    meter.attach(module)
    layers = [layer for layer in module.modules() if isinstance(layer, LlamaDecoderLayer)]
    if me.rank == SLOW_RANK:
        for layer in layers:
            layer.mlp.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
    seen, busy = [], []
    for step in (1, 2):
        seen.append(take(me, module, updater, step, accumulation))
        with torch.no_grad():  # an evaluation is no part of a step
            module(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
        busy.append(meter.seconds())
    updater.wait()
    return busy, len(layers), seen == expected, meter.seconds()


@pytest.mark.parametrize(("form", "accumulation"), [(FORMS[0], 1), (FORMS[1], 2), (FORMS[2], 1)])
def test_a_slow_rank_is_told_from_those_that_wait_for_it(tiny, form, accumulation):
    (fast, n_layers, same, after), (slow, *_) = run_ranks(2, _steps, tiny, accumulation, form)
    assert same
    assert after is None
    slept_s = 2 * SLOW_S * n_layers * accumulation  # in the forward, and where the backward computes it again
    for fast_s, slow_s in zip(fast, slow, strict=True):
        assert slept_s <= slow_s < 1.9 * slept_s  # once each
        assert 0 < fast_s < slept_s / 2  # although its step takes as long
