"""The loss on data that is not trained on. Knows batches and the model; not files, flags or clocks."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from llama405b.contract.phrases import counted
from llama405b.data.batches import Batches
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.distributed.ranks import Rank
from llama405b.model.batch import IGNORE_INDEX, Batch
from llama405b.optim.step import nll_of
from llama405b.parallel.fsdp2 import forget_forward


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
    model: nn.Module, held_out: Batches, me: Rank, micro: int, most: int = 0, alive: Callable[[], None] = lambda: None
) -> Evaluated:
    """Evaluate at most ``most`` sequences (0: all), at equal distances, ``micro`` at a time on each rank.

    ``alive`` is called before each forward. All ranks take as many, as FSDP's collectives need: one without a sequence left takes
    any, and counts none of it.
    """
    n_sequences = min(most or held_out.n_sequences, held_out.n_sequences)
    every = [i * held_out.n_sequences // n_sequences for i in range(n_sequences)]
    sums = torch.zeros(2, dtype=torch.float64, device=me.device)  # nats, targets
    model.eval()  # without dropout, whose random numbers the next step is to find as they are
    for begin in range(me.dp.rank * micro, me.dp.rank * micro + n_sequences, me.dp.size * micro):
        batch = _batch(held_out, every, range(begin, begin + micro)).to(me.device)
        alive()
        sums[0] += nll_of(model, batch)
        sums[1] += (batch.targets_BS != IGNORE_INDEX).sum()
        forget_forward(model)
    model.train()
    nats, n_targets = all_reduce_sum(sums).tolist()
    return Evaluated(nats / n_targets if n_targets else math.nan, int(n_targets), n_sequences)


def _batch(held_out: Batches, every: Sequence[int], places: range) -> Batch:
    batch = held_out.in_order(every[place % len(every)] for place in places)
    batch.targets_BS[torch.tensor([place >= len(every) for place in places])] = IGNORE_INDEX
    return batch
