"""Activation checkpointing: what a decoder layer computes again in the backward, instead of keeping it.

Knows decoder layers and torch's wrappers; nothing of sharding, which comes before it.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from llama405b.contract.recompute import FULL, Kind, Recompute
from llama405b.model.llama import is_decoder_layer

PREFIXES = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # of parameter names: this wrapper's, and FSDP1's
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default)


def checkpoint_activations(model: nn.Module, recompute: Recompute = FULL) -> None:
    """Have decoder layers compute activations again in the backward. Call AFTER sharding, or FSDP's units double."""
    for parent in list(model.modules()):
        layers = [(name, each) for name, each in parent.named_children() if is_decoder_layer(each)]
        for (name, layer), kind in zip(layers, recompute.of(len(layers)), strict=True):
            setattr(parent, name, wrapped(layer, kind))


def wrapped(layer: nn.Module, kind: Kind) -> nn.Module:
    """Return a layer that computes again what its kind says."""
    if kind == "none":
        return layer
    more: dict[str, Any] = {}
    if kind == "operators":
        n_products = sum(isinstance(module, nn.Linear) for module in layer.modules())
        more["context_fn"] = functools.partial(_contexts, n_products)
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **more)


def _contexts(n_products: int) -> Any:
    """Return torch's contexts of a layer's forward and of its recomputation."""
    return create_selective_checkpoint_contexts(_Keeps(n_products))


def unwrapped(name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


class _Keeps:
    """Which operators' results one forward of a layer keeps: attention's, and those of all products but the last.

    No backward needs what the last one makes, and its recomputation ends before (early stop).
    """

    def __init__(self, n_products: int) -> None:
        self.n_products = n_products
        self.seen = {False: 0, True: 0}  # products: of the forward, and of the recomputation

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Say whether an operator's results are kept."""
        if op in PRODUCTS:
            self.seen[context.is_recompute] += 1
            keeps = self.seen[context.is_recompute] < self.n_products
        else:
            keeps = "attn" in str(op) or "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
