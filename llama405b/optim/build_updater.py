"""Pick the updater for a run's settings: all weights at once on the device, or unit by unit on the CPU.

The on-device updater is here. Knows settings and optimizers; not the step or the checkpoint.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from llama405b.distributed.host_memory import OnByteProgress
from llama405b.optim.offload import HostUpdater, OnLongWait, OptimizerOffload
from llama405b.optim.optimizer import (
    build_optimizer,
    group_params,
    ignore_update,
    init_moments,
    master_pairs,
    optimizer_name,
    trainable_parameters,
    update_group,
)
from llama405b.optim.rounding import StochasticRounding
from llama405b.optim.updater import (
    BeforeUpdate,
    Updater,
    UpdateUnit,
    UpdateWork,
    clip_factor,
    is_first_replica,
    local_tensor,
    norm_over_ranks,
    scale_gradients,
    square_sums,
    state_tensors,
)
from llama405b.settings.schema import Numerics, Optimizer, Parallel


class OnDeviceUpdate:
    """Update all weights between the backward and the next forward."""

    def __init__(
        self,
        model: nn.Module,
        master: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reuses_gradients: bool = False,
        numerics: Numerics = "fp32-master",
        has_moments: bool = True,
    ) -> None:
        """``master``: see ``master_model``; ``has_moments``: it will update, and not only clip."""
        self.model = model
        self.master = master
        self.optimizer = optimizer
        self.reuses_gradients = reuses_gradients
        self.before_update: BeforeUpdate = ignore_update
        self.masters = list(master_pairs(model, master))
        self.rounding = StochasticRounding.from_master(master, numerics, optimizer_name(optimizer.param_groups[0]))
        self.trainable = list(trainable_parameters(master).values())
        for parameter in self.trainable if has_moments else ():
            init_moments(optimizer, parameter, parameter.dtype)

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Do nothing: gradients need no preparation."""

    def accumulate(self) -> None:
        """Do nothing: autograd adds gradients up in place."""

    def clip(self, max_norm: float) -> float:
        if isinstance(self.model, FullyShardedDataParallel):  # its gradients are slices of flat tensors
            return float(self.model.clip_grad_norm_(max_norm or torch.inf))
        gradients = [(p, local_tensor(p.grad)) for p in self.model.parameters() if p.grad is not None]
        sums = square_sums(gradient for p, gradient in gradients if is_first_replica(p))
        norm = norm_over_ranks(sums, local_tensor(next(self.model.parameters())).device)
        scale_gradients([gradient for _, gradient in gradients], clip_factor(norm, max_norm))
        return norm

    def update(self) -> None:
        for unit in self.units():
            self.before_update(unit.tensors)
        for weight, master in self.masters:
            if weight.requires_grad:
                assert weight.grad is not None
                master.grad = weight.grad.to(master.dtype)
        self._update_groups()
        self.sync_weights()
        self.zero_grad()

    @torch.no_grad()
    def _update_groups(self) -> None:
        for group, params in zip(self.optimizer.param_groups, group_params(self.optimizer), strict=True):
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [local_tensor(parameter.grad) for parameter in parameters]
            states = [self.optimizer.state[parameter] for parameter in parameters]
            update_group(parameters, states, gradients, params, self.rounding)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.reuses_gradients)
        for weight, _ in self.masters:
            weight.grad = None

    def units(self) -> list[UpdateUnit]:
        return [UpdateUnit(state_tensors(self.optimizer, [parameter])) for parameter in self.trainable]

    def wait(self) -> None:
        """Do nothing: no update is ever pending."""

    @torch.no_grad()
    def sync_weights(self) -> None:
        """Copy the masters to the weights of the model that have one; all others are the stored weights themselves."""
        for weight, master in self.masters:
            local_tensor(weight).copy_(local_tensor(master))

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
    on_progress: OnByteProgress = lambda *_: None,
) -> Updater:
    """Build the updater that ``parallel`` asks for, and give the model its weights.

    ``master``: see ``master_model``; None: the model. ``on_long_wait`` hears of long waits for an update, ``on_progress`` how much
    memory has been pinned.

    Raises:
        UserError: CUDA cannot pin as much memory as this needs.
    """
    master = master or model
    optimizer = build_optimizer(master, config)
    overlap, moments, numerics = parallel.overlap, parallel.moments, parallel.numerics
    updater: Updater
    if parallel.offload == "optimizer":
        updater = OptimizerOffload(
            model, master, optimizer, device, on_long_wait, on_progress=on_progress, overlap=overlap, moments=moments
        )
    elif parallel.updates_by_unit:
        updater = HostUpdater(
            model, master, optimizer, device, on_long_wait, overlap=overlap, moments=moments, numerics=numerics
        )
    else:
        updater = OnDeviceUpdate(
            model, master, optimizer, reuses_gradients=parallel.reuses_gradients, numerics=numerics
        )
    updater.sync_weights()
    return updater
