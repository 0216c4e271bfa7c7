"""The check of attention before the first step, and that it sees what is wrong."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llama405b.contract.errors import UserError
from llama405b.model.checked import check_attention

CPU = torch.device("cpu")
SHAPES = [
    {"num_attention_heads": 32, "num_key_value_heads": 2},
    {"num_attention_heads": 4, "head_dim": 24, "pad_token_id": 31999},
]


def _blind(module, query, key, value, attention_mask, **more):
    """Attention that takes no notice of the mask, as a fused kernel without one would: causal over the whole sequence."""
    return sdpa_attention_forward(module, query, key, value, None, **more | {"is_causal": True})


def _nan(module, query, key, value, attention_mask, **more):
    out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    return out * float("nan"), weights


@pytest.fixture
def broken(monkeypatch):
    for name, attend in (("blind", _blind), ("nan", _nan)):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, attend)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_is_accepted(shape, dtype):
    config = LlamaConfig(hidden_size=256, **shape)
    before = torch.random.get_rng_state()
    for attention in ("sdpa", "eager"):
        for isolated in (True, False):
            assert check_attention(config, attention, CPU, dtype, isolated=isolated) < 0.05
    assert torch.equal(before, torch.random.get_rng_state())
    assert config.num_hidden_layers == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_that_cannot_isolate_is_refused(broken, dtype):
    config = LlamaConfig(hidden_size=256, **SHAPES[0])
    with pytest.raises(
        UserError, match=r"--model\.attention: with blind on cpu packed documents see each other .*; use sdpa"
    ):
        check_attention(config, "blind", CPU, dtype, isolated=True)
    assert check_attention(config, "blind", CPU, dtype, isolated=False) < 0.05
    with pytest.raises(UserError, match="it does not compute what sdpa does"):
        check_attention(config, "nan", CPU, dtype, isolated=False)
