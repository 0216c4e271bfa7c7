"""One update of the weights. Knows tensors and collectives; not files, flags or clocks.

Shape suffixes: B sequences of a micro-batch, S positions, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from llama405b.contract.errors import RunError
from llama405b.ranks import sum_over_ranks

IGNORE_INDEX = -100  # a target that does not count: padding, or a prompt


class NonFiniteError(RunError):
    """The loss or gradient of a step is NaN or infinite; the weights are still those of the previous step."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step."""

    loss: float  # nats per target token, over all ranks
    grad_norm: float  # L2, over all ranks, before clipping
    n_targets: int  # over all ranks


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    *,
    max_norm: float,
    dp_size: int,
    set_to_none: bool = True,
    lap: Callable[[str], None] = lambda _: None,
) -> StepResult | None:
    """Run the micro-batches (``tokens_BS``, ``targets_BS``, on the device), clip, and update the weights once.

    Returns None, on every rank, if no rank has a target: then nothing is computed, and the weights do not change.

    Every micro-batch's gradient is reduced and sharded immediately: accumulating whole gradients would not fit.
    ``lap`` is called with the name of each part as it ends: forward, backward, optimizer.

    Raises:
        NonFiniteError: On every rank, before the weights change.
    """
    n_local = torch.stack([(y_BS != IGNORE_INDEX).sum() for _, y_BS in microbatches]).sum()
    n_targets = int(sum_over_ranks(n_local))
    if n_targets == 0:
        return None
    nll = torch.zeros((), device=n_local.device)
    for x_BS, y_BS in microbatches:
        nll_micro = _nll(model(input_ids=x_BS, use_cache=False).logits, y_BS)
        lap("forward")
        # FSDP averages over ranks; scaling by ranks / global count turns that average into the global mean.
        (nll_micro * (dp_size / n_targets)).backward()
        nll += nll_micro.detach()
        lap("backward")
    loss = float(sum_over_ranks(nll)) / n_targets
    norm = _clip(model, max_norm or math.inf)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        optimizer.zero_grad(set_to_none=set_to_none)
        raise NonFiniteError(f"loss {loss:.4g}, gradient norm {norm:.4g}")
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    lap("optimizer")
    return StepResult(loss, norm, n_targets)


def _clip(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their global L2 norm is at most ``max_norm``; returns the norm before."""
    if isinstance(model, FullyShardedDataParallel):  # its gradients are plain tensors, of this rank's shard alone
        return float(model.clip_grad_norm_(max_norm))
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _nll(logits_BSV: Tensor, y_BS: Tensor) -> Tensor:
    """Summed negative log-likelihood, in nats."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), y_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
