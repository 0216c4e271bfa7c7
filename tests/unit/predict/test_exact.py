"""Counts of the plan against the real modules, on the meta device: every preset."""

import json

import pytest

from llama405b.predict.hardware import ModelShape
from llama405b.settings.config import PRESET_DIR
from llama405b.spec.models import parse_llama

pytestmark = pytest.mark.slow
PRESETS = json.loads((PRESET_DIR / "architectures.json").read_text())
S = 256


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_modules(name):
    import torch

    from llama405b.model.llama import build_on_meta, config_from_dict

    shape = ModelShape.from_llama(parse_llama(PRESETS[name], name))
    module = build_on_meta(config_from_dict(PRESETS[name]), "sdpa", torch.bfloat16)
    if module.config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    linear = [m.weight.numel() for m in module.model.layers[0].modules() if isinstance(m, torch.nn.Linear)]
    last = 0 if name == "olmo2-7b" else module.model.layers[0].mlp.down_proj.weight.numel()
    assert (shape.matrices, shape.unrepeated_weights) == (sum(linear), last)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_flops_are_those_that_torch_counts(name, again):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from llama405b.model.llama import build_on_meta, checkpoint_activations, config_from_dict, set_layers

    config = set_layers(config_from_dict(PRESETS[name]), 2)
    shape = ModelShape.from_llama(parse_llama(PRESETS[name] | {"num_hidden_layers": 2}, name))
    module = build_on_meta(config, "eager", torch.bfloat16)
    if again:
        checkpoint_activations(module)
    ids, mask = (
        torch.zeros(1, S, dtype=torch.long, device="meta"),
        torch.zeros(1, 1, S, S, device="meta", dtype=torch.bfloat16),
    )
    with FlopCounterMode(display=False) as counted:
        module(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    attention = 2 * shape.width * S * S  # the causal half, forward; the counter sees the whole
    recomputed = S * shape.recomputed_flops(S, shape.layers) + 2 * attention if again else 0
    expected = S * shape.model_flops(S) + 2 * 3 * attention + recomputed
    assert counted.get_total_flops() == pytest.approx(expected, rel=1e-4)  # beside the angles of rope
