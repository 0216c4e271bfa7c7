"""Sequences of the data in their order: batches, what is skipped, and the processes that read ahead.

A place in the order of the sequences determines what is there, so one number is the whole state, with any number of ranks and of
processes that read ahead: what they have read and no step has used is not part of it. Documents that are skipped are ranges of a token
file whose targets are masked in place, wherever they come in the order. Knows ranks and tokens; not the model.

Shape suffixes: B sequences of a batch, S positions, N tokens.
"""

import collections
import dataclasses
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError, counted, reason_of
from llama405b.contract.reader import MalformedError
from llama405b.contract.software import end_with
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT
from llama405b.data.sources import Masked, Mixture, bounds_of, open_source
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import Progress, Say, TokenFile, bring_tokens
from llama405b.distributed.ranks import Rank
from llama405b.settings.axes import Dealing
from llama405b.settings.schema import Data
from llama405b.spec.models import GENERATION_CONFIG, generation_ends


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

    def steps_of_epoch(self, global_batch: int) -> Fraction:
        """Return the number of steps of one epoch, whole or not."""
        return Fraction(self.n_sequences, global_batch)

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


SAMPLE_TOKENS, LAST_TOKENS = 1 << 20, 8  # of a source; and of a document, which a template may end with a line break


def warnings_of_ends(config: Data, batches: Batches, tokenizer_dir: Path) -> list[str]:
    """Warn of sources whose documents teach no token at which a model stops that is made from these files."""
    lines, ends = [], generation_ends(tokenizer_dir)
    for part, source in zip(config.by_source, batches.mixture.sources, strict=True):
        tokens_N = source.tokens_N[:SAMPLE_TOKENS]
        documents = np.split(tokens_N, bounds_of(tokens_N)[1:-1])
        if len(tokens_N) < len(source.tokens_N):  # the last one goes on
            documents.pop()
        learnt = [document_N[document_N & NOT_LEARNT == 0] & ~MARKS for document_N in documents]
        lasts = [tokens.tolist()[-LAST_TOKENS:] for tokens in learnt if len(tokens)]
        if len(lasts) > 1 and ends and not any(ends & {*last} for last in lasts):
            tokenizer = read_tokenizer(tokenizer_dir)
            special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
            closing = [next((token for token in reversed(last) if token in special), last[-1]) for last in lasts]
            [(last, _)] = collections.Counter(closing).most_common(1)
            text = tokenizer.decode([last])
            lines.append(
                f"warning: documents of {', '.join(part.paths)} end with token {last} ({text!r}), but the model's eos_token_id is "
                f"{', '.join(map(str, sorted(ends)))}: it would not learn to stop; make them agree: in its "
                f"{GENERATION_CONFIG}, or by --data.chat_template"
            )
    return lines


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


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """A line of a skip list."""

    source: int  # of the run's, from 0
    n_tokens: int  # of that source's token file: a list is of one data set
    begin: int
    end: int
    document: str = ""  # for people
    why: str = ""


def read_skips(path: Path) -> tuple[Skipped, ...]:
    """Read a skip list.

    Raises:
        UserError: It cannot be read, or is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(
            reader.loads(Skipped, line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--data.skip: {path}: cannot be read ({reason_of(error)}); name a list that `llama405b blame` wrote"
        ) from None
    except MalformedError as error:
        raise UserError(f"--data.skip: {error}; name a list that `llama405b blame` wrote") from None


def without(mixture: Mixture, skips: Sequence[Skipped]) -> Mixture:
    """Return a mixture whose targets in these ranges are masked.

    Raises:
        UserError: They are of other data.
    """
    sources = list(mixture.sources)
    for number, source in enumerate(sources):
        own = [skip for skip in skips if skip.source == number]
        if any(
            skip.n_tokens != len(source.tokens_N) or not 0 <= skip.begin < skip.end <= skip.n_tokens for skip in own
        ):
            raise UserError(
                "--data.skip: the list is of other data (its token file has another length); name that of this run's data"
            )
        sources[number] = dataclasses.replace(source, masked=Masked.of((skip.begin, skip.end) for skip in own))
    if any(skip.source >= len(sources) for skip in skips):
        raise UserError("--data.skip: the list is of other data (which has more sources); name that of this run's data")
    return dataclasses.replace(mixture, sources=tuple(sources))


def words_of(skips: Sequence[Skipped]) -> str:
    """Say what is skipped."""
    n_tokens = sum(skip.end - skip.begin for skip in skips)
    return f"data: {counted(len(skips), 'range')} of {counted(n_tokens, 'token', grouped=True)} not learnt, as data.skip lists them"


Windows = NDArray[np.uint32]  # (B, S + 1)


class Reader:
    """An endless iterator of steps: the micro-batches of this rank, on its device."""

    def __init__(
        self, batches: Batches, me: Rank, dealing: Dealing, micro: int, position: int = 0, workers: int = 0
    ) -> None:
        """``position``: sequences that were read before, over all ranks; ``workers``: processes that read ahead; 0: a thread.

        ``dealing``: of the step's micro-batches, of ``micro`` sequences each, to the ranks that split the batch.
        """
        self.batches = batches
        self.me = me
        self.global_batch = dealing.n_micro * micro
        self.micro = micro
        self.position = position
        first, n_own = dealing.place(me.dp.rank)
        self.idle = dealing.rounds - n_own  # micro-batches: those of the rank before, of which nothing is learnt
        rows = _Rows(batches, dealing.rounds * micro)
        begins = itertools.count(position + (first - self.idle) * micro, self.global_batch)
        self.windows = _by_workers(rows, begins, workers) if workers else _by_thread(rows, begins)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the next step's."""
        windows = next(self.windows)
        self.position += self.global_batch
        batch = self.batches.batch(windows)
        batch.targets_BS[: self.idle * self.micro] = IGNORE_INDEX
        return [part.to(self.me.device) for part in batch.split(self.micro)]

    def close(self) -> None:
        """End what reads ahead."""
        self.windows.close()


class _Rows(Dataset[Windows]):
    """So many sequences from a place on."""

    def __init__(self, batches: Batches, each: int) -> None:
        self.batches, self.each = batches, each

    def __getitem__(self, begin: int) -> Windows:
        return self.batches.windows(range(begin, begin + self.each))


def _by_thread(rows: _Rows, begins: Iterator[int]) -> Generator[Windows]:
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        coming = thread.submit(rows.__getitem__, next(begins))
        while True:
            ready, coming = coming, thread.submit(rows.__getitem__, next(begins))
            yield ready.result()


def _by_workers(rows: _Rows, begins: Iterator[int], workers: int) -> Generator[Windows]:
    """From processes that have none of the rank's sockets or threads, and end with it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__, getattr(sys.modules["__main__"].__spec__, "name", __name__)])
    loader = DataLoader(
        rows,
        sampler=begins,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        multiprocessing_context=server,
        worker_init_fn=functools.partial(end_with, os.getpid()),
    )
    try:
        yield from loader
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise RunError(
            f"--data.workers: a process that reads ahead died ({why}); check the host's memory, or use fewer"
        ) from None


def _as_it_is(windows: Windows) -> Windows:
    return windows
