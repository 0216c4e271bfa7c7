"""FP32 masters of a sharded model's weights: the same names, the same shards, and no forward."""

from collections.abc import Iterator

import torch
from torch import nn

from llama405b.contract.schema import Parallel
from llama405b.model.checkpointing import unwrapped


def master_model(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the module whose parameters are the weights as they are kept: ``model``, or FP32 masters on the meta device.

    In pure BF16 only norms have masters, beside the model's other parameters: their weights are about 1, where BF16 would lose
    every update at usual learning rates. ``model``: sharded by FSDP2, and not yet wrapped for activation checkpointing.
    """
    if parallel.offload != "optimizer" and not parallel.in_bf16:
        return model
    master = nn.Module()
    master.config = model.config
    for name, parameter in model.named_parameters(remove_duplicate=False):
        *path, last = unwrapped(name).split(".")
        owner = master
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if parallel.offload == "optimizer" or (is_norm(name) and parameter.requires_grad):
            parameter = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32), parameter.requires_grad)
        owner.register_parameter(last, parameter)
    return master


def is_norm(name: str) -> bool:
    """Whether a parameter is a norm's, by its name: FSDP1 leaves flat pieces, so the number of dimensions does not help."""
    return "norm" in name


def master_pairs(model: nn.Module, master: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield each weight of the model that has a master, with it."""
    of = {unwrapped(name): master for name, master in master.named_parameters()}
    for name, weight in model.named_parameters():
        if (master := of[unwrapped(name)]) is not weight:
            yield weight, master
