"""AdamW and its learning-rate schedule. Knows parameters and step numbers; not files, flags or ranks."""

import math

import torch
from torch import nn

from llama405b.contract.schema import Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """Build fused AdamW over the shards, on the CPU if they are offloaded. Matrices decay, vectors (norms) do not."""
    # By name: FSDP1 leaves flat pieces, so the number of dimensions does not help.
    named = dict(model.named_parameters())
    vectors = {name: p for name, p in named.items() if "norm" in name or name.endswith(".bias")}
    matrices = [p for name, p in named.items() if name not in vectors]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": list(vectors.values()), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def lr_at(step: int, total_steps: int, config: Optimizer) -> float:
    """Return the learning rate of a step, counted from 1.

    Warmup is linear from 0; then ``min_lr + (lr - min_lr) * f``, where f falls from 1 to 0 at ``total_steps`` as the
    half cosine of Loshchilov & Hutter (arXiv 1608.03983) or a line, or stays 1.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, total_steps - config.warmup))
    factor = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[config.decay]
    return config.min_lr + (config.lr - config.min_lr) * factor


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, from the next update on."""
    for group in optimizer.param_groups:
        group["lr"] = lr
