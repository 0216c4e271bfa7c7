"""The output head and the loss: cross-entropy over the whole vocabulary, or in chunks of it.

Full logits take 14 bytes per token and vocabulary entry: they are rounded, widened, and have both gradients. In chunks
(``VOCAB_CHUNK`` entries)
they never exist for the whole vocabulary: the forward keeps a log-sum-exp for each token, and the backward recomputes each chunk. The
weight gradient of a chunk is still one matrix product over all tokens, as for the whole weight.

Shape suffixes: B sequences, S positions, T tokens (B S), h hidden size, V vocabulary or a rank's part of it, W entries of a chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.extension import LOSS_CLASS
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.extend import Extension
from llama405b.settings.schema import VOCAB_CHUNK, LossMode

VOCAB_CHUNK = VOCAB_CHUNK


class ModelOutput:
    """What a model makes of a batch. The forward runs when the output is asked for."""

    def __init__(self, model: nn.Module, run_model: Callable[[], Tensor]) -> None:
        """``model``: that this rank computes with; ``run_model``: runs it on the batch, and returns what its head returns."""
        self.model, self.run_model, self.was_run = model, run_model, False
        self.fault: Exception | None = None  # that the model raised, and not the user's loss

    def run(self) -> Tensor:
        """Run the model; return what its head returns."""
        self.was_run = True
        try:
            return self.run_model()
        except Exception as fault:
            self.fault = fault
            raise

    def logits(self) -> Tensor:
        """Run the model; return the logits, (B, S, V), in FP32 or wider."""
        logits = self.run()
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Loss(Protocol):
    """What a step minimizes: the mean of terms, such as targets or pairs of documents, over all ranks."""

    def count(self, batch: Batch) -> Tensor:
        """Return how many terms a batch has, on its device."""

    def loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        """Return the sum of the terms, in nats."""


class TokenLoss:
    """A loss whose terms are targets."""

    def count(self, batch: Batch) -> Tensor:
        """See ``Loss``."""
        return (batch.targets_BS != IGNORE_INDEX).sum()


class CrossEntropy(TokenLoss):
    """Cross-entropy over the full logits."""

    def loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        """See ``Loss``."""
        logits_TV, targets_T = output.logits().flatten(0, 1), batch.targets_BS.flatten()
        return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE_INDEX, reduction="sum")


class VocabPart(NamedTuple):
    """The part of the vocabulary of which a rank has the head's rows."""

    first_index: int = 0
    group: dist.ProcessGroup | None = None  # the ranks that share the vocabulary; None: this rank has all of it


class SplitCrossEntropy(TokenLoss):
    """Cross-entropy over logits whose vocabulary is split between ranks; all of them compute the same loss."""

    def __init__(self, vocab_part: VocabPart) -> None:
        """``vocab_part``: this rank's."""
        self.vocab_part = vocab_part

    def loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        """See ``Loss``."""
        first_index, group = self.vocab_part
        logits_TV, targets_T = output.logits().flatten(0, 1), batch.targets_BS.flatten()
        nll: Tensor = _SplitNll.apply(logits_TV, targets_T - first_index, targets_T != IGNORE_INDEX, group)
        return nll


class _SplitNll(torch.autograd.Function):
    """The summed NLL of targets in nats, by three all-reduces of a number per token."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, is_target_T: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """Return the NLL; targets are indices into this rank's part of the vocabulary."""
        max_T = logits_TV.amax(1)
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group)
        log_probability_TV = logits_TV - max_T[:, None]
        total_T = log_probability_TV.exp().sum(1)
        dist.all_reduce(total_T, group=group)
        log_probability_TV -= total_T.log_()[:, None]
        index_T1, is_here_T = _targets_in_chunk(targets_T, 0, logits_TV.shape[1])
        target_T = torch.where(is_here_T & is_target_T, log_probability_TV.gather(1, index_T1)[:, 0], 0)
        dist.all_reduce(target_T, group=group)
        ctx.save_for_backward(log_probability_TV, index_T1, is_here_T, is_target_T)
        return -target_T.sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """See the class."""
        log_probability_TV, index_T1, is_here_T, is_target_T = ctx.saved_tensors
        grad_logits_TV = log_probability_TV.exp()
        grad_logits_TV.scatter_add_(1, index_T1, -is_here_T[:, None].to(grad_logits_TV.dtype))
        return grad_logits_TV.mul_((grad_output * is_target_T)[:, None]), None, None, None


class ChunkedCrossEntropy(TokenLoss):
    """Cross-entropy in vocabulary chunks, computed in the head, as FSDP gathers the weight only there."""

    def __init__(self, head: nn.Linear) -> None:
        """Replace the head's forward: it computes the loss while targets are set, and logits otherwise."""
        self.head, self.targets_BS = head, None
        self.logits, head.forward = head.forward, self._forward

    def loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        """See ``Loss``."""
        self.targets_BS = batch.targets_BS
        try:
            return output.run()
        finally:
            self.targets_BS = None

    def _forward(self, hidden_BSh: Tensor) -> Tensor:
        if self.targets_BS is None:
            return self.logits(hidden_BSh)
        vocab_part = getattr(self.head, "vocab_part", VocabPart())
        return chunked_nll(hidden_BSh.flatten(0, 1), self.head.weight, self.targets_BS.flatten(), *vocab_part)


class UserLoss(TokenLoss):
    """The loss of the user's module: a function of tokens, or an object of a class that sees the batch."""

    def __init__(self, extension: Extension) -> None:
        """Make the object, if the module has the class."""
        self.extension, self.instance = extension, extension.call(LOSS_CLASS)
        if self.instance is not None and not all(hasattr(self.instance, name) for name in ("count", "loss")):
            raise UserError(
                f"--extend: {extension.declared.path}: {LOSS_CLASS} needs the methods count and loss; add them"
            )

    @property
    def name(self) -> str:
        """What the module defines."""
        return "loss()" if self.instance is None else LOSS_CLASS

    def count(self, batch: Batch) -> Tensor:
        """Return how many terms a batch has."""
        if self.instance is None:
            return super().count(batch)
        return self.extension.call_scalar(f"{LOSS_CLASS}.count", self.instance.count, batch).to(batch.ids_BS.device)

    def loss(self, output: ModelOutput, batch: Batch) -> Tensor:
        """Return the sum of the terms."""
        if self.instance is None:
            function = self.extension.module.loss  # type: ignore[union-attr]
            return self.extension.call_scalar(
                "loss", function, output.logits().flatten(0, 1), batch.targets_BS.flatten()
            )
        try:
            loss = self.extension.call_scalar(f"{LOSS_CLASS}.loss", self.instance.loss, output, batch)
        except RunError:
            if output.fault:  # such as a lost peer, which the cause of the run's end has to name
                raise output.fault from None
            raise
        if not output.was_run:  # the other ranks would wait for this one in the model's collectives
            raise RunError(
                f"{self.extension.declared.path}: {LOSS_CLASS}.loss() did not call output.logits(); call it for every batch, also for one "
                "without targets"
            )
        return loss


def build_loss(mode: LossMode, head: nn.Linear | None, user_loss: UserLoss | None = None) -> Loss:
    """Return the loss of a model. Without a head, as in early pipeline stages, it is never computed."""
    if user_loss:
        return user_loss
    if mode == "chunked" and head is not None:
        return ChunkedCrossEntropy(head)
    vocab_part = getattr(head, "vocab_part", None)
    return SplitCrossEntropy(vocab_part) if vocab_part else CrossEntropy()


def chunked_nll(
    hidden_Th: Tensor,
    weight_Vh: Tensor,
    targets_T: Tensor,
    first_index: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the summed NLL of targets in nats, in FP32, or wider if the hidden states are.

    ``group``: the ranks that share the vocabulary; ``first_index``: the index of this rank's first entry.
    """
    nll: Tensor = _Nll.apply(hidden_Th, weight_Vh, targets_T - first_index, targets_T != IGNORE_INDEX, group)
    return nll


class _Nll(torch.autograd.Function):
    """See ``chunked_nll``; targets are indices into this rank's part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_Th: Tensor,
        weight_Vh: Tensor,
        targets_T: Tensor,
        is_target_T: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """See the class."""
        wide_dtype = torch.promote_types(hidden_Th.dtype, torch.float32)
        max_T = torch.full(targets_T.shape, -torch.inf, dtype=wide_dtype, device=hidden_Th.device)
        total_T, target_logit_T = torch.zeros_like(max_T), torch.zeros_like(max_T)
        for start, chunk_Wh in _vocab_chunks(weight_Vh):
            logits_TW = (hidden_Th @ chunk_Wh.T).to(wide_dtype)
            index_T1, is_in_chunk_T = _targets_in_chunk(targets_T, start, chunk_Wh.shape[0])
            target_logit_T = torch.where(is_in_chunk_T, logits_TW.gather(1, index_T1)[:, 0], target_logit_T)
            previous_max_T, max_T = max_T, torch.maximum(max_T, logits_TW.amax(1))
            total_T = total_T * (previous_max_T - max_T).exp() + logits_TW.sub_(max_T[:, None]).exp_().sum(1)
            del logits_TW  # free before the next chunk allocates its own
        if group:
            previous_max_T = max_T.clone()
            dist.all_reduce(max_T, dist.ReduceOp.MAX, group)
            sums_2T = torch.stack([total_T * (previous_max_T - max_T).exp(), target_logit_T])
            # One collective for both. A target logit is 0 on the ranks that do not have the target.
            dist.all_reduce(sums_2T, group=group)
            total_T, target_logit_T = sums_2T
        log_sum_T = max_T + total_T.log()
        ctx.save_for_backward(hidden_Th, weight_Vh, targets_T, is_target_T, log_sum_T)
        return ((log_sum_T - target_logit_T) * is_target_T).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """See the class."""
        hidden_Th, weight_Vh, targets_T, is_target_T, log_sum_T = ctx.saved_tensors
        scale_T1 = (grad_output * is_target_T).to(log_sum_T.dtype)[:, None]
        grad_hidden_Th = torch.zeros(hidden_Th.shape, dtype=log_sum_T.dtype, device=hidden_Th.device)
        grad_weight_Vh = torch.empty_like(weight_Vh) if ctx.needs_input_grad[1] else None  # frozen
        for start, chunk_Wh in _vocab_chunks(weight_Vh):
            grad_logits_TW = (hidden_Th @ chunk_Wh.T).to(log_sum_T.dtype).sub_(log_sum_T[:, None]).exp_()
            index_T1, is_in_chunk_T = _targets_in_chunk(targets_T, start, chunk_Wh.shape[0])
            grad_logits_TW.scatter_add_(1, index_T1, -is_in_chunk_T[:, None].to(grad_logits_TW.dtype))
            grad_logits_TW = grad_logits_TW.mul_(scale_T1).to(hidden_Th.dtype)
            if grad_weight_Vh is not None:
                torch.mm(grad_logits_TW.T, hidden_Th, out=grad_weight_Vh[start : start + chunk_Wh.shape[0]])
            grad_hidden_Th += grad_logits_TW @ chunk_Wh
            del grad_logits_TW
        return grad_hidden_Th.to(hidden_Th.dtype), grad_weight_Vh, None, None, None


def _vocab_chunks(weight_Vh: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the first index of each vocabulary chunk, and its part of the weight."""
    for start in range(0, weight_Vh.shape[0], VOCAB_CHUNK):
        yield start, weight_Vh[start : start + VOCAB_CHUNK]


def _targets_in_chunk(targets_T: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each target's index in a chunk (clamped), (T, 1), and whether it is in the chunk, (T)."""
    index_T = targets_T - start
    return index_T.clamp(0, size - 1)[:, None], (index_T >= 0) & (
        index_T < size
    )  # without synchronizing with the device
