"""Prepare transformers' decoder for training: meta build, adapters, checkpointing, compile, FP8.

Knows transformers' modules and how tensor parallelism splits them; not ranks, weight files or the optimizer. FP8 (arXiv 2209.05433, by
torchao) applies to the matrix products of decoder layers. Each casts its operands with one scale per tensor, torchao's fastest recipe;
weights, gathered weights, gradients, checkpoints and parameter names do not change. For adapters see ``spec.models``.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from llama405b.contract.errors import UserError
from llama405b.settings.axes import FULL_RECOMPUTE, Recompute, RecomputeKind
from llama405b.settings.rules import is_frozen
from llama405b.settings.schema import COMPUTE_BYTES, Adapter, Numerics
from llama405b.spec.models import FAMILIES, Family


def compute_dtype(numerics: Numerics) -> torch.dtype:
    """Return the dtype of gathered weights and of hidden states."""
    return {2: torch.bfloat16, 4: torch.float32}[COMPUTE_BYTES[numerics]]


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model."""
    return FAMILIES[config.model_type]


def llama_name(module: nn.Module, config: PreTrainedConfig) -> str:
    """Return the Llama name of a module's class: ``LlamaMLP`` for ``Qwen3MLP`` and for its FSDP subclass."""
    name, prefix = type(module).__name__.removeprefix("FSDP"), family_of(config).prefix
    return f"Llama{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def activation(config: PreTrainedConfig) -> str:
    """Return the name of the MLP's activation function."""
    return str(getattr(config, family_of(config).activation_key))


def head_dim(config: PreTrainedConfig) -> int:
    """Return the size of an attention head: ``head_dim`` or, if missing or null, hidden size / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_decoder_layer(module: nn.Module) -> bool:
    """Return whether a module is a decoder layer of any family."""
    return type(module).__name__.endswith("DecoderLayer")


def config_from_dict(description: Mapping[str, Any]) -> PreTrainedConfig:
    """Return transformers' configuration from the contents of a ``config.json``."""
    return AutoConfig.for_model(**description)


def read_hf_config(directory: Path, layers: int = 0) -> PreTrainedConfig:
    """Read ``config.json``; ``layers``: keep only this many decoder layers (0: all).

    Raises:
        UserError: transformers does not accept it, or does not know its activation.
    """
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())
        raise UserError(f"{directory / 'config.json'}: transformers rejects it ({reason}); download it again") from None
    if activation(config) not in ACT2FN:
        raise UserError(
            f"{directory / 'config.json'}: transformers has no activation {activation(config)!r} "
            f"({family_of(config).activation_key}); download it again"
        )
    return set_layers(config, layers or config.num_hidden_layers)


def set_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Set the number of layers and switch off sliding windows; return the config.

    Sequences are never longer than a window, so attention with one equals full attention. Types of layers that choose the rotary
    embedding are kept, and then the window, too.
    """
    config.num_hidden_layers = layers
    changes = {
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * layers,
    }
    if family_of(config).has_layer_types:
        changes = {"layer_types": config.layer_types[:layers]}
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def build_on_meta(config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without allocating a byte of weights.

    Raises:
        UserError: It has buffers that nothing would fill, see ``restore_buffers``.
    """
    config._attn_implementation = attention
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    rotary = {name for name, module in model.named_modules() if _is_rotary(module)}
    buffers = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] not in rotary]
    if unknown_buffers := [name for name in buffers if name not in family_of(config).buffers]:
        raise UserError(
            f"--model.path: {type(model).__name__} has buffers that no weight file holds, so they would be undefined "
            f"({', '.join(unknown_buffers)}); such a model cannot be trained"
        )
    model.train()
    return model


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def freeze(model: nn.Module, groups: Sequence[str], *, freeze_all: bool = False) -> None:
    """Disable gradients of the parameters that ``optimizer.groups`` freezes, or of all. Call before sharding."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze_all and not is_frozen(groups, name))


def restore_buffers(model: nn.Module, config: PreTrainedConfig, device: torch.device) -> None:
    """Compute the buffers that are in no state dict on ``device``: rotary frequencies, and the scale of embeddings."""
    for name, module in list(model.named_modules()):
        if _is_rotary(module):
            model.get_submodule(name.rpartition(".")[0]).rotary_emb = type(module)(config).to(device)
        if "embed_scale" in dict(module.named_buffers(recurse=False)):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)


def rotary_embeddings(model: nn.Module, hidden_BSh: Tensor, positions_BS: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the rotary embedding (cosines, sines) of each decoder layer; ``model``: has ``rotary_emb`` and a ``config``."""
    config = model.config
    if not family_of(config).has_layer_types:
        return [model.rotary_emb(hidden_BSh, positions_BS)] * config.num_hidden_layers
    by_type = {kind: model.rotary_emb(hidden_BSh, positions_BS, kind) for kind in {*config.layer_types}}
    return [by_type[kind] for kind in config.layer_types]


def tie_head(model: nn.Module) -> None:
    """Tie the head to the embedding's weight again, if the configuration says so."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


WRAPPER_PREFIXES = (
    "_checkpoint_wrapped_module.",
    "_fsdp_wrapped_module.",
)  # in parameter names: of checkpoint_wrapper, and of FSDP1
# FSDP's hooks open profiler records. With units within a layer, a recomputation runs other hooks than the forward did.
PROFILER_OPS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
MATMUL_OPS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)


def checkpoint_activations(model: nn.Module, recompute: Recompute = FULL_RECOMPUTE) -> None:
    """Make decoder layers recompute activations in the backward. Call AFTER sharding, or FSDP's units double."""
    for parent in list(model.modules()):
        layers = [(name, child) for name, child in parent.named_children() if is_decoder_layer(child)]
        for (name, layer), kind in zip(layers, recompute.layer_kinds(len(layers)), strict=True):
            setattr(parent, name, with_recompute(layer, kind))


def with_recompute(layer: nn.Module, kind: RecomputeKind) -> nn.Module:
    """Wrap a layer to recompute its activations in the backward, in the way that its kind says."""
    if kind == "none":
        return layer
    options: dict[str, Any] = {}
    if kind == "operators":
        SAC_IGNORED_OPS.update(PROFILER_OPS)
        n_products = sum(isinstance(module, nn.Linear) for module in layer.modules())
        options["context_fn"] = functools.partial(_selective_contexts, n_products)
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)


def _selective_contexts(n_products: int) -> Any:
    """Return torch's context managers for the forward of a layer and for its recomputation."""
    return create_selective_checkpoint_contexts(_SavePolicy(n_products))


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


class _SavePolicy:
    """Selective checkpointing policy: save the results of attention and of all matrix products but the last.

    No backward needs the result of the last product, and recomputation stops before it (early stop).
    """

    def __init__(self, n_products: int) -> None:
        self.n_products = n_products
        self.n_seen = {False: 0, True: 0}  # matrix products, by whether it is the recomputation

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Return whether to save an operator's results."""
        if op in MATMUL_OPS:
            self.n_seen[context.is_recompute] += 1
            must_save = self.n_seen[context.is_recompute] < self.n_products
        else:
            must_save = "attn" in str(op) or "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE


class LoraLinear(nn.Linear):
    """A linear layer with a LoRA adapter on the same input."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + B scaling A x; scaled at the rank dimension, where the tensor is smallest.

        W's product comes last, so that checkpointing does not recompute it (early stop).
        """
        update = self.lora_B(self.lora_A(x) * self.scaling)
        return super().forward(x) + update


def add_adapters(model: nn.Module, adapter: Adapter, dtype: torch.dtype, groups: Sequence[str] = ()) -> None:
    """Add adapters of a dtype to the target layers. Call after tensor parallelism, and before FSDP.

    ``groups``: ``optimizer.groups``, which may freeze some adapters.
    """
    targets = family_of(model.config).matrices(adapter.targets)
    for layer_name, layer in model.named_modules():
        if not is_decoder_layer(layer):
            continue
        for name, linear in list(layer.named_modules(prefix=layer_name)):
            if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in targets:
                _add_adapter(linear, adapter, dtype)
                for factor, parameter in linear.named_parameters(prefix=name):
                    parameter.requires_grad_(".lora_" in factor and not is_frozen(groups, factor))


def _add_adapter(linear: nn.Linear, adapter: Adapter, dtype: torch.dtype) -> None:
    """Add an adapter to one linear layer."""
    lora_a, lora_b = (
        nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)
        for inputs, outputs in ((linear.in_features, adapter.rank), (adapter.rank, linear.out_features))
    )
    if isinstance(linear.weight, DTensor):  # A is sharded like the matrix's inputs, B like its outputs
        by_inputs = linear.weight.placements == (Shard(1),)
        _distribute_factor(lora_a, linear.weight, Shard(1) if by_inputs else Replicate())
        _distribute_factor(lora_b, linear.weight, Replicate() if by_inputs else Shard(0))
    # In place: the weight keeps its name, and there is no wrapper for FSDP and checkpoints to see.
    linear.__class__ = LoraLinear
    linear.lora_A, linear.lora_B, linear.scaling = lora_a, lora_b, adapter.alpha / adapter.rank


def _distribute_factor(factor: nn.Linear, matrix: DTensor, placement: Placement) -> None:
    weight = distribute_tensor(factor.weight.data, matrix.device_mesh, [placement], src_data_rank=None)
    factor.weight = nn.Parameter(weight)


C_COMPILERS = ("cc", "gcc", "clang")  # C compilers that torch and Triton call


def compile_unsupported_reason(device: torch.device) -> str:
    """Return why torch.compile cannot be used on this device, or ""."""
    if device.type == "cuda" and not find_spec("triton"):
        return "torch.compile needs the package triton for GPUs, but it is not installed here"
    names = [os.environ["CC"]] if os.environ.get("CC") else C_COMPILERS
    if any(map(shutil.which, names)):
        return ""
    return f"torch.compile needs a C compiler, but there is no {' or '.join(names)} here"


def compile_layers(model: nn.Module) -> None:
    """Compile the forward of decoder layers. Call after sharding, and before activation checkpointing.

    FSDP's hooks and checkpointing stay outside the graph, which has neither name nor number of a layer: one graph serves all layers,
    and parameters keep their names.
    """
    # Cached by the class's function, so that all layers of a class share one compiled graph.
    compiled = functools.cache(functools.partial(torch.compile, fullgraph=True))
    for module in model.modules():
        if is_decoder_layer(module):
            module.forward = functools.partial(compiled(type(module).forward), module)


MIN_FP8_CAPABILITY = (8, 9)  # compute capability: Ada, Hopper, Blackwell
FP8_MULTIPLE = 16  # rows and columns must be multiples of it


def fp8_unsupported_reason(device: torch.device) -> str:
    """Return why FP8 cannot be used on a device, or "". A CPU emulates it."""
    if not importlib.util.find_spec("torchao"):
        return "the package torchao is not installed; run `pip install torchao` on the hosts"
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_FP8_CAPABILITY:
        minimum, actual = (".".join(map(str, version)) for version in (MIN_FP8_CAPABILITY, capability))
        return f"it needs a compute capability of {minimum}, but {torch.cuda.get_device_name(device)} has {actual}; use newer GPUs"
    return ""


def convert_to_fp8(model: nn.Module, device: torch.device, tp: int = 1) -> int:
    """Convert the linear layers of decoder layers to FP8; return how many were converted. ``tp``: ranks that will split each."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config, converted_names = Float8LinearConfig(emulate=device.type == "cpu"), []

    def is_convertible(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        is_multiple = module.in_features % (tp * FP8_MULTIPLE) == module.out_features % (tp * FP8_MULTIPLE) == 0
        converted_names.extend([name] * is_multiple)
        return is_multiple

    for layer in model.modules():
        if is_decoder_layer(layer):
            convert_to_float8_training(layer, module_filter_fn=is_convertible, config=config)
    return len(converted_names)
