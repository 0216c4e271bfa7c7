"""Lion: the sign of an average of gradients is the update (arXiv 2302.06675, algorithm 2).

Shape suffix: C elements of a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llama405b.optim.updater import GroupParams

CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 24  # elements at a time, which bounds what is made beside them


def update_lion(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    params: GroupParams,
) -> None:
    """Update tensors in place, and count their steps; see ``UpdateRule``.

    Each operation rounds once and treats elements alone, so the result does not depend on how tensors are split.
    """
    [averages] = moments
    beta1, beta2 = params["betas"]
    for weight, gradient, average in zip(weights, gradients, averages, strict=True):
        chunk = GPU_CHUNK if weight.is_cuda else CPU_CHUNK
        for w_C, g_C, m_C in zip(*(t.view(-1).split(chunk) for t in (weight, gradient, average)), strict=True):
            w, g, m = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (w_C, g_C, m_C))
            sign = m.mul(beta1).add_(g.mul(1 - beta1)).sign_()
            w.mul_(1 - params["lr"] * params["weight_decay"]).sub_(sign.mul_(params["lr"]))
            m.mul_(beta2).add_(g.mul(1 - beta2))
            for stored, computed in ((w_C, w), (m_C, m)):
                if computed is not stored:
                    stored.copy_(computed)
    torch._foreach_add_(list(steps), 1)
