"""What is built on the meta device can be filled."""

import pytest
import torch

from llama405b.contract.errors import UserError
from llama405b.model.llama import build_on_meta, config_from_dict
from llama405b.spec.models import FAMILIES

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 4, "pad_token_id": 0}


def build(model_type):
    return build_on_meta(config_from_dict({"model_type": model_type, **SHAPE}), "sdpa", torch.bfloat16)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_our_families_have_no_buffers_but_rotary_frequencies(model_type):
    assert all("rotary_emb." in name for name, _ in build(model_type).named_buffers())


def test_a_buffer_that_nothing_fills_is_refused():
    with pytest.raises(UserError, match=r"Gemma3ForCausalLM has buffers .*\(model\.embed_tokens\.embed_scale\)"):
        build("gemma3_text")
