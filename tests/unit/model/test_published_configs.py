"""Each family's config.json as it is published: what transformers makes of it has our tensors, and is checked before the first step."""

import json

import pytest
import torch

from llama405b.model import fused
from llama405b.model.attention import check_attention
from llama405b.model.llama import build_on_meta, head_dim, read_hf_config
from llama405b.spec.models import parse_llama
from tiny_models import PUBLISHED

CPU = torch.device("cpu")
SEPARATE = "this model's MLP is not a SwiGLU of separate matrices without biases"
UNFUSED = {"Gemma 3": ["this model's norms multiply by 1 + weight", SEPARATE], "Phi-3": ["", SEPARATE]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_as_published_is_built_and_checked(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    llama, config = parse_llama(PUBLISHED[name], name), read_hf_config(tmp_path)
    assert head_dim(config) == llama.head_dim
    model = build_on_meta(config, "sdpa", torch.float32)
    assert {key: tuple(each.shape) for key, each in model.named_parameters()} == llama.tensors()
    for isolated in (True, False):
        assert check_attention(config, "eager", CPU, torch.float32, isolated=isolated) < 1e-4
    reasons = [fused.unsupported_reason(each, config, CPU, torch.float32) for each in fused.FORWARDS]
    assert reasons == UNFUSED.get(name, ["", ""])
