"""Muon: the update of a matrix is its momentum, made orthogonal (https://kellerjordan.github.io/posts/muon/), by torch's own optimizer.

Momentum is kept in shards. Of each run of matrices of one shape, every rank collects one whole, iterates it, and hands back each rank's
rows: nothing is iterated twice, and each row crosses the network twice, in BF16. The learning rate of a matrix is adjusted so that updates
are as large as AdamW's (arXiv 2502.16982), so learning rate and weight decay are those of AdamW.

Shape suffixes: n ranks, R rows of a rank's shard with padding, C columns.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from llama405b.optim.updater import GroupParams, State, local_tensor

UPDATE_RMS = 0.2  # of an update, in learning rates
ITERATED = torch.bfloat16  # the dtype in which torch iterates, and so the one to send


def update_muon(
    parameters: Sequence[nn.Parameter], states: Sequence[State], gradients: Sequence[Tensor], params: GroupParams
) -> None:
    """Update matrices in place, and count their steps. All ranks that shard them call it with the same matrices.

    Gradients are local. The update is torch's: momentum as an average, and Nesterov's look ahead.
    """
    momentum, lr = params["momentum"], params["lr"]
    for batch in _batches(parameters):
        local = [(parameters[i], local_tensor(states[i]["momentum_buffer"]), gradients[i]) for i in batch]
        for _, average, gradient in local:
            average.lerp_(gradient.to(average.dtype), 1 - momentum)
        ahead = [gradient.to(average.dtype).lerp(average, momentum) for _, average, gradient in local]
        for (parameter, *_), direction in zip(local, orthogonalize([p for p, *_ in local], ahead), strict=True):
            stored = local_tensor(parameter)
            weight = stored.to(torch.promote_types(stored.dtype, torch.float32))  # BF16 would round the decay away
            weight.mul_(1 - lr * params["weight_decay"])
            weight.add_(direction, alpha=-lr * UPDATE_RMS * math.sqrt(max(parameter.shape)))
            if weight is not stored:
                stored.copy_(weight)
    torch._foreach_add_([state["step"] for state in states], 1)


def orthogonalize(parameters: Sequence[nn.Parameter], local: Sequence[Tensor]) -> list[Tensor]:
    """Return each rank's rows of the orthogonal forms of matrices of one shape, of which there are at most as many as shards.

    ``local``: this rank's rows of each matrix.
    """
    group = _shard_group(parameters[0])
    if group is None:
        return [_iterate(matrix) for matrix in local]
    n, (rows, columns) = dist.get_world_size(group), parameters[0].shape
    sent_nRC = local[0].new_zeros((n, -(-rows // n), columns), dtype=ITERATED)
    for part_RC, own in zip(sent_nRC, local, strict=False):
        part_RC[: len(own)] = own
    received_nRC = torch.empty_like(sent_nRC)
    dist.all_to_all_single(received_nRC, sent_nRC, group=group)
    if dist.get_rank(group) < len(local):
        received_nRC.flatten(0, 1)[:rows] = _iterate(received_nRC.flatten(0, 1)[:rows])
    dist.all_to_all_single(sent_nRC, received_nRC, group=group)
    return [part_RC[: len(own)] for part_RC, own in zip(sent_nRC, local, strict=False)]


def _iterate(matrix: Tensor) -> Tensor:
    """Return a whole matrix, made orthogonal: what torch's Muon subtracts from zeros at a learning rate of 1."""
    # Wide, so that torch adjusts the learning rate by nothing.
    is_tall = matrix.size(0) > matrix.size(1)
    zeros = nn.Parameter(torch.zeros_like(matrix.T if is_tall else matrix, dtype=ITERATED))
    zeros.grad = (matrix.T if is_tall else matrix).to(ITERATED)
    torch.optim.Muon([zeros], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -zeros.detach().T if is_tall else -zeros.detach()


def _batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Yield the indices of matrices that are updated together: of one shape, at most as many as there are shards."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, parameter in enumerate(parameters):
        by_shape.setdefault(parameter.shape, []).append(i)
    for indices in by_shape.values():
        group = _shard_group(parameters[indices[0]])
        n_ranks = dist.get_world_size(group) if group else 1
        yield from (indices[begin : begin + n_ranks] for begin in range(0, len(indices), n_ranks))


def _shard_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the ranks that share a parameter's rows; None: each has all of it."""
    if not isinstance(parameter, DTensor):
        return None
    axis = parameter.placements.index(Shard(0))
    return parameter.device_mesh.get_group(axis) if parameter.device_mesh.size(axis) > 1 else None
