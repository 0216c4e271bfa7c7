"""Packed sequences as batches: what is read, what is learnt, and where each document is. Knows tokens; not ranks or steps.

Shape suffixes: B sequences of a batch, S positions, N tokens.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted
from llama405b.contract.schema import Data
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT
from llama405b.data.sources import Mixture, open_source
from llama405b.data.tokens import Progress, Say, TokenFile, bring_tokens
from llama405b.distributed.ranks import Rank
from llama405b.model.batch import IGNORE_INDEX, Batch


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """A shuffled, endless order of packed sequences, the same on any number of ranks."""

    mixture: Mixture
    isolated: bool = True  # documents that share a sequence do not attend to each other

    @property
    def n_sequences(self) -> int:
        """Number of sequences in one epoch."""
        return self.mixture.n_sequences

    def hold_out(self, fraction: float) -> tuple["Batches", "Batches"]:
        """Split into what is trained on and what is held out, of each source: whole documents."""
        pairs = self.mixture.hold_out(fraction)
        kept, held = ([pair[i] for pair in pairs] for i in (0, 1))
        weights, seed = self.mixture.counts if len(pairs) > 1 else (), self.mixture.seed
        return (
            Batches(Mixture.of(kept, seed, weights), self.isolated),
            Batches(Mixture.of(held, seed), self.isolated),
        )

    def steps(self, epochs: float, global_batch: int, position: int = 0) -> int:
        """Return the number of whole steps from a position to the end of these epochs, at least one in all."""
        return max(0 if position else 1, int((epochs * self.n_sequences - position) // global_batch))

    def read(self, indices: Iterable[int]) -> Batch:
        """Return the sequences at these places of the order."""
        return self.batch(self.windows(indices))

    def windows(self, indices: Iterable[int]) -> NDArray[np.uint32]:
        """Return their tokens, each with the one that follows: (B, S + 1)."""
        return np.stack([self.mixture.window(index) for index in indices])

    def in_order(self, places: Iterable[int]) -> Batch:
        """Return sequences by their place in the sources, one source after another."""
        return self.batch(np.stack([self.mixture.in_order(place) for place in places]))

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
        places = np.arange(begins.shape[1])
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def open_batches(
    config: Data,
    tokenizer_dir: Path,
    cache: Path,
    me: Rank,
    progress: Progress,
    say: Say,
    named: str = "--data.paths",
) -> Batches:
    """Bring the tokens to every host, and open them as batches; ``named``: the option that names the texts.

    Raises:
        UserError: The data cannot be used (see ``bring_tokens``), or is shorter than one sequence.
    """
    files = [bring_tokens(part, tokenizer_dir, cache, me, progress, say) for part in config.by_source]
    return batches_of(config, cache, files, named)


def batches_of(config: Data, cache: Path, files: list[TokenFile], named: str = "--data.paths") -> Batches:
    """Open token files as batches; ``named``: the option that names their texts.

    Raises:
        UserError: One is shorter than one sequence, or an epoch would have nothing of it.
    """
    for part, file in zip(config.by_source, files, strict=True):
        if file.n_tokens <= config.seq_len:
            which = f" ({', '.join(part.paths)})" if len(files) > 1 else ""
            raise UserError(
                f"{named}: {file.n_tokens} tokens{which} are fewer than one sequence of {config.seq_len}; add text, or lower "
                "--data.seq_len"
            )
    documents = "split" if config.packing == "concatenated" else config.documents
    truncate = config.long_documents == "truncate"
    sources = [open_source(file.path(cache), config.seq_len, documents, truncate=truncate) for file in files]
    return Batches(Mixture.of(sources, config.seed, config.weights), isolated=config.packing == "isolated")


def describe_held_out(config: Data, held_out: Batches) -> list[str]:
    """Say what is held out of each source."""
    lines = []
    for part, source in zip(config.by_source, held_out.mixture.sources, strict=True):
        what = (
            counted(source.n_documents, "document", grouped=True)
            if source.n_documents
            else "the longest document's end"
        )
        of = f" of {', '.join(part.paths)}" if len(held_out.mixture.sources) > 1 else ""
        size = counted(source.n_tokens, "token", grouped=True)
        lines.append(
            f"evaluation: {what}{of} held out, {size} in {counted(source.n_sequences, 'sequence', grouped=True)}"
        )
    return lines


def describe_reading(config: Data, batches: Batches) -> list[str]:
    """Say what an epoch has of each source, and how full its sequences are."""
    mixture, lines = batches.mixture, []
    for part, source, count in zip(config.by_source, mixture.sources, mixture.counts, strict=True):
        line = f"data: {counted(source.n_sequences, 'sequence', grouped=True)} of {counted(source.seq_len, 'token')}"
        if len(mixture.sources) > 1:
            share = f"{100 * count / batches.n_sequences:.0f}% of an epoch"
            line += f" from {', '.join(part.paths)}: {share}, {count / source.n_sequences:.2f} passes"
        if source.spans_N2 is not None:
            line += f"; whole documents, {100 * source.padding:.1f}% padding"
        if source.unread:
            line += f"; {counted(source.unread, 'token', grouped=True)} unused"
        lines.append(line)
    return lines
