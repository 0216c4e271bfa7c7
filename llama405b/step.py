"""One update of the weights. Knows tensors and collectives; not files, flags or clocks.

Shape suffixes: B sequences of a micro-batch, S positions, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama405b.batch import IGNORE_INDEX, Batch
from llama405b.contract.errors import RunError
from llama405b.model.packed import model_inputs
from llama405b.ranks import sum_over_ranks


class NonFiniteError(RunError):
    """The loss or gradient of a step is NaN or infinite; the weights are still those of the previous step."""


class SpikeError(RunError):
    """The loss of a step is far above the last ones', and the run is to stop then; the weights are still those of the previous step."""


@dataclasses.dataclass(slots=True)
class UpdateWork:
    """What updates on the CPU took, since the last time this was asked."""

    update_s: float = 0.0  # the updates themselves
    exposed_s: float = 0.0  # of which training waited for, with the norm
    update_bytes: int = 0  # read from and written to CPU memory by the updates
    down_bytes: int = 0  # gradients that came to CPU memory
    up_bytes: int = 0  # weights that left it; on a GPU both cross PCIe

    def __sub__(self, other: "UpdateWork") -> "UpdateWork":
        return UpdateWork(
            self.update_s - other.update_s,
            self.exposed_s - other.exposed_s,
            self.update_bytes - other.update_bytes,
            self.down_bytes - other.down_bytes,
            self.up_bytes - other.up_bytes,
        )


Keeps = Callable[[Sequence[Tensor]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """State that is updated in one piece."""

    tensors: Sequence[Tensor]  # this rank's: weights as they are kept, moments, and how often they were updated
    updated: "Future[None] | None" = None  # the update that is pending, or was the last


class Updater(Protocol):
    """Clips the gradients and updates the weights; at once, or while the next forward runs."""

    kept: nn.Module  # its parameters are the weights as they are kept: the model, or FP32 masters of its weights
    optimizer: torch.optim.Optimizer  # of those
    before_update: Keeps  # told what the next steps are about to change; may wait. Pending updates call the one before

    def units(self) -> list[Unit]:
        """Return the state, in the order in which it is updated."""

    def collect(self) -> None:
        """Take the gradients of a micro-batch, to be added to those of the micro-batches before."""

    def clip(self, max_norm: float) -> float:
        """Clip their global L2 norm to ``max_norm`` (0: no clipping); returns the norm before, over all ranks."""

    def update(self) -> None:
        """Update every weight once, in whatever order and thread; a forward never sees a weight of the step before."""

    def zero(self) -> None:
        """Drop the gradients."""

    def drain(self) -> None:
        """Wait until every update has been made; an update that failed is raised here, or earlier.

        Weights and moments may be read, or replaced, only then.
        """

    def publish(self) -> None:
        """Give the model the weights as they are kept, after these were replaced."""

    def work(self) -> UpdateWork | None:
        """Return what updates took since the last call; None if they are not made unit by unit on the CPU."""


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
    n_targets = int(sum_over_ranks(n_local))
    if n_targets == 0:
        return None
    nll = torch.zeros((), device=n_local.device)
    for batch in microbatches:
        nll_micro = nll_of(model, batch)
        lap("forward")
        # FSDP averages over ranks; scaling by ranks / global count turns that average into the global mean.
        (nll_micro * (dp_size / n_targets)).backward()
        nll += nll_micro.detach()
        updater.collect()
        lap("backward")
    loss = float(sum_over_ranks(nll)) / n_targets
    norm = updater.clip(max_norm)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        updater.zero()
        raise NonFiniteError(f"loss {loss:.4g}, gradient norm {norm:.4g}")
    if refuses(loss):
        updater.zero()
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
