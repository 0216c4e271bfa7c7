"""Models: what their configs become, what is built on the meta device, and what compiling them needs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from llama405b.contract.errors import UserError
from llama405b.model.llama import (
    build_on_meta,
    compile_unsupported_reason,
    config_from_dict,
    restore_buffers,
    set_layers,
)
from llama405b.spec.models import FAMILIES, Family

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 4, "pad_token_id": 0}


def build(model_type):
    return build_on_meta(config_from_dict({"model_type": model_type, **SHAPE}), "sdpa", torch.bfloat16)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_buffers_of_our_families_have_the_values_of_transformers(model_type):
    config = config_from_dict({"model_type": model_type, **SHAPE})
    model = build(model_type)
    restore_buffers(model, config, torch.device("cpu"))
    expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert {name for name, _ in model.named_buffers()} == {*expected}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_a_buffer_that_nothing_fills_is_refused(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gemma3_text", Family("Gemma3"))
    with pytest.raises(UserError, match=r"Gemma3ForCausalLM has buffers .*\(model\.embed_tokens\.embed_scale\)"):
        build("gemma3_text")


def test_windows_are_switched_off_in_each_of_the_layers_that_are_kept():
    mistral = set_layers(MistralConfig(num_hidden_layers=4, sliding_window=64), 3)
    assert (mistral.num_hidden_layers, mistral.sliding_window) == (3, None)
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    qwen2 = set_layers(Qwen2Config(num_hidden_layers=4, **windows), 3)
    assert (qwen2.num_hidden_layers, qwen2.sliding_window, qwen2.use_sliding_window) == (3, None, False)
    assert qwen2.layer_types == 3 * ["full_attention"]


def test_types_of_layers_that_choose_the_rotary_embedding_stay():
    gemma = set_layers(config_from_dict({"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64}), 6)
    assert gemma.layer_types == [*5 * ["sliding_attention"], "full_attention"]
    assert gemma.sliding_window == 64


def test_a_config_without_windows_gets_none():
    before = LlamaConfig(num_hidden_layers=4).to_dict()
    assert set_layers(LlamaConfig(num_hidden_layers=4), 4).to_dict() == before


def test_the_c_compiler_that_is_asked_for_is_the_one_that_compiling_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compile_unsupported_reason(torch.device("cpu")).endswith("but there is no cc or gcc or clang here")
    (tmp_path / "gcc").touch(0o755)
    assert compile_unsupported_reason(torch.device("cpu")) == ""
    monkeypatch.setenv("CC", "icx")
    assert compile_unsupported_reason(torch.device("cpu")).endswith("but there is no icx here")
