"""One update of the weights. Knows tensors and collectives; not files, flags or clocks.

Shape suffixes: B sequences of a micro-batch, S positions, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama405b.contract.errors import RunError
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.model.batch import IGNORE_INDEX, Batch
from llama405b.model.inputs import model_inputs
from llama405b.optim.updater import Updater


class NonFiniteError(RunError):
    """The loss or gradient of a step is NaN or infinite; the weights are still those of the previous step."""


class SpikeError(RunError):
    """The loss of a step is far above the last ones', and the run is to stop then; the weights are still those of the previous step."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step."""

    loss: float  # nats per target token, over all ranks
    grad_norm: float  # L2, over all ranks, before clipping
    n_targets: int  # over all ranks
    updated: bool = True  # False: the loss was refused


def train_step(
    model: nn.Module,
    updater: Updater,
    microbatches: Sequence[Batch],
    *,
    max_norm: float,
    dp_size: int,
    refuses: Callable[[float], bool] = lambda _: False,
    lap: Callable[[str], None] = lambda _: None,
) -> StepResult | None:
    """Run the micro-batches, which are on the device, clip, and update the weights once.

    Returns None, on every rank, if no rank has a target: then nothing is computed, and the weights do not change.

    Every micro-batch's gradient is reduced and sharded immediately: accumulating whole gradients would not fit.
    ``refuses``: told the loss, alike on all ranks; if it says so, the weights do not change.
    ``lap`` is called with the name of each part as it ends: forward, backward, optimizer.

    Raises:
        NonFiniteError: On every rank, before the weights change.
    """
    n_local = torch.stack([(batch.targets_BS != IGNORE_INDEX).sum() for batch in microbatches]).sum()
    n_targets = int(all_reduce_sum(n_local))
    if n_targets == 0:
        return None
    nll = torch.zeros((), device=n_local.device)
    for left, batch in zip(reversed(range(len(microbatches))), microbatches, strict=True):
        updater.expect(last=left == 0)
        nll_micro = nll_of(model, batch)
        lap("forward")
        # FSDP averages over ranks; scaling by ranks / global count turns that average into the global mean.
        (nll_micro * (dp_size / n_targets)).backward()
        nll += nll_micro.detach()
        updater.accumulate()
        lap("backward")
    loss = float(all_reduce_sum(nll)) / n_targets
    norm = updater.clip(max_norm)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        updater.zero_grad()
        raise NonFiniteError(f"loss {loss:.4g}, gradient norm {norm:.4g}")
    if refuses(loss):
        updater.zero_grad()
        return StepResult(loss, norm, n_targets, updated=False)
    updater.update()
    lap("optimizer")
    return StepResult(loss, norm, n_targets)


def nll_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the negative log-likelihood of a micro-batch's targets, summed, in nats."""
    logits_BSV = model(**model_inputs(batch, model.config._attn_implementation), use_cache=False).logits
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), batch.targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
