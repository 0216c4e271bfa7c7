"""Who updates the weights once the gradients are there: AdamW at once, or unit by unit on the CPU."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from llama405b.contract.schema import Optimizer, Parallel
from llama405b.copies import Progress
from llama405b.optim.adamw import build_optimizer, nothing_to_keep, state_tensors
from llama405b.optim.norm import clip_factor, local, norm_over_ranks, scale
from llama405b.optim.offloaded import Offloaded, Waits
from llama405b.optim.states import States
from llama405b.parallel.masters import masters_of
from llama405b.step import Keeps, Unit, Updater, UpdateWork


def build_updater(
    model: nn.Module,
    config: Optimizer,
    parallel: Parallel,
    device: torch.device,
    waits: Waits = lambda _: None,
    kept: nn.Module | None = None,
    pinning: Progress = lambda *_: None,
) -> Updater:
    """Build fused AdamW, hidden under the forward where ``parallel`` says so, and give the model its weights.

    ``kept``: see ``kept_weights``; None: the model. ``waits`` hears of long waits for an update, ``pinning`` how much
    memory has been pinned.

    Raises:
        UserError: CUDA cannot pin as much memory as this needs.
    """
    kept = kept or model
    optimizer = build_optimizer(kept, config)
    hides, moments = parallel.overlap, parallel.moments
    updater: Updater
    if parallel.offload == "states":
        updater = States(model, kept, optimizer, device, waits, pinning=pinning, hides=hides, moments=moments)
    elif parallel.updates_by_unit:
        updater = Offloaded(model, kept, optimizer, device, waits, hides=hides, moments=moments)
    else:
        updater = Sequential(model, kept, optimizer, reuses_gradients=parallel.reuses_gradients)
    updater.publish()
    return updater


class Sequential:
    """``torch.optim.AdamW`` between the backward and the next forward."""

    def __init__(
        self, model: nn.Module, kept: nn.Module, optimizer: torch.optim.AdamW, *, reuses_gradients: bool = False
    ) -> None:
        """``kept``: see ``kept_weights``."""
        self.model, self.kept, self.optimizer, self.reuses_gradients = model, kept, optimizer, reuses_gradients
        self.before_update: Keeps = nothing_to_keep
        self.masters = list(masters_of(model, kept))

    def collect(self) -> None:
        """Gradients add up where they are."""

    def clip(self, max_norm: float) -> float:
        """See ``Updater``."""
        if isinstance(self.model, FullyShardedDataParallel):  # its gradients are pieces of flat ones
            return float(self.model.clip_grad_norm_(max_norm or torch.inf))
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = norm_over_ranks(gradients)
        scale(gradients, clip_factor(norm, max_norm))
        return norm

    def update(self) -> None:
        """See ``Updater``."""
        for unit in self.units():
            self.before_update(unit.tensors)
        for weight, master in self.masters:
            assert weight.grad is not None
            master.grad = weight.grad.to(master.dtype)
        self.optimizer.step()
        self.publish()
        self.zero()

    def zero(self) -> None:
        """See ``Updater``."""
        self.optimizer.zero_grad(set_to_none=not self.reuses_gradients)
        for weight, _ in self.masters:
            weight.grad = None

    def units(self) -> list[Unit]:
        """See ``Updater``."""
        return [Unit(state_tensors(self.optimizer, [parameter])) for parameter in self.kept.parameters()]

    def drain(self) -> None:
        """Nothing is ever pending."""

    @torch.no_grad()
    def publish(self) -> None:
        """See ``Updater``: the model computes with the weights as they are kept, but for those that have masters."""
        for weight, master in self.masters:
            local(weight).copy_(local(master))

    def work(self) -> UpdateWork | None:
        """It is part of the step's optimizer seconds."""
        return None
