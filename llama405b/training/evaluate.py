"""The loss on data that is not trained on: how it is computed, and when a run does so."""

import dataclasses
import math
import time
from collections.abc import Callable

import torch

from llama405b.contract.phrases import counted
from llama405b.contract.records import Phase
from llama405b.contract.schema import Evaluation
from llama405b.data.batches import Batches
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.distributed.ranks import Rank
from llama405b.model.batch import IGNORE_INDEX
from llama405b.parallel.passes import Passes
from llama405b.training.context import RankContext
from llama405b.training.prompts import Prompts


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a model on what is held out of its training."""

    settings: Evaluation
    micro_batch_size: int  # of training, where evaluation has none of its own
    passes: Passes
    held_out: Batches
    context: RankContext
    prompts: Prompts | None = None

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after a step."""
        return step % self.settings.every == 0 or step == last_step

    def evaluate(self) -> tuple[float | None, str]:
        """Evaluate the weights as they are; returns the loss, None if it is not finite, and words about it."""
        heartbeat, settings = self.context.heartbeat, self.settings
        heartbeat.phase(Phase.EVAL)
        began, micro = time.monotonic(), settings.micro_batch_size or self.micro_batch_size
        result = evaluate(self.passes, self.held_out, self.context.me, micro, settings.max_sequences, heartbeat.alive)
        loss = result.loss if math.isfinite(result.loss) else None
        return loss, f"{result}, {time.monotonic() - began:.1f} s"

    def continue_prompts(self, step: int) -> None:
        """Have the weights after a step continue the prompts, and report that."""
        if self.prompts:
            self.context.journal.samples(step, self.prompts.continued(self.passes.model))


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of an evaluation."""

    loss: float  # nats per target token, over all sequences; not a number without targets
    n_targets: int
    n_sequences: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite if that is too large for a float."""
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
    """Evaluate at most ``most`` sequences (0: all), at equal distances, ``micro`` at a time on each rank.

    ``alive`` is called before each forward. All ranks take as many, as FSDP's collectives need: one without a sequence left takes
    any, and counts none of it.
    """
    n_sequences = min(most or held_out.n_sequences, held_out.n_sequences)
    every = [i * held_out.n_sequences // n_sequences for i in range(n_sequences)]
    sums = torch.zeros(2, dtype=torch.float64, device=me.device)  # nats, targets
    passes.model.eval()  # without dropout, whose random numbers the next step is to find as they are
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
