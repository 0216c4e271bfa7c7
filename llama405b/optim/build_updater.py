"""Pick the updater for a run's settings: fused AdamW on the device, or per-unit AdamW on the CPU.

The on-device updater is here. Knows settings and optimizers; not the step or the checkpoint.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from llama405b.distributed.host_memory import Progress
from llama405b.optim.adamw import (
    build_optimizer,
    group_settings,
    master_pairs,
    nothing_to_keep,
    numbered,
    start_moments,
    state_tensors,
    trained,
    update_adamw,
)
from llama405b.optim.offload import OffloadedAll, OffloadedOptimizer, OnLongWait
from llama405b.optim.updater import (
    BeforeUpdate,
    Unit,
    Updater,
    UpdateWork,
    clip_factor,
    is_counted,
    local,
    norm_over_ranks,
    scale,
    squares,
)
from llama405b.settings.schema import Numerics, Optimizer, Parallel


class Sequential:
    """Update all weights with ``torch.optim.AdamW`` between the backward and the next forward."""

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.AdamW,
        *,
        reuses_gradients: bool = False,
        numerics: Numerics = "fp32-master",
    ) -> None:
        """``master``: see ``master_model``."""
        self.model = model
        self.master = master
        self.optimizer = optimizer
        self.reuses_gradients = reuses_gradients
        self.before_update: BeforeUpdate = nothing_to_keep
        self.masters = list(master_pairs(model, master))
        self.numbered = numbered(master, numerics)
        for parameter in trained(master).values():
            start_moments(optimizer, parameter, parameter.dtype)

    def expect(self, *, last: bool) -> None:
        """Do nothing: gradients need no preparation."""

    def accumulate(self) -> None:
        """Do nothing: autograd adds gradients up in place."""

    def clip(self, max_norm: float) -> float:
        if isinstance(self.model, FullyShardedDataParallel):  # its gradients are slices of flat tensors
            return float(self.model.clip_grad_norm_(max_norm or torch.inf))
        gradients = [(p, local(p.grad)) for p in self.model.parameters() if p.grad is not None]
        counted = squares(gradient for p, gradient in gradients if is_counted(p))
        norm = norm_over_ranks(counted, local(next(self.model.parameters())).device)
        scale([gradient for _, gradient in gradients], clip_factor(norm, max_norm))
        return norm

    def update(self) -> None:
        for unit in self.units():
            self.before_update(unit.tensors)
        for weight, master in self.masters:
            if weight.requires_grad:
                assert weight.grad is not None
                master.grad = weight.grad.to(master.dtype)
        if self.numbered:
            self._update_rounding()
        else:
            self.optimizer.step()
        self.sync_weights()
        self.zero_grad()

    @torch.no_grad()
    def _update_rounding(self) -> None:
        """Update as ``torch.optim.AdamW`` does, with stochastic rounding to BF16."""
        for group, settings in zip(self.optimizer.param_groups, group_settings(self.optimizer), strict=True):
            gradients = [local(parameter.grad) for parameter in group["params"]]
            states = [self.optimizer.state[parameter] for parameter in group["params"]]
            update_adamw(group["params"], states, gradients, settings, self.numbered)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.reuses_gradients)
        for weight, _ in self.masters:
            weight.grad = None

    def units(self) -> list[Unit]:
        return [Unit(state_tensors(self.optimizer, [parameter])) for parameter in trained(self.master).values()]

    def wait(self) -> None:
        """Do nothing: no update is ever pending."""

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Copy the masters to the weights of the model that have one; all others are the stored weights themselves."""
        for weight, master in self.masters:
            local(weight).copy_(local(master))

    def work(self) -> UpdateWork | None:
        """Return None: the update is part of the step's optimizer time."""
        return None


def build_updater(
    model: nn.Module,
    config: Optimizer,
    parallel: Parallel,
    device: torch.device,
    on_long_wait: OnLongWait = lambda _: None,
    master: nn.Module | None = None,
    pinning: Progress = lambda *_: None,
) -> Updater:
    """Build the updater that ``parallel`` asks for, and give the model its weights.

    ``master``: see ``master_model``; None: the model. ``on_long_wait`` hears of long waits for an update, ``pinning`` how much
    memory has been pinned.

    Raises:
        UserError: CUDA cannot pin as much memory as this needs.
    """
    master = master or model
    optimizer = build_optimizer(master, config)
    overlap, moments, numerics = parallel.overlap, parallel.moments, parallel.numerics
    updater: Updater
    if parallel.offload == "optimizer":
        updater = OffloadedOptimizer(
            model, master, optimizer, device, on_long_wait, pinning=pinning, overlap=overlap, moments=moments
        )
    elif parallel.updates_by_unit:
        updater = OffloadedAll(
            model, master, optimizer, device, on_long_wait, overlap=overlap, moments=moments, numerics=numerics
        )
    else:
        updater = Sequential(model, master, optimizer, reuses_gradients=parallel.reuses_gradients, numerics=numerics)
    updater.sync_weights()
    return updater
