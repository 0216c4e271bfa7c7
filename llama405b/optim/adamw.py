"""AdamW, torch's fused kernel (arXiv 1711.05101)."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adamw import adamw

from llama405b.optim.updater import GroupParams


def update_adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    params: GroupParams,
) -> None:
    """Update tensors in place, and count their steps; see ``UpdateRule``."""
    first, second = moments
    beta1, beta2 = params["betas"]
    adamw(
        list(weights),
        list(gradients),
        list(first),
        list(second),
        [],
        list(steps),
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=params["lr"],
        weight_decay=params["weight_decay"],
        eps=params["eps"],
        maximize=False,
    )
