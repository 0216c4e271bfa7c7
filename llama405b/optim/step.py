"""One update of the weights. Knows tensors and collectives; not files, flags or clocks."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from llama405b.contract.errors import RunError, UserError, pluralize
from llama405b.data.batch import Batch
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.optim.updater import Updater
from llama405b.parallel.passes import ForwardBackward, OnPhaseEnd


class NonFiniteError(RunError):
    """The loss or gradient of a step is NaN or infinite; the weights are still those of the previous step."""


class SpikeError(RunError):
    """The loss of a step spiked and the settings say to stop; the weights are still those of the previous step."""


class NoGradientError(UserError):
    """A step with targets has a gradient of exactly 0; the weights are still those of the previous step."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step."""

    loss: float  # nats per term, usually a target token, over all ranks
    grad_norm: float  # L2, over all ranks, before clipping
    n_targets: int  # tokens, over all ranks
    updated: bool = True  # False: the step was skipped because of its loss


def train_step(
    forward_backward: ForwardBackward,
    updater: Updater,
    microbatches: Sequence[Batch],
    *,
    max_norm: float,
    refuses_loss: Callable[[float], bool] = lambda _: False,
    on_phase_end: OnPhaseEnd = lambda _: None,
) -> StepResult | None:
    """Run the micro-batches forward and backward, clip the gradient, and update the weights once.

    The micro-batches must be on the device. Returns None on every rank if no rank has a term of the loss; the weights then do not change.

    ``refuses_loss``: called with the loss, equal on all ranks; if it returns True, the weights do not change.
    ``on_phase_end`` is called with the name of each part when it ends: forward, backward, optimizer.

    Raises:
        NonFiniteError, NoGradientError: On every rank, before the weights change.
    """
    counts = all_reduce_sum(torch.stack([forward_backward.count(batch) for batch in microbatches]).sum(0))
    n_terms, n_targets = counts.tolist()
    if n_terms == 0:
        return None
    nll = forward_backward.train(microbatches, n_terms, updater, on_phase_end)
    loss = float(all_reduce_sum(nll)) / n_terms
    norm = updater.clip(max_norm)
    # Loss and norm are equal on all ranks, so all of them take the same branch below.
    if not (math.isfinite(norm) and math.isfinite(loss)):
        updater.zero_grad()
        raise NonFiniteError(f"loss {loss:.4g}, gradient norm {norm:.4g}")
    if norm == 0:
        updater.zero_grad()
        raise NoGradientError(
            f"--training: a step with {pluralize(int(n_targets), 'target')} and loss {loss:.4g} has a gradient of exactly 0: its loss "
            "depends on no weight that is trained; see loss() in --extend, and the model's code"
        )
    if refuses_loss(loss):
        updater.zero_grad()
        return StepResult(loss, norm, int(n_targets), updated=False)
    updater.update()
    on_phase_end("optimizer")
    return StepResult(loss, norm, int(n_targets))
