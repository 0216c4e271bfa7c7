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

from llama405b.contract.errors import UserError, counted
from llama405b.contract.records import Phase
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.data.batches import Batches
from llama405b.data.encode import begin_tokens
from llama405b.data.tokenizer import read_tokenizer
from llama405b.distributed import collectives
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.distributed.ranks import Rank
from llama405b.model.attention import model_inputs
from llama405b.parallel.fsdp import take_forward
from llama405b.parallel.passes import Passes
from llama405b.settings.schema import Data, Evaluation
from llama405b.spec.models import end_ids, generation_ends
from llama405b.training.context import RankContext


class Prompts:
    """The prompts of a run, tokenized, and their continuation."""

    def __init__(self, settings: Evaluation, files: Path, data: Data, context: RankContext) -> None:
        """``files``: the tokenizer's directory."""
        self.texts, self.context, self.n_new = settings.prompts, context, settings.prompt_tokens
        if split := [name for name in ("tp", "cp", "pp") if getattr(context.me.axes, name) > 1]:
            raise UserError(
                f"--evaluation.prompts: prompts need every layer on every rank; drop them or set {split[0]} 1"
            )
        self.tokenizer = read_tokenizer(files)
        begin, seq_len = begin_tokens(self.tokenizer, data.bos), data.seq_len
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.texts]
        self.prompts = [begin + each for each in ids]
        for text, prompt in zip(self.texts, self.prompts, strict=True):
            if not 0 < len(prompt) <= seq_len - self.n_new:
                raise UserError(
                    f"--evaluation.prompts: {text[:40]!r} is {len(prompt)} tokens; use 1 to {seq_len - self.n_new} to leave "
                    f"{self.n_new} of data.seq_len for its continuation"
                )
        self.ends = end_ids(self.tokenizer.eos_token_id) | generation_ends(files)

    def continued(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield each prompt and its continuation."""
        new = continuations(
            model, self.prompts, self.n_new, self.ends, self.context.me.device, self.context.heartbeat.alive
        )
        for text, tokens in zip(self.texts, new, strict=True):
            yield text, self.tokenizer.decode(tokens, skip_special_tokens=True)


def continuations(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    ends: set[int],
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Return the greedy continuation of each prompt; it ends with the first of ``ends``, or after ``n_new`` tokens.

    All forwards have one shape; causal attention ignores the padding after a row's last token.
    """
    reached = [len(prompt) for prompt in prompts]
    ids_BS = torch.zeros(len(prompts), max(reached) + n_new, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids_BS[row, : len(prompt)] = torch.tensor(prompt)
    new: list[list[int]] = [[] for _ in prompts]
    with _inference(model):
        for _ in range(n_new):
            alive()
            if all(tokens and tokens[-1] in ends for tokens in new):
                break
            for row, token in enumerate(_next(model, ids_BS, reached)):
                if new[row] and new[row][-1] in ends:
                    continue
                new[row].append(token)
                ids_BS[row, reached[row]] = token
                reached[row] += 1
    return new


def _next(model: nn.Module, ids_BS: Tensor, reached: Sequence[int]) -> list[int]:
    """Return the next token of each row, as rank 0 computes it: other ranks may round differently."""
    last = sorted({length - 1 for length in reached})
    inputs = model_inputs(Batch(ids_BS, ids_BS), model.config._attn_implementation)
    logits_BWV = model(**inputs, use_cache=False, logits_to_keep=torch.tensor(last, device=ids_BS.device)).logits
    take_forward(model)
    rows = range(len(reached))
    best = [int(logits_BWV[row, last.index(reached[row] - 1)].argmax()) for row in rows]
    return list(collectives.broadcast_object(tuple(best), tuple[int, ...]))


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
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
    passes: Passes
    held_out: Batches
    context: RankContext
    prompts: Prompts | None = None
    epoch_steps: Fraction = Fraction(1)

    def is_due(self, step: int, last_step: int) -> bool:
        """Return whether to evaluate after a step."""
        return step == last_step or self.settings.due(step, self.epoch_steps)

    def evaluate(self) -> tuple[float | None, str]:
        """Evaluate the current weights; return the loss (None if not finite) and a summary for the log."""
        heartbeat, settings = self.context.heartbeat, self.settings
        heartbeat.phase(Phase.EVAL)
        began, micro = time.monotonic(), settings.micro_batch_size or self.micro_batch_size
        result = evaluate(self.passes, self.held_out, self.context.me, micro, settings.max_sequences, heartbeat.alive)
        loss = result.loss if math.isfinite(result.loss) else None
        return loss, f"{result}, {time.monotonic() - began:.1f} s"

    def continue_prompts(self, step: int) -> None:
        """Continue the prompts with the weights after a step, and report the continuations."""
        if self.prompts:
            self.context.journal.samples(step, self.prompts.continued(self.passes.model))


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of an evaluation."""

    loss: float  # nats per target token, over all sequences; NaN without targets
    n_targets: int
    n_sequences: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def __str__(self) -> str:
        of = " in ".join(
            counted(n, noun, grouped=True) for n, noun in ((self.n_targets, "target"), (self.n_sequences, "sequence"))
        )
        return f"loss {self.loss:.4f}, perplexity {self.perplexity:,.2f} ({of})"


@torch.no_grad()
def evaluate(
    passes: Passes,
    held_out: Batches,
    me: Rank,
    micro: int,
    most: int = 0,
    alive: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Evaluate at most ``most`` evenly spaced sequences (0: all), ``micro`` at a time on each rank.

    ``alive`` is called before each forward. FSDP's collectives need the same number of forwards on all ranks: a rank that has no
    sequence left runs any sequence with all targets masked.
    """
    n_sequences = min(most or held_out.n_sequences, held_out.n_sequences)
    every = [i * held_out.n_sequences // n_sequences for i in range(n_sequences)]
    sums = torch.zeros(2, dtype=torch.float64, device=me.device)  # nats, targets
    passes.model.eval()  # no dropout: the random state of the next step must not change
    for begin in range(me.dp.rank * micro, me.dp.rank * micro + n_sequences, me.dp.size * micro):
        places = range(begin, begin + micro)
        batch = held_out.in_order(every[place % len(every)] for place in places)
        batch.targets_BS[torch.tensor([place >= len(every) for place in places])] = IGNORE_INDEX
        batch = batch.to(me.device)
        alive()
        sums[0] += passes.evaluate(batch)
        sums[1] += passes.n_targets(batch)
    passes.model.train()
    nats, n_targets = all_reduce_sum(sums).tolist()
    return Evaluated(nats / n_targets if n_targets else math.nan, int(n_targets), n_sequences)
