"""The Hugging Face Llama, or a model of another family like it, built on the meta device: shapes without memory.

Knows transformers' modules; not ranks, files of weights or the optimizer. Parallelism leaves the model untouched.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from llama405b.contract.errors import UserError
from llama405b.contract.groups import is_frozen
from llama405b.contract.schema import COMPUTE_BYTES, Numerics


def compute_dtype(numerics: Numerics) -> torch.dtype:
    """Return the dtype of gathered weights and of hidden states."""
    return {2: torch.bfloat16, 4: torch.float32}[COMPUTE_BYTES[numerics]]


def llama_name(module: nn.Module, config: PreTrainedConfig) -> str:
    """Return what a module's class is called in a Llama: ``LlamaMLP`` of ``Qwen3MLP``, and of what FSDP makes of that."""
    name, own = type(module).__name__.removeprefix("FSDP"), type(config).__name__.removesuffix("Config")
    return f"Llama{name.removeprefix(own)}" if name.startswith(own) else name


def head_dim(config: PreTrainedConfig) -> int:
    """Return the size of a head: not all families' configurations have it, and where it is missing or null it follows from others."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_decoder_layer(module: nn.Module) -> bool:
    """Whether a module is a decoder layer, of any family."""
    return type(module).__name__.endswith("DecoderLayer")


def config_of(described: Mapping[str, Any]) -> PreTrainedConfig:
    """Return transformers' configuration of a model that is described as in ``config.json``."""
    return AutoConfig.for_model(**described)


def read_hf_config(directory: Path, layers: int = 0) -> PreTrainedConfig:
    """Read ``config.json``; ``layers``: cut the model down to that many decoder layers (0: all).

    Sequences are no longer than a sliding window, so that all layers see all before, and need no mask for it.

    Raises:
        UserError: transformers does not accept it, or does not know its activation.
    """
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001
        why = " ".join(str(error).split())
        raise UserError(f"{directory / 'config.json'}: transformers rejects it ({why}); download it again") from None
    if config.hidden_act not in ACT2FN:
        raise UserError(
            f"{directory / 'config.json'}: transformers has no activation {config.hidden_act!r} (hidden_act); download it again"
        )
    return with_layers(config, layers or config.num_hidden_layers)


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Set the number of layers, and that none has a sliding window."""
    config.num_hidden_layers = layers
    for name, value in (
        ("sliding_window", None),
        ("use_sliding_window", False),
        ("layer_types", ["full_attention"] * layers),
    ):
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def build_on_meta(config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without allocating a byte of weights.

    Raises:
        UserError: It has buffers that nothing would fill: only ``restore_buffers`` does, and it knows rotary frequencies alone.
    """
    config._attn_implementation = attention
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    rotary = {name for name, module in model.named_modules() if _is_rotary(module)}
    if unknown := [name for name, _ in model.named_buffers() if name.rpartition(".")[0] not in rotary]:
        raise UserError(
            f"--model.path: {type(model).__name__} has buffers that are in no file of weights, and would be undefined "
            f"({', '.join(unknown)}); such a model cannot be trained"
        )
    model.train()
    return model


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def freeze(model: nn.Module, groups: Sequence[str], *, whole: bool = False) -> None:
    """Have the parameters that ``optimizer.groups`` freezes take no gradient, or none at all. Call it before sharding."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not whole and not is_frozen(groups, name))


def restore_buffers(model: nn.Module, config: PreTrainedConfig, device: torch.device) -> None:
    """Recompute the rotary frequencies, which are in no state dict, on ``device``."""
    for name, module in list(model.named_modules()):
        if _is_rotary(module):
            model.get_submodule(name.rpartition(".")[0]).rotary_emb = type(module)(config).to(device)


def tie_head(model: nn.Module) -> None:
    """Make the head share the embedding's weight again, if the configuration says so."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
