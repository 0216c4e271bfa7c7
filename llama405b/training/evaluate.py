"""Evaluate between steps: the loss on held-out documents, and greedy continuations of the user's prompts.

The sharded model continues prompts without a cache of keys and values, so each token takes a forward of the full model; keep prompts few
and short. All ranks compute the same continuations. Knows when an evaluation is due; not how a model is trained.

Shape suffixes: B prompts, S positions, W positions whose next token is wanted, V vocabulary.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

from llama405b.contract.errors import UserError, pluralize
from llama405b.contract.records import Phase
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.data.batches import Batches
from llama405b.data.encode import begin_tokens
from llama405b.data.tokenizer import read_tokenizer
from llama405b.distributed import collectives
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.distributed.ranks import Rank
from llama405b.model.attention import model_inputs
from llama405b.parallel.fsdp_internals import pop_prefetch_order
from llama405b.parallel.passes import ForwardBackward
from llama405b.settings.schema import Data, Evaluation
from llama405b.spec.models import parse_end_ids, read_end_ids
from llama405b.training.context import RankContext


class Prompts:
    """The prompts of a run, tokenized, and their continuation."""

    def __init__(self, settings: Evaluation, files: Path, data: Data, context: RankContext) -> None:
        """``files``: the tokenizer's directory."""
        self.texts, self.context, self.n_new = settings.prompts, context, settings.prompt_tokens
        if split_axes := [name for name in ("tp", "cp", "pp") if getattr(context.rank.axes, name) > 1]:
            raise UserError(
                f"--evaluation.prompts: prompts need every layer on every rank; drop them or set {split_axes[0]} 1"
            )
        self.tokenizer = read_tokenizer(files)
        begin, seq_len = begin_tokens(self.tokenizer, data.bos), data.seq_len
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.texts]
        self.prompts = [begin + prompt_ids for prompt_ids in ids]
        for text, prompt in zip(self.texts, self.prompts, strict=True):
            if not 0 < len(prompt) <= seq_len - self.n_new:
                raise UserError(
                    f"--evaluation.prompts: {text[:40]!r} is {len(prompt)} tokens; use 1 to {seq_len - self.n_new} to leave "
                    f"{self.n_new} of data.seq_len for its continuation"
                )
        self.end_tokens = parse_end_ids(self.tokenizer.eos_token_id) | read_end_ids(files)

    def generate(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield each prompt and its continuation."""
        token_lists = generate_continuations(
            model,
            self.prompts,
            self.n_new,
            self.end_tokens,
            self.context.rank.device,
            self.context.heartbeat.record_alive,
        )
        for text, tokens in zip(self.texts, token_lists, strict=True):
            yield text, self.tokenizer.decode(tokens, skip_special_tokens=True)


def generate_continuations(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    end_tokens: set[int],
    device: torch.device,
    before_forward: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Return the greedy continuation of each prompt; it ends with the first of ``end_tokens``, or after ``n_new`` tokens.

    All forwards have one shape; causal attention ignores the padding after a row's last token.
    """
    lengths = [len(prompt) for prompt in prompts]
    ids_BS = torch.zeros(len(prompts), max(lengths) + n_new, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids_BS[row, : len(prompt)] = torch.tensor(prompt)
    token_lists: list[list[int]] = [[] for _ in prompts]
    with _inference_mode(model):
        for _ in range(n_new):
            before_forward()
            if all(tokens and tokens[-1] in end_tokens for tokens in token_lists):
                break
            for row, token in enumerate(_next_tokens(model, ids_BS, lengths)):
                if token_lists[row] and token_lists[row][-1] in end_tokens:
                    continue
                token_lists[row].append(token)
                ids_BS[row, lengths[row]] = token
                lengths[row] += 1
    return token_lists


def _next_tokens(model: nn.Module, ids_BS: Tensor, lengths: Sequence[int]) -> list[int]:
    """Return the next token of each row, as rank 0 computes it: other ranks may round differently."""
    positions = sorted({length - 1 for length in lengths})
    inputs = model_inputs(Batch(ids_BS, ids_BS), model.config._attn_implementation)
    logits_BWV = model(**inputs, use_cache=False, logits_to_keep=torch.tensor(positions, device=ids_BS.device)).logits
    pop_prefetch_order(model)
    rows = range(len(lengths))
    tokens = [int(logits_BWV[row, positions.index(lengths[row] - 1)].argmax()) for row in rows]
    return list(collectives.broadcast_object(tuple(tokens), tuple[int, ...]))


@contextlib.contextmanager
def _inference_mode(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        try:
            yield
        finally:
            model.train()


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a model on held-out data."""

    settings: Evaluation
    micro_batch_size: int  # of training; used if evaluation sets none
    forward_backward: ForwardBackward
    held_out: Batches
    context: RankContext
    prompts: Prompts | None = None
    epoch_steps: Fraction = Fraction(1)

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether to evaluate after a step."""
        return step == last_step or self.settings.is_due(step, self.epoch_steps)

    def evaluate(self) -> tuple[float | None, str]:
        """Evaluate the current weights; return the loss (None if not finite) and a summary for the log."""
        heartbeat, settings = self.context.heartbeat, self.settings
        heartbeat.enter_phase(Phase.EVAL)
        start_s, micro_batch_size = time.monotonic(), settings.micro_batch_size or self.micro_batch_size
        result = evaluate(
            self.forward_backward,
            self.held_out,
            self.context.rank,
            micro_batch_size,
            settings.max_sequences,
            heartbeat.record_alive,
        )
        loss = result.loss if math.isfinite(result.loss) else None
        return loss, f"{result}, {time.monotonic() - start_s:.1f} s"

    def continue_prompts(self, step: int) -> None:
        """Continue the prompts with the weights after a step, and report the continuations."""
        if self.prompts:
            self.context.journal.write_samples(step, self.prompts.generate(self.forward_backward.model))


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation."""

    loss: float  # nats per term, usually a target token, over all sequences; NaN without one
    n_targets: int
    n_sequences: int
    n_terms: float | None = None  # of the loss; None: as many as targets

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        sizes = " in ".join(
            pluralize(n, noun, thousands=True)
            for n, noun in ((self.n_targets, "target"), (self.n_sequences, "sequence"))
        )
        if self.n_terms not in (None, self.n_targets):  # a loss of documents or pairs has no perplexity
            return f"loss {self.loss:.4f} ({self.n_terms:,g} terms of the loss; {sizes})"
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:,.2f} ({sizes})"


@torch.no_grad()
def evaluate(
    forward_backward: ForwardBackward,
    held_out: Batches,
    rank: Rank,
    micro_batch_size: int,
    max_sequences: int = 0,
    before_forward: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Evaluate at most ``max_sequences`` evenly spaced sequences (0: all), ``micro_batch_size`` at a time on each rank.

    ``before_forward`` is called before each forward. FSDP's collectives need the same number of forwards on all ranks: a rank that has no
    sequence left runs any sequence with all targets masked.
    """
    n_sequences = min(max_sequences or held_out.n_sequences, held_out.n_sequences)
    indices = [i * held_out.n_sequences // n_sequences for i in range(n_sequences)]
    sums = torch.zeros(3, dtype=torch.float64, device=rank.device)  # nats, terms, targets
    forward_backward.model.eval()  # no dropout: the random state of the next step must not change
    for begin in range(
        rank.dp.rank * micro_batch_size, rank.dp.rank * micro_batch_size + n_sequences, rank.dp.size * micro_batch_size
    ):
        places = range(begin, begin + micro_batch_size)
        batch = held_out.read_unshuffled(indices[place % len(indices)] for place in places)
        batch.targets_BS[torch.tensor([place >= len(indices) for place in places])] = IGNORE_INDEX
        batch = batch.to(rank.device)
        before_forward()
        sums[0] += forward_backward.evaluate(batch)
        sums[1:] += forward_backward.count(batch)
    forward_backward.model.train()
    nats, n_terms, n_targets = all_reduce_sum(sums).tolist()
    return EvaluationResult(nats / n_terms if n_terms else math.nan, int(n_targets), n_sequences, n_terms)
