"""The global gradient norm, and clipping by it. Knows tensors and the ranks' sum; not modules."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llama405b.distributed.collectives import all_reduce_sum

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
