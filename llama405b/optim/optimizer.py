"""Optimizers: parameter groups, learning-rate schedule, and FP32 master weights.

``RULES``, ``rounding.FORMULAS`` and ``settings.choices`` are all that differs between optimizers.
Master weights have the names and shards of the model, but no forward.

Knows parameters and step numbers; not files, flags or ranks.

Shape suffix: C elements of a chunk.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llama405b.model.llama import strip_wrappers
from llama405b.optim.adamw import update_adamw
from llama405b.optim.lion import update_lion
from llama405b.optim.muon import update_muon
from llama405b.optim.rounding import StochasticRounding
from llama405b.optim.updater import GroupParams, State, UpdateRule, local_tensor
from llama405b.settings.choices import OPTIMIZERS, OptimizerName, is_layer_matrix
from llama405b.settings.rules import ParameterGroup, find_group
from llama405b.settings.schema import Optimizer, Parallel


def master_model(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the module whose parameters are the stored weights: ``model``, or FP32 masters on the meta device.

    In pure BF16 only norms have masters; all other parameters are the model's own. Norm weights are near 1, where BF16 would lose
    every update at usual learning rates. ``model``: sharded by FSDP2 and not yet wrapped for activation checkpointing.
    """
    if parallel.offload != "optimizer" and not parallel.is_bf16:
        return model
    master = nn.Module()
    master.config = model.config
    for name, parameter in model.named_parameters(remove_duplicate=False):
        *path, leaf = strip_wrappers(name).split(".")
        owner = master
        for child in path:
            if not hasattr(owner, child):
                owner.add_module(child, nn.Module())
            owner = owner.get_submodule(child)
        if parallel.offload == "optimizer" or (is_norm(name) and parameter.requires_grad):
            parameter = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32), parameter.requires_grad)
        owner.register_parameter(leaf, parameter)
    return master


def is_norm(name: str) -> bool:
    """Return whether a parameter belongs to a norm, by its name: FSDP1 flattens parameters, so their dimensions do not tell."""
    return "norm" in name


def master_pairs(model: nn.Module, master: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield ``(weight, master)`` for each weight of the model that has a master."""
    masters = {strip_wrappers(name): master for name, master in master.named_parameters()}
    for name, weight in model.named_parameters():
        if (master := masters[strip_wrappers(name)]) is not weight:
            yield weight, master


CHUNK = 1 << 20  # elements converted to FP32 at a time; a multiple of 16, or the last bits differ
DEFAULT_GROUP = ParameterGroup("")  # for parameters that no configured group matches
RULES: dict[OptimizerName, UpdateRule] = {"adamw": update_adamw, "lion": update_lion}  # of elementwise optimizers


class OtherOptimizer(torch.optim.Optimizer):
    """Groups and states of an optimizer that torch does not have, or has for whole matrices; ``update_group`` updates."""

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch names it
        """Create the states, as ``torch.optim.AdamW`` does with zero gradients; a checkpoint asks for it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                init_moments(self, parameter, parameter.dtype)


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer over the shards (on the CPU if offloaded): torch's fused AdamW, or the groups of another.

    Weight decay applies to matrices and not to vectors, unless a configured group says otherwise.
    """
    custom_groups = [ParameterGroup.parse(text) for text in config.groups]
    spec = OPTIMIZERS[config.kind]
    members: dict[tuple[float, float, bool, OptimizerName], list[nn.Parameter]] = {  # also where all is frozen
        (config.weight_decay, 1.0, False, config.kind): [],
        (0.0, 1.0, True, spec.rest or config.kind): [],
    }
    for name, parameter in trainable_parameters(model).items():
        is_vector = is_norm(name) or name.endswith(".bias")
        group = find_group(custom_groups, strip_wrappers(name)) or DEFAULT_GROUP
        decay = config.weight_decay * (not is_vector) if group.weight_decay is None else group.weight_decay
        updated_by = config.kind
        if spec.rest and not is_layer_matrix(strip_wrappers(name), parameter.dim()):
            updated_by = spec.rest
        members.setdefault((decay, group.lr_factor, is_vector, updated_by), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay, "lr": config.lr * factor, "lr_factor": factor}
        | ({} if config.kind == "adamw" else {"optimizer": updated_by})
        for (decay, factor, _, updated_by), parameters in members.items()
    ]
    if config.kind == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    own = {name: getattr(config, name) for name in spec.settings}
    return OtherOptimizer(groups, {"lr": config.lr, "weight_decay": config.weight_decay} | own)


def optimizer_name(group: Mapping[str, Any]) -> OptimizerName:
    """Return what updates a parameter group."""
    name: OptimizerName = group.get("optimizer", "adamw")
    return name


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def lr_at(step: int, total_steps: int, config: Optimizer) -> float:
    """Return the learning rate of a step, counted from 1.

    Warmup is linear from 0; then ``min_lr + (lr - min_lr) * f``, where f falls from 1 to 0 at ``total_steps`` as the
    half cosine of Loshchilov & Hutter (arXiv 1608.03983) or a line, or stays 1. With wsd, f stays 1 until the decay
    steps at the end; there it is 1 minus the square root of the fraction of decay steps taken (arXiv 2405.18392).
    """
    warmup_steps = config.warmup_steps(total_steps)
    if step <= warmup_steps:
        return config.lr * step / warmup_steps
    decay_steps = total_steps - warmup_steps
    if config.decay == "wsd":
        decay_steps = min(decay_steps, config.decay_steps or math.ceil(total_steps / 10))
    decay_progress = min(1.0, max(0.0, (step - (total_steps - decay_steps)) / max(1, decay_steps)))
    factor = {
        "cosine": 0.5 * (1 + math.cos(math.pi * decay_progress)),
        "linear": 1 - decay_progress,
        "constant": 1.0,
        "wsd": 1 - math.sqrt(decay_progress),
    }[config.decay]
    return config.min_lr + (config.lr - config.min_lr) * factor


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate for the next update: ``lr`` times the factor of each group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def group_params(optimizer: torch.optim.Optimizer) -> list[GroupParams]:
    """Return a copy of each group's hyperparameters: the optimizer's own may change before the update runs."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def ignore_update(_: Sequence[Tensor]) -> None:
    """Do nothing before tensors change (the default of ``Updater.before_update``)."""


def init_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Create zero moments for a parameter, as an optimizer does in its first step."""
    [group] = [group for group in optimizer.param_groups if any(member is parameter for member in group["params"])]
    moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in OPTIMIZERS[optimizer_name(group)].moments}
    optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)} | moments


def update_group(
    parameters: Sequence[nn.Parameter],
    states: Sequence[State],
    gradients: Sequence[Tensor],
    params: GroupParams,
    rounding: StochasticRounding | None = None,
) -> None:
    """Update the local tensors of parameters of one group, bypassing DTensor's dispatch.

    Gradients are converted to the dtype of the weights. Moments of another dtype than the weights are converted to FP32 and back, chunk
    by chunk, as a fused kernel takes a single dtype.
    ``rounding``: updates the parameters that are rounded stochastically.
    """
    name = optimizer_name(params)
    if not parameters:
        return
    if name not in RULES:
        update_muon(parameters, states, gradients, params)
        return
    if rounding:
        triples = [*zip(parameters, states, gradients, strict=True)]
        rounded = [triple for triple in triples if id(triple[0]) in rounding.elements]
        for parameter, state, gradient in (triple for triple in triples if id(triple[0]) not in rounding.elements):
            update_group([parameter], [state], [gradient], params)
        if rounded:
            rounding.update(
                [parameter for parameter, _, _ in rounded],
                [state for _, state, _ in rounded],
                [g for _, _, g in rounded],
                params,
            )
        return
    weights = [local_tensor(parameter) for parameter in parameters]
    gradients = [gradient.to(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)]
    moments = [[local_tensor(state[moment]) for state in states] for moment in OPTIMIZERS[name].moments]
    steps = [state["step"] for state in states]
    if moments[0][0].dtype == weights[0].dtype:
        RULES[name](weights, gradients, moments, steps, params)
        return
    for weight, gradient, step, *own_moments in zip(weights, gradients, steps, *moments, strict=True):
        chunks = [tensor.view(-1).split(CHUNK) for tensor in (weight, gradient, *own_moments)]
        for w_C, g_C, *moments_C in zip(*chunks, strict=True):
            wide_C = [moment_C.float() for moment_C in moments_C]
            # On a copy: the kernel increments the step, once per chunk.
            RULES[name]([w_C], [g_C], [[moment_C] for moment_C in wide_C], [step.clone()], params)
            for stored_C, computed_C in zip(moments_C, wide_C, strict=True):
                stored_C.copy_(computed_C)
        step += 1
