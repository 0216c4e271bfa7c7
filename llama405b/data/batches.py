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
from torch import Tensor

from llama405b.contract.errors import UserError
from llama405b.contract.schema import Data
from llama405b.data.tokens import NOT_LEARNT, Progress, Say, bring_tokens
from llama405b.ranks import Ranks
from llama405b.step import IGNORE_INDEX


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """A shuffled, endless order of packed sequences."""

    tokens_N: NDArray[np.uint32]  # uint32, memory-mapped
    seq_len: int
    seed: int

    @property
    def n_sequences(self) -> int:
        """Number of sequences in one epoch; each target token is in exactly one."""
        return (len(self.tokens_N) - 1) // self.seq_len

    def steps(self, epochs: float, global_batch: int) -> int:
        """Return the number of whole steps in these epochs, at least one."""
        return max(1, int(epochs * self.n_sequences // global_batch))

    def sequence(self, index: int) -> int:
        """Return the packed sequence at ``index`` of the endless order."""
        epoch, place = divmod(index, self.n_sequences)
        return int(_order(self.seed, epoch, self.n_sequences)[place])

    def microbatches(self, step: int, me: Ranks, global_batch: int, micro: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of a step (counted from 1), as ``(tokens_BS, targets_BS)`` on its device."""
        each = global_batch // me.dp.size
        first = (step - 1) * global_batch + me.dp.rank * each
        windows = np.stack([self._window(self.sequence(first + i)) for i in range(each)])
        ids = torch.from_numpy((windows & ~NOT_LEARNT).astype(np.int64))
        x, y = ids[:, :-1], ids[:, 1:].clone()
        y[torch.from_numpy((windows[:, 1:] & NOT_LEARNT) != 0)] = IGNORE_INDEX
        x, y = x.to(me.device), y.to(me.device)
        return [(x[i : i + micro], y[i : i + micro]) for i in range(0, each, micro)]

    def _window(self, sequence: int) -> NDArray[np.uint32]:
        begin = sequence * self.seq_len
        return self.tokens_N[begin : begin + self.seq_len + 1]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n_sequences: int) -> NDArray[np.int64]:
    """The shuffle of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n_sequences)


def open_batches(config: Data, tokenizer_dir: Path, cache: Path, me: Ranks, progress: Progress, say: Say) -> Batches:
    """Bring the tokens to every host, and open them as batches.

    Raises:
        UserError: The data cannot be used (see ``bring_tokens``), or is shorter than one sequence.
    """
    tokens = bring_tokens(config, tokenizer_dir, cache, me, progress, say)
    if tokens.n_tokens <= config.seq_len:
        raise UserError(
            f"--data.paths: {tokens.n_tokens} tokens are fewer than one sequence of {config.seq_len}; "
            "add text, or lower --data.seq_len"
        )
    return Batches(np.memmap(cache / tokens.name, dtype=np.uint32, mode="r"), config.seq_len, config.seed)
