"""FP32 masters of a sharded model's weights: the same names, the same shards, and no forward."""

import torch
from torch import nn

from llama405b.contract.schema import Parallel
from llama405b.parallel.fsdp2 import WRAPPER


def kept_weights(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the module whose parameters are the weights as they are kept: ``model``, or FP32 masters on the meta device.

    ``model``: sharded by FSDP2, and not yet wrapped for activation checkpointing.
    """
    if parallel.offload != "states":
        return model
    kept = nn.Module()
    kept.config = model.config
    for name, parameter in model.named_parameters(remove_duplicate=False):
        *path, last = name.replace(WRAPPER, "").split(".")
        owner = kept
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.register_parameter(last, nn.Parameter(torch.empty_like(parameter, dtype=torch.float32)))
    return kept
