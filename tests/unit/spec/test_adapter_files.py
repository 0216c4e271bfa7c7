"""Adapters as numbers and files: what they are beside, what they cost, and which of peft's are gone on with."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama405b.contract.errors import UserError
from llama405b.settings.config import PRESET_DIR
from llama405b.settings.rules import find_faults
from llama405b.settings.schema import Adapter, Config, Data, Model, Parallel
from llama405b.spec import adapters
from llama405b.spec.adapters import PEFT_PREFIX, lora_shapes, read_peft
from llama405b.spec.models import parse_llama
from llama405b.spec.tensors import tp_dimension

PRESETS = json.loads((PRESET_DIR / "architectures.json").read_text())
UP_ALONE = "model.layers.0.{}.lora_B.weight"
LORA = Adapter("lora", 2, 4.0, ("q_proj", "down_proj"))


@pytest.fixture
def llama():
    return dataclasses.replace(
        parse_llama(PRESETS["llama3.2-1b"], "1b"), layers=1, hidden=8, intermediate=12, heads=2, head_dim=4
    )


def test_each_target_of_each_layer_has_two(llama):
    layer = "model.layers.0."
    assert lora_shapes(llama, LORA) == {
        f"{layer}self_attn.q_proj.lora_A.weight": (2, 8),
        f"{layer}self_attn.q_proj.lora_B.weight": (8, 2),
        f"{layer}mlp.down_proj.lora_A.weight": (2, 12),
        f"{layer}mlp.down_proj.lora_B.weight": (8, 2),
    }
    assert lora_shapes(llama, Adapter()) == {}
    assert adapters.n_trained_parameters(llama, LORA) == 16 + 16 + 24 + 16
    assert adapters.n_trained_parameters(llama, Adapter()) == llama.parameters
    assert adapters.adapted_features(llama, LORA) == (8 + 12, 8 + 8)


def test_they_are_split_as_their_matrix_is():
    names = [f"m.{matrix}.lora_{factor}.weight" for matrix in ("q_proj", "o_proj") for factor in "AB"]
    assert [*map(tp_dimension, names)] == [None, 0, 1, None]


def test_frozen_matrices_take_four_flops_of_a_weight_and_adapters_six():
    whole = parse_llama(PRESETS["llama3.1-8b"], "8b")
    lora = Adapter("lora")
    usual, found = whole.flops_per_token(4096), adapters.adapter_flops(whole, lora, 4096)
    attention = 6 * whole.layers * whole.heads * whole.head_dim * 4096
    assert found == (usual - attention) * 2 // 3 + attention + 6 * adapters.n_adapter_parameters(whole, lora)
    assert adapters.adapter_flops(whole, Adapter(), 4096) == usual


@pytest.mark.parametrize(
    ("adapter", "parallel", "setting", "why"),
    [
        ({"rank": 8}, {}, "adapter.rank", "no effect without an adapter"),
        ({"kind": "lora", "targets": ("q_prj",)}, {}, "adapter.targets", r"did you mean 'q_proj'\?"),
        ({"kind": "lora", "targets": ()}, {}, "adapter.targets", "the list is empty"),
        ({"kind": "lora", "targets": ("q_proj", "q_proj")}, {}, "adapter.targets", "names a layer twice"),
        ({"kind": "lora", "rank": 0}, {}, "adapter.rank", "must be above 0"),
        ({"kind": "lora"}, {"strategy": "fsdp1"}, "adapter.kind", "use fsdp2"),
        ({"kind": "lora"}, {"numerics": "fp8"}, "adapter.kind", "use numerics fp32-master"),
        ({"kind": "lora"}, {"offload": "optimizer"}, "parallel.offload", "use none, or all"),
        ({"kind": "lora"}, {"offload": "all", "tp": 2}, "", ""),
    ],
)
def test_settings_that_do_not_go_together_are_refused(adapter, parallel, setting, why):
    config = Config(Model("m"), Data(("d",)), parallel=Parallel(**parallel), adapter=Adapter(**adapter))
    found = dict(find_faults(config))
    assert [*found][:1] == ([setting] if setting else [])
    if setting:
        assert re.search(why, found[setting])


def written(directory, llama, *, names=None, dtype=torch.float32, **more):
    """Write an adapter as peft does."""
    directory.mkdir()
    shapes = {f"{PEFT_PREFIX}{name}": shape for name, shape in lora_shapes(llama, LORA).items()}
    save_file(
        {name: torch.zeros(shapes[name], dtype=dtype) for name in names or shapes},
        directory / "adapter_model.safetensors",
    )
    described = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    } | more
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory


def test_pefts_files_are_read(tmp_path, llama):
    found = read_peft(written(tmp_path / "a", llama, use_dora=False, modules_to_save=None), llama, LORA)
    assert {name: info.shape for name, info in found.items()} == lora_shapes(llama, LORA)


@pytest.mark.parametrize(
    ("more", "adapter", "why"),
    [
        ({"peft_type": "IA3"}, LORA, "peft_type is 'IA3'; only LORA"),
        ({"use_dora": True}, LORA, "use_dora is True, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, LORA, "init_lora_weights is 'pissa_niter_4', which is not supported"),
        ({"alora_invocation_tokens": [1]}, LORA, "alora_invocation_tokens is"),
        ({"r": "2"}, LORA, "r is '2' and lora_alpha 4; both must be numbers"),
        ({"bias": "all"}, LORA, "bias is 'all', which is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, LORA, "rank_pattern is"),
        ({}, dataclasses.replace(LORA, rank=3), "use --adapter.rank 2 --adapter.alpha 4 --adapter.targets q_proj,down_proj"),
        ({}, dataclasses.replace(LORA, alpha=3.0), "has other settings; use"),
        ({}, dataclasses.replace(LORA, targets=("q_proj",)), "has other settings; use"),
        ({"dtype": torch.float64}, LORA, "is F64; only F32, F16 and BF16 can be trained"),
        ({"names": [f"{PEFT_PREFIX}{UP_ALONE.format(name)}" for name in ("self_attn.q_proj", "mlp.down_proj")]}, LORA, "is missing"),
    ],
)  # fmt: skip
def test_what_is_another_adapter_is_refused(tmp_path, llama, more, adapter, why):
    with pytest.raises(UserError, match=why):
        read_peft(written(tmp_path / "a", llama, **more), llama, adapter)


def test_a_target_that_is_none_here_is_named(tmp_path, llama):
    directory = written(tmp_path / "a", llama, init_lora_weights="gaussian")
    assert read_peft(directory, llama, LORA)
    tensors = load_file(directory / "adapter_model.safetensors") | {
        f"{PEFT_PREFIX}lm_head.lora_B.weight": torch.zeros(4, 2)
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(UserError, match="lm_head has an adapter, which is not supported"):
        read_peft(directory, llama, LORA)


@pytest.mark.parametrize(("offload", "expected"), [("none", (2, 0)), ("all", (0, 2))])
def test_states_are_frozen_weights_and_what_adapters_take(llama, offload, expected):
    share = adapters.n_adapter_parameters(llama, LORA) / llama.parameters
    config = Config(parallel=Parallel(offload=offload))
    found = adapters.bytes_per_parameter(llama, dataclasses.replace(config, adapter=LORA))
    assert found == pytest.approx([base + share * 16 * bool(base) for base in expected])
    assert adapters.bytes_per_parameter(llama, config) == ((16, 0) if offload == "none" else (0, 16))


def test_one_of_another_model_is_refused(tmp_path, llama):
    directory = written(tmp_path / "a", llama)
    with pytest.raises(UserError, match=r"lora_A.weight is \[2, 8\], but the model needs \[2, 16\]"):
        read_peft(directory, dataclasses.replace(llama, hidden=16), LORA)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="no such file; save the adapter as safetensors"):
        read_peft(directory, llama, LORA)
