"""The interface between a step, a checkpoint and the updater of the weights; the global gradient norm and clipping.

Knows tensors and sums over ranks; not how weights are updated.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b.distributed.collectives import all_reduce_sum


@dataclasses.dataclass(slots=True)
class UpdateWork:
    """Time and bytes of updates on the CPU since the last call."""

    update_s: float = 0.0  # the updates themselves
    exposed_s: float = 0.0  # the part that training waited for, including the norm
    update_bytes: int = 0  # read from and written to CPU memory by the updates
    down_bytes: int = 0  # gradients copied to CPU memory
    up_bytes: int = 0  # weights copied from CPU memory; with a GPU both cross PCIe

    def __sub__(self, other: "UpdateWork") -> "UpdateWork":
        return UpdateWork(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))


State = dict[str, Tensor]  # of one parameter: moments, by name, and the count of its updates ("step")
GroupParams = Mapping[str, Any]  # of a parameter group in one step: lr, weight_decay, and what its optimizer reads
# (weights, gradients, moments by kind, step counts, params): updates local tensors in place, each element by itself, and counts.
# Tensors may have any floating dtype; all weights that are passed together have one, and so have all moments.
UpdateRule = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Sequence[Tensor]], Sequence[Tensor], GroupParams], None
]
BeforeUpdate = Callable[[Sequence[Tensor]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateUnit:
    """State that is updated together."""

    tensors: Sequence[Tensor]  # of this rank: stored weights, moments and step counts
    last_update: "Future[None] | None" = None  # the pending update, or the last one


class Updater(Protocol):
    """Clips the gradients and updates the weights, immediately or during the next forward."""

    master: nn.Module  # its parameters are the stored weights: the model itself, or FP32 masters
    optimizer: torch.optim.Optimizer  # of the master's parameters
    # Called with tensors before they change; may block. Updates already queued keep their earlier callback.
    before_update: BeforeUpdate

    def units(self) -> list[UpdateUnit]:
        """Return the state that updates change, in update order."""

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Announce a micro-batch before its forward; the argument says whether it is the last of the step."""

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to those of the previous micro-batches."""

    def clip(self, max_norm: float) -> float:
        """Clip the global L2 norm of the gradients to ``max_norm`` (0: no clipping); return the norm before clipping."""

    def update(self) -> None:
        """Update every weight once, in any order and thread; the next forward always sees updated weights."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def wait(self) -> None:
        """Wait until all updates are finished; the exception of a failed update is raised here, if not earlier.

        Weights and moments may be read or replaced only after this.
        """

    def sync_weights(self) -> None:
        """Copy the stored weights to the model after they were replaced."""

    def work(self) -> UpdateWork | None:
        """Return the cost of updates since the last call; None if updates do not run unit by unit on the CPU."""


ROWS_AT_A_TIME, ROW_ELEMENTS = (
    1024,
    4096,
)  # a row is summed in FP32, rows are added in FP64: torch's own norm is 0.4 % too low for 53M elements on a CPU


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the local tensors of parameters: weights, moments and step counts."""
    return [local_tensor(tensor) for p in parameters for tensor in (p.detach(), *optimizer.state.get(p, {}).values())]


def square_sums(tensors: Iterable[Tensor]) -> list[float]:
    """Return sums of squares in FP64, one for each row of each tensor; wait for the device only once.

    How tensors are joined or split does not change the ``math.fsum`` of the result, except for rounding in FP64.
    """
    rows = [norms for tensor in tensors for norms in _row_norms(tensor.flatten())]
    return torch.stack(torch._foreach_norm(rows, 2, torch.float64)).square_().tolist() if rows else []


def _row_norms(flat: Tensor) -> Iterator[Tensor]:
    """Yield the norms of full rows and of the remainder, in FP32 or a wider dtype of the elements."""
    dtype = torch.promote_types(flat.dtype, torch.float32)
    n_in_full_rows = flat.numel() // ROW_ELEMENTS * ROW_ELEMENTS
    if n_in_full_rows:
        rows = flat[:n_in_full_rows].view(-1, ROW_ELEMENTS)
        parts = rows.split(
            ROWS_AT_A_TIME if flat.device.type == "cpu" else len(rows)
        )  # converting BF16 copies on a CPU
        yield torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in parts])
    if flat.numel() > n_in_full_rows:
        yield torch.linalg.vector_norm(flat[n_in_full_rows:], dtype=dtype).view(1)


def is_first_replica(tensor: Tensor) -> bool:
    """Return whether this rank is the first of those that hold the same shard of a tensor, and so counts it in the norm."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return not any(
        index for index, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def norm_over_ranks(sums: Iterable[float], device: torch.device) -> float:
    """Return the global L2 norm from the sums of squares of each rank's shards, given in any order."""
    local_sum = torch.full((), math.fsum(sums), dtype=torch.float64, device=device)
    return math.sqrt(float(all_reduce_sum(local_sum)))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips to ``max_norm`` (0: no clipping), as ``torch.nn.utils.clip_grad_norm_`` does."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place; skip this if the factor is 1 or there are none (all parameters of a stage are frozen)."""
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)
