"""Activation checkpointing: the same bits whatever is computed again, and no product more than is said."""

import collections

import mesh_rig
import pytest

from ranks_rig import run_ranks

KINDS = ("full", "operators", "operators:1", "every:2", "none")
EVERYWHERE = [(kind, "device") for kind in KINDS] + [("full", "host"), ("every:2", "host")]
SOME = [("none", "device"), ("operators:1", "device"), ("every:2", "host")]
ALONE, TP, PP, CHUNKS = {}, {"tp": 2}, {"pp": 2}, {"pp": 2, "pp_schedule": "interleaved"}


@pytest.mark.parametrize(
    ("world", "settings", "kinds", "family"),
    [
        (3, ALONE, EVERYWHERE, "llama"),
        (2, TP, SOME, "llama"),
        (2, PP, SOME, "llama"),
        (2, CHUNKS, SOME, "llama"),
        (
            2,
            {"fsdp_unit": "sublayer"},
            [("none", "device"), ("operators", "device"), ("operators:1", "device")],
            "olmo2",
        ),
    ],
    ids=["three", "tp", "pp", "chunks", "units that end before the layer"],
)
def test_all_kinds_train_to_the_same_bits(world, settings, kinds, family, tmp_path):
    directory = mesh_rig.write_model(tmp_path / "model", **({} if family == "llama" else {"family": family}))
    for found in run_ranks(world, _trained, directory, settings, kinds):
        assert len(found) == len(kinds)
        assert [kind for kind in found if found[kind] != found["none"]] == []


def _trained(me, directory, settings, kinds):
    import torch

    found = {}
    for kind, place in kinds:
        results, weights = mesh_rig.train(
            me, directory, steps=2, dtype=torch.float32, settings=settings, recompute=kind, activations=place
        )
        name = kind if place == "device" else f"{kind}, {place}"
        found[name] = results, {name: weight.double().sum().item() for name, weight in weights.items()}
    return found


def test_products_of_a_step_are_those_that_are_not_kept():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from llama405b.model.llama import checkpoint_activations
    from llama405b.settings.axes import Recompute

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.arange(16)[None]
    products, attentions = {}, {}
    for kind in ("none", "operators", "operators:2", "every:2", "full"):
        model, seen = LlamaForCausalLM(config), collections.Counter()
        checkpoint_activations(model, Recompute.parse(kind))
        with Counter():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        products[kind] = seen["aten.mm.default"]
        attentions[kind] = sum(n for name, n in seen.items() if "attention" in name and "backward" not in name)
    plain = 3 * (7 * 6 + 1)
    assert products == {
        "none": plain,
        "operators": plain,
        "operators:2": plain + 6 * 4,
        "every:2": plain + 6 * 3,
        "full": plain + 6 * 6,
    }
    assert attentions == {"none": 6, "operators": 6, "operators:2": 10, "every:2": 9, "full": 12}
