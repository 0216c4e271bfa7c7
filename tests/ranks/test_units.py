"""Which of FSDP's units a rank shows that it is in."""

import pytest

from ranks_rig import run_ranks
from update_rig import build, take

LAYERS = [f"layers.{n}" for n in range(4)]


def _shown(me, directory, accumulation):
    from llama405b.parallel.fsdp import UnitTracker

    plain, updater = build(me, directory, offload="none", overlap=False)
    expected = take(me, plain, updater, 1, accumulation)
    module, updater = build(me, directory, offload="none", overlap=False)
    shown = []
    UnitTracker(lambda name, way: lambda: shown.append((name, way))).attach(module)
    same = take(me, module, updater, 1, accumulation) == expected
    updater.wait()
    return [unit for n, unit in enumerate(shown) if shown[n - 1 : n] != [unit]], same


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_unit_is_shown_forward_and_backward(tiny, accumulation):
    for shown, same in run_ranks(2, _shown, tiny, accumulation):
        assert same
        forward = [name for name, way in shown if way == "forward"]
        assert forward == ["the model", "embed_tokens", *LAYERS, "norm", "lm_head"] * accumulation
        backward = [name for name, way in shown if way == "backward" and name in LAYERS]
        assert [name for n, name in enumerate(backward) if backward[n - 1 : n] != [name]] == LAYERS[::-1] * accumulation
        if accumulation == 1:  # what is recomputed belongs to the backward
            assert [way for _, way in shown] == sorted((way for _, way in shown), reverse=True)
