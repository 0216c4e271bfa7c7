"""Who updates the weights once the gradients are there: AdamW at once, or unit by unit on the CPU."""

import torch
from torch import nn

from llama405b.contract.schema import Optimizer, Parallel
from llama405b.distributed.host_memory import Progress
from llama405b.optim.adamw import build_optimizer
from llama405b.optim.offload_all import OffloadedAll, OnLongWait
from llama405b.optim.offload_optimizer import OffloadedOptimizer
from llama405b.optim.sequential import Sequential
from llama405b.optim.updater import Updater


def build_updater(
    model: nn.Module,
    config: Optimizer,
    parallel: Parallel,
    device: torch.device,
    on_long_wait: OnLongWait = lambda _: None,
    master: nn.Module | None = None,
    pinning: Progress = lambda *_: None,
) -> Updater:
    """Build fused AdamW, hidden under the forward where ``parallel`` says so, and give the model its weights.

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
