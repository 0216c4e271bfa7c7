"""The output head and the loss: cross-entropy over the whole vocabulary, or in chunks of it.

Full logits take 14 bytes per token and vocabulary entry: they are rounded, widened, and have both gradients. In chunks (``PART`` entries)
they never exist for the whole vocabulary: the forward keeps a log-sum-exp for each token, and the backward recomputes each chunk. The
weight gradient of a chunk is still one matrix product over all tokens, as for the whole weight.

Shape suffixes: B sequences, S positions, T tokens (B S), h hidden size, V vocabulary or a rank's part of it, W entries of a chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from llama405b.data.batch import IGNORE_INDEX
from llama405b.settings.schema import LOSS_PART, LossOf

PART = LOSS_PART


class HeadLoss(Protocol):
    """Computes the loss from a model's head."""

    def nll(self, run: Callable[[], Tensor], targets_BS: Tensor) -> Tensor:
        """Return the summed NLL of targets in nats; ``run``: runs the model, returns its head's output."""


class OfLogits:
    """Cross-entropy over the full logits."""

    def nll(self, run: Callable[[], Tensor], targets_BS: Tensor) -> Tensor:
        """See ``HeadLoss``. Computed in FP32, or wider if the logits are."""
        logits = run().flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


class OfParts:
    """Cross-entropy in vocabulary chunks, computed in the head, as FSDP gathers the weight only there."""

    def __init__(self, head: nn.Linear) -> None:
        """Replace the head's forward: it computes the loss while targets are set, and logits otherwise."""
        self.head, self.targets_BS = head, None
        self.logits, head.forward = head.forward, self._forward

    def nll(self, run: Callable[[], Tensor], targets_BS: Tensor) -> Tensor:
        self.targets_BS = targets_BS
        try:
            return run()
        finally:
            self.targets_BS = None

    def _forward(self, hidden_BSh: Tensor) -> Tensor:
        if self.targets_BS is None:
            return self.logits(hidden_BSh)
        weight_Vh, targets_T = self.head.weight, self.targets_BS.flatten()
        if not isinstance(weight_Vh, DTensor):
            return nll_of_parts(hidden_BSh.flatten(0, 1), weight_Vh, targets_T)
        mesh = weight_Vh.device_mesh  # tensor parallel: each rank has a part of the vocabulary
        assert isinstance(hidden_BSh, DTensor)
        hidden_Th = hidden_BSh.to_local(grad_placements=[Partial()]).flatten(0, 1)
        first = mesh.get_local_rank() * weight_Vh.to_local().shape[0]
        nll = nll_of_parts(hidden_Th, weight_Vh.to_local(), targets_T, first, mesh.get_group())
        return DTensor.from_local(nll, mesh, [Replicate()])


class OfOwn:
    """The user's loss function: full logits (T, V) in FP32 or wider, and targets (T), to a sum over tokens."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss

    def nll(self, run: Callable[[], Tensor], targets_BS: Tensor) -> Tensor:
        logits_TV = run().flatten(0, 1)
        return self.loss(logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)), targets_BS.flatten())


def loss_of(kind: LossOf, head: nn.Linear | None, own: Callable[[Tensor, Tensor], Tensor] | None = None) -> HeadLoss:
    """Return the loss of a head. Without a head, as in early pipeline stages, it is never computed.

    ``own``: the user's loss function.
    """
    if own:
        return OfOwn(own)
    return OfParts(head) if kind == "parts" and head is not None else OfLogits()


def nll_of_parts(
    hidden_Th: Tensor, weight_Vh: Tensor, targets_T: Tensor, first: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the summed NLL of targets in nats, in FP32, or wider if the hidden states are.

    ``group``: the ranks that share the vocabulary; ``first``: the index of this rank's first entry.
    """
    found: Tensor = _Nll.apply(hidden_Th, weight_Vh, targets_T - first, targets_T != IGNORE_INDEX, group)
    return found


class _Nll(torch.autograd.Function):
    """See ``nll_of_parts``; targets are indices into this rank's part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_Th: Tensor,
        weight_Vh: Tensor,
        targets_T: Tensor,
        counts_T: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """See the class."""
        wide = torch.promote_types(hidden_Th.dtype, torch.float32)
        most_T = torch.full(targets_T.shape, -torch.inf, dtype=wide, device=hidden_Th.device)
        total_T, right_T = torch.zeros_like(most_T), torch.zeros_like(most_T)
        for start, part_Wh in _parts(weight_Vh):
            logits_TW = (hidden_Th @ part_Wh.T).to(wide)
            word_T1, here_T = _targets_in(targets_T, start, part_Wh.shape[0])
            right_T = torch.where(here_T, logits_TW.gather(1, word_T1)[:, 0], right_T)
            before_T, most_T = most_T, torch.maximum(most_T, logits_TW.amax(1))
            total_T = total_T * (before_T - most_T).exp() + logits_TW.sub_(most_T[:, None]).exp_().sum(1)
            del logits_TW  # free before the next chunk allocates its own
        if group:
            before_T = most_T.clone()
            dist.all_reduce(most_T, dist.ReduceOp.MAX, group)
            sums_2T = torch.stack([total_T * (before_T - most_T).exp(), right_T])
            # One collective for both. A target logit is 0 on the ranks that do not have the target.
            dist.all_reduce(sums_2T, group=group)
            total_T, right_T = sums_2T
        log_sum_T = most_T + total_T.log()
        ctx.save_for_backward(hidden_Th, weight_Vh, targets_T, counts_T, log_sum_T)
        return ((log_sum_T - right_T) * counts_T).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """See the class."""
        hidden_Th, weight_Vh, targets_T, counts_T, log_sum_T = ctx.saved_tensors
        scale_T1 = (gradient * counts_T).to(log_sum_T.dtype)[:, None]
        of_hidden_Th = torch.zeros(hidden_Th.shape, dtype=log_sum_T.dtype, device=hidden_Th.device)
        of_weight_Vh = torch.empty_like(weight_Vh) if ctx.needs_input_grad[1] else None  # frozen
        for start, part_Wh in _parts(weight_Vh):
            of_logits_TW = (hidden_Th @ part_Wh.T).to(log_sum_T.dtype).sub_(log_sum_T[:, None]).exp_()
            word_T1, here_T = _targets_in(targets_T, start, part_Wh.shape[0])
            of_logits_TW.scatter_add_(1, word_T1, -here_T[:, None].to(of_logits_TW.dtype))
            of_logits_TW = of_logits_TW.mul_(scale_T1).to(hidden_Th.dtype)
            if of_weight_Vh is not None:
                torch.mm(of_logits_TW.T, hidden_Th, out=of_weight_Vh[start : start + part_Wh.shape[0]])
            of_hidden_Th += of_logits_TW @ part_Wh
            del of_logits_TW
        return of_hidden_Th.to(hidden_Th.dtype), of_weight_Vh, None, None, None


def _parts(weight_Vh: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the first index of each vocabulary chunk, and its part of the weight."""
    for start in range(0, weight_Vh.shape[0], PART):
        yield start, weight_Vh[start : start + PART]


def _targets_in(targets_T: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each target's index in a chunk (clamped), (T, 1), and whether it is in the chunk, (T)."""
    word_T = targets_T - start
    return word_T.clamp(0, size - 1)[:, None], (word_T >= 0) & (word_T < size)  # without synchronizing with the device
