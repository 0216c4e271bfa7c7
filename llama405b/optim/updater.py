"""What a step asks of whoever updates the weights, and what a checkpoint asks of the state that is updated."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclasses.dataclass(slots=True)
class UpdateWork:
    """What updates on the CPU took, since the last time this was asked."""

    update_s: float = 0.0  # the updates themselves
    exposed_s: float = 0.0  # of which training waited for, with the norm
    update_bytes: int = 0  # read from and written to CPU memory by the updates
    down_bytes: int = 0  # gradients that came to CPU memory
    up_bytes: int = 0  # weights that left it; on a GPU both cross PCIe

    def __sub__(self, other: "UpdateWork") -> "UpdateWork":
        return UpdateWork(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))


BeforeUpdate = Callable[[Sequence[Tensor]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """State that is updated in one piece."""

    tensors: Sequence[Tensor]  # this rank's: weights as they are kept, moments, and how often they were updated
    updated: "Future[None] | None" = None  # the update that is pending, or was the last


class Updater(Protocol):
    """Clips the gradients and updates the weights; at once, or while the next forward runs."""

    master: nn.Module  # its parameters are the weights as they are kept: the model, or FP32 masters of its weights
    optimizer: torch.optim.Optimizer  # of those
    # told what the next steps are about to change; may wait. Pending updates call the one before
    before_update: BeforeUpdate

    def units(self) -> list[Unit]:
        """Return the state that changes, in the order in which it is updated."""

    def expect(self, *, last: bool) -> None:
        """Tell, before a forward, whether the gradients of its micro-batch are the last of the step."""

    def accumulate(self) -> None:
        """Take the gradients of a micro-batch, to be added to those of the micro-batches before."""

    def clip(self, max_norm: float) -> float:
        """Clip their global L2 norm to ``max_norm`` (0: no clipping); returns the norm before, over all ranks."""

    def update(self) -> None:
        """Update every weight once, in whatever order and thread; a forward never sees a weight of the step before."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def wait(self) -> None:
        """Wait until every update has been made; an update that failed is raised here, or earlier.

        Weights and moments may be read, or replaced, only then.
        """

    def sync_weights(self) -> None:
        """Give the model the weights as they are kept, after these were replaced."""

    def work(self) -> UpdateWork | None:
        """Return what updates took since the last call; None if they are not made unit by unit on the CPU."""
