"""The Hugging Face Llama, built on the meta device: shapes without memory.

Knows transformers' modules; not ranks, files of weights or the optimizer. Parallelism leaves the model untouched.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llama405b.contract.errors import UserError
from llama405b.contract.schema import COMPUTE_BYTES, Numerics


def compute_dtype(numerics: Numerics) -> torch.dtype:
    """Return the dtype of gathered weights and of hidden states."""
    return {2: torch.bfloat16, 4: torch.float32}[COMPUTE_BYTES[numerics]]


def read_hf_config(directory: Path, layers: int = 0) -> LlamaConfig:
    """Read ``config.json``; ``layers``: cut the model down to that many decoder layers (0: all).

    Raises:
        UserError: transformers does not accept it, or does not know its activation.
    """
    try:
        config = LlamaConfig.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001
        why = " ".join(str(error).split())
        raise UserError(f"{directory / 'config.json'}: transformers rejects it ({why}); download it again") from None
    if config.hidden_act not in ACT2FN:
        raise UserError(
            f"{directory / 'config.json'}: transformers has no activation {config.hidden_act!r} (hidden_act); download it again"
        )
    config.num_hidden_layers = layers or config.num_hidden_layers
    return config


def build_on_meta(config: LlamaConfig, attention: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Build the model without allocating a byte of weights."""
    config._attn_implementation = attention
    config.use_cache = False
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.train()
    return model


def restore_buffers(model: nn.Module, config: LlamaConfig, device: torch.device) -> None:
    """Recompute the rotary frequencies, which are in no state dict, on ``device``."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRotaryEmbedding):
            model.get_submodule(name.rpartition(".")[0]).rotary_emb = LlamaRotaryEmbedding(config).to(device)


def tie_head(model: nn.Module) -> None:
    """Make the head share the embedding's weight again, if the configuration says so."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
