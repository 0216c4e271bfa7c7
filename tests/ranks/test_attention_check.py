"""The check of attention before the first step, and that it sees what is wrong."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llama405b.contract.errors import UserError
from llama405b.model import attention
from llama405b.model.attention import AttentionCheckError, check_attention

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


def _bent(module, query, key, value, attention_mask, **more):
    """Attention whose forward is right, and whose backward is not."""
    return sdpa_attention_forward(module, query, key, (value + value.detach()) / 2, attention_mask, **more)


@pytest.fixture
def broken(monkeypatch):
    for name, attend in (("blind", _blind), ("nan", _nan), ("bent", _bent)):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, attend)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_is_accepted(shape, dtype):
    config = LlamaConfig(hidden_size=256, **shape)
    before = torch.random.get_rng_state()
    for implementation in ("sdpa", "eager"):
        for isolated in (True, False):
            assert check_attention(config, implementation, CPU, dtype, isolated=isolated) < 0.05
    assert torch.equal(before, torch.random.get_rng_state())
    assert config.num_hidden_layers == 32


def test_a_model_that_computes_nan_is_not_called_a_fault_of_attention():
    config = LlamaConfig(hidden_size=256, **SHAPES[0], rms_norm_eps=float("nan"))
    with pytest.raises(
        UserError, match=r"^config\.json: one small layer of this model computes NaN with any attention"
    ):
        check_attention(config, "sdpa", CPU, torch.float32, isolated=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_that_cannot_isolate_is_refused(broken, dtype):
    config = LlamaConfig(hidden_size=256, **SHAPES[0])
    with pytest.raises(
        AttentionCheckError, match=r"with blind on cpu packed documents attend to each other \(logits differ by "
    ):
        check_attention(config, "blind", CPU, dtype, isolated=True)
    assert check_attention(config, "blind", CPU, dtype, isolated=False) < 0.05
    for name in ("nan", "bent"):
        with pytest.raises(AttentionCheckError, match=f"with {name} on cpu its results differ from sdpa's"):
            check_attention(config, name, CPU, dtype, isolated=False)
    with pytest.raises(AttentionCheckError, match=r"absent fails on cpu \(.*\)"):
        check_attention(config, "absent", CPU, dtype, isolated=False)


def _by_document(query, key, value, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
    """What the kernel computes, one document after the other; (tokens, heads, size of a head) each."""
    assert window_size == (-1, 0)
    assert ends_q.dtype == torch.int32
    assert longest_q == int(ends_q.diff().max())
    assert enable_gqa or query.shape == key.shape
    out = torch.empty_like(query)
    for begin, end in itertools.pairwise(ends_q.tolist()):
        parts = (each[begin:end].transpose(0, 1) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        out[begin:end] = attended.transpose(0, 1)
    return out


@pytest.mark.parametrize("knows_groups", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_varlen_is_told_where_documents_end(monkeypatch, shape, knows_groups):
    monkeypatch.setattr(attention, "varlen_attn", _by_document)
    monkeypatch.setattr(attention, "HAS_GQA", knows_groups)
    config = LlamaConfig(hidden_size=256, **shape)
    for isolated in (True, False):
        assert check_attention(config, "varlen", CPU, torch.float32, isolated=isolated) < 1e-5
    monkeypatch.setattr(
        attention,
        "varlen_attn",
        lambda q, k, v, e, *more, **also: _by_document(q, k, v, e[[0, -1]], e, len(q), 0, **also),
    )
    with pytest.raises(AttentionCheckError, match="packed documents attend to each other"):
        check_attention(config, "varlen", CPU, torch.float32, isolated=True)


def test_what_can_run_is_found_by_device_and_package(monkeypatch):
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert attention.attention_candidates("eager") == ("eager",)
    names = attention.attention_candidates("auto")
    assert names == ("flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen", "sdpa")
    assert {attention.attention_unsupported_reason(name, CPU, bf16) for name in names} == {
        "flash-attn and varlen need CUDA",
        "",
    }
    packages, major = set(), 9
    monkeypatch.setattr(attention, "_is_installed", lambda package: package in packages)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))

    def first():
        return next(name for name in names if not attention.attention_unsupported_reason(name, cuda, bf16))

    assert attention.attention_unsupported_reason("flash_attention_3", cuda, bf16) == "flash-attn-3 is not installed"
    assert (
        attention.attention_unsupported_reason("varlen", cuda, torch.float32)
        == "flash-attn and varlen compute in BF16 only"
    )
    assert first() == "varlen"
    for package, name in (
        ("flash-attn", "flash_attention_2"),
        ("flash-attn-3", "flash_attention_3"),
        ("flash-attn-4", "flash_attention_4"),
    ):
        packages.add(package)
        assert first() == name
    packages, major = {"flash-attn-3"}, 10
    assert (
        attention.attention_unsupported_reason("flash_attention_3", cuda, bf16)
        == "flash-attn-3 is not for GPUs of compute capability 10.0"
    )
    assert first() == "varlen"
    major = 7
    assert first() == "sdpa"
