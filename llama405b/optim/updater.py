"""What a step asks of whoever updates the weights, and the gradients' norm.

What a step asks of whoever updates the weights, and what a checkpoint asks of the state that is updated.

The global gradient norm, and clipping by it. Knows tensors and the ranks' sum; not modules.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b.distributed.collectives import all_reduce_sum


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


ROWS, ROW = (
    1024,
    4096,
)  # at a time, and elements of each that are summed in FP32, before FP64: torch's own norm is 0.4 % low for 53M elements on a CPU


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def squares(tensors: Iterable[Tensor]) -> list[float]:
    """Return the sum of squared elements of each tensor, in FP64; waits for the device once, after few kernels.

    Where tensors are joined, or cut, does not change what ``math.fsum`` makes of all of them, but for rounding in FP64.
    """
    rows = [norms for tensor in tensors for norms in _row_norms(tensor.flatten())]
    return torch.stack(torch._foreach_norm(rows, 2, torch.float64)).square_().tolist() if rows else []


def _row_norms(flat: Tensor) -> Iterator[Tensor]:
    """Yield the norms of rows, and of what is left, in FP32, or more if the elements are."""
    wide = torch.promote_types(flat.dtype, torch.float32)
    whole = flat.numel() // ROW * ROW
    if whole:
        rows = flat[:whole].view(-1, ROW)
        parts = rows.split(ROWS if flat.device.type == "cpu" else len(rows))  # converting BF16 copies on a CPU
        yield torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=wide) for part in parts])
    if flat.numel() > whole:
        yield torch.linalg.vector_norm(flat[whole:], dtype=wide).view(1)


def is_counted(tensor: Tensor) -> bool:
    """Return whether this rank counts its part of a tensor: of those that have the same part, the first one does."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())


def norm_over_ranks(squares: Iterable[float], device: torch.device) -> float:
    """Return the L2 norm of all ranks' gradients, of which each has its own part; in whatever order."""
    own = torch.full((), math.fsum(squares), dtype=torch.float64, device=device)
    return math.sqrt(float(all_reduce_sum(own)))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips to ``max_norm`` (0: no clipping), as ``torch.nn.utils.clip_grad_norm_`` does."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply in place, unless that would change nothing, as where all parameters of a stage are frozen."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)
