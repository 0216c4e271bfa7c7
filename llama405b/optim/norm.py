"""The global gradient norm, and clipping by it. Knows tensors and the ranks' sum; not modules."""

import math
from collections.abc import Iterable, Sequence

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


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    """Return the sum of all squared elements, correctly rounded from FP64: the tensors' order makes no difference."""
    sums = []
    for tensor in tensors:
        flat = tensor.flatten()
        whole = flat.numel() // ROW * ROW
        for part in (*flat[:whole].view(-1, ROW).split(ROWS), flat[whole:].view(1, -1)):  # converting BF16 copies
            if part.numel():
                rows = torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double()
                sums.append(torch.dot(rows, rows))
    return math.fsum(torch.stack(sums).tolist()) if sums else 0.0


def norm_over_ranks(gradients: Sequence[Tensor]) -> float:
    """Return the L2 norm of all ranks' gradients, of which each has its own part."""
    own = torch.tensor(sum_of_squares(gradients), dtype=torch.float64, device=gradients[0].device)
    return math.sqrt(float(all_reduce_sum(own)))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips to ``max_norm`` (0: no clipping), as ``torch.nn.utils.clip_grad_norm_`` does."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply in place, unless that would change nothing."""
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
