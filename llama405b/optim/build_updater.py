"""Who updates the weights once the gradients are there: AdamW at once, or unit by unit on the CPU."""

import torch
from torch import nn

from llama405b.contract.schema import Optimizer, Parallel
from llama405b.distributed.host_memory import Progress
from llama405b.optim.adamw import build_optimizer
from llama405b.optim.offload_all import OffloadedAll, Waits
from llama405b.optim.offload_optimizer import OffloadedOptimizer
from llama405b.optim.sequential import Sequential
from llama405b.optim.updater import Updater


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
        updater = OffloadedOptimizer(
            model, kept, optimizer, device, waits, pinning=pinning, hides=hides, moments=moments
        )
    elif parallel.updates_by_unit:
        updater = OffloadedAll(model, kept, optimizer, device, waits, hides=hides, moments=moments)
    else:
        updater = Sequential(model, kept, optimizer, reuses_gradients=parallel.reuses_gradients)
    updater.publish()
    return updater
