"""Packed batches of tokens, the same on any number of ranks.

Knows tokens, steps and ranks; not the model. Sequence ``i`` of a step depends only on the seed, the step and ``i``, so
that a resumed run and any world size see the same batches.

Shape suffixes: B sequences of a micro-batch, S positions, N tokens.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from llama405b.batch import IGNORE_INDEX, Batch
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Data
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT
from llama405b.data.tokens import Progress, Say, bring_tokens
from llama405b.ranks import Ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """A shuffled, endless order of packed sequences."""

    tokens_N: NDArray[np.uint32]  # uint32, memory-mapped
    seq_len: int
    seed: int
    isolated: bool = True  # documents that share a sequence do not see each other
    chosen: NDArray[np.int64] | None = None  # which sequences these are, if not all

    @property
    def sequences(self) -> NDArray[np.int64]:
        """The sequences of one epoch; each token is a target in exactly one, but an isolated document's first in none."""
        if self.chosen is not None:
            return self.chosen
        return np.arange((len(self.tokens_N) - 1) // self.seq_len)

    @property
    def n_sequences(self) -> int:
        """Number of sequences in one epoch."""
        return (len(self.tokens_N) - 1) // self.seq_len if self.chosen is None else len(self.chosen)

    def hold_out(self, fraction: float) -> tuple["Batches", "Batches"]:
        """Split into what is trained on and what is held out: sequences at equal distances, at least one of each.

        Raises:
            UserError: There is only one sequence.
        """
        everything = self.sequences
        if len(everything) < 2:
            raise UserError("--evaluation.fraction: there is only one sequence; add text, or name --evaluation.paths")
        n_held = min(max(1, round(fraction * len(everything))), len(everything) - 1)
        places = np.linspace(0, len(everything) - 1, n_held + 2).round().astype(np.int64)[1:-1]
        held = np.unique(np.clip(places, 0, len(everything) - 1))
        kept = np.setdiff1d(np.arange(len(everything)), held)
        return dataclasses.replace(self, chosen=everything[kept]), dataclasses.replace(self, chosen=everything[held])

    def steps(self, epochs: float, global_batch: int) -> int:
        """Return the number of whole steps in these epochs, at least one."""
        return max(1, int(epochs * self.n_sequences // global_batch))

    def sequence(self, index: int) -> int:
        """Return the packed sequence at ``index`` of the endless order."""
        epoch, place = divmod(index, self.n_sequences)
        place = int(_order(self.seed, epoch, self.n_sequences)[place])
        return place if self.chosen is None else int(self.chosen[place])

    def microbatches(self, step: int, me: Ranks, global_batch: int, micro: int) -> list[Batch]:
        """Return this rank's part of a step (counted from 1), on its device."""
        each = global_batch // me.dp.size
        first = (step - 1) * global_batch + me.dp.rank * each
        windows = np.stack([self.window(self.sequence(first + i)) for i in range(each)])
        return self.batch(windows).to(me.device).split(micro)

    def batch(self, windows: NDArray[np.uint32]) -> Batch:
        """Split windows of ``seq_len + 1`` tokens into what is read and what follows."""
        ids = (windows & ~MARKS).astype(np.int64)
        ignored = windows[:, 1:] & (MARKS if self.isolated else NOT_LEARNT) != 0  # no document foretells the next
        targets = np.where(ignored, IGNORE_INDEX, ids[:, 1:])
        positions = self._positions(windows[:, :-1] & FIRST != 0)
        return Batch(
            torch.from_numpy(ids[:, :-1]),
            torch.from_numpy(targets),
            None if positions is None else torch.from_numpy(positions),
        )

    def _positions(self, begins: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Positions within documents; the rest of one that began in an earlier sequence counts from 0, too."""
        if not (self.isolated and begins[:, 1:].any()):
            return None
        places = np.arange(self.seq_len)
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

    def window(self, sequence: int) -> NDArray[np.uint32]:
        """Return the tokens of a packed sequence, and the one that follows."""
        begin = sequence * self.seq_len
        return self.tokens_N[begin : begin + self.seq_len + 1]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n_sequences: int) -> NDArray[np.int64]:
    """The shuffle of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n_sequences)


def open_batches(
    config: Data,
    tokenizer_dir: Path,
    cache: Path,
    me: Ranks,
    progress: Progress,
    say: Say,
    named: str = "--data.paths",
) -> Batches:
    """Bring the tokens to every host, and open them as batches; ``named``: the option that names the texts.

    Raises:
        UserError: The data cannot be used (see ``bring_tokens``), or is shorter than one sequence.
    """
    tokens = bring_tokens(config, tokenizer_dir, cache, me, progress, say)
    return batches_of(config, cache / tokens.name, tokens.n_tokens, named)


def batches_of(config: Data, file: Path, n_tokens: int, named: str = "--data.paths") -> Batches:
    """Open a token file as batches; ``named``: the option that names its texts.

    Raises:
        UserError: It is shorter than one sequence.
    """
    if n_tokens <= config.seq_len:
        raise UserError(
            f"{named}: {n_tokens} tokens are fewer than one sequence of {config.seq_len}; add text, or lower --data.seq_len"
        )
    tokens_N = np.memmap(file, dtype=np.uint32, mode="r")
    return Batches(tokens_N, config.seq_len, config.seed, isolated=config.packing == "isolated")
