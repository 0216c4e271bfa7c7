"""The order of training sequences: batches, skipped documents, and loading in the background.

The position in the order determines each sequence, so this one number is the complete state, for any number of ranks and of workers.
Sequences that a worker has read and no step has used are not part of it. Skipped documents are ranges of a token file whose targets
are masked in place, wherever they appear in the order. Knows ranks and tokens; not the model.

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
from llama405b.contract.errors import RunError, UserError, pluralize, reason_of
from llama405b.contract.reader import MalformedError
from llama405b.contract.software import exit_with_process
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED
from llama405b.data.sources import MaskedRanges, Mixture, document_bounds, open_source
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import OnProgress, Say, TokenFile, distribute_tokens
from llama405b.distributed.ranks import Rank
from llama405b.settings.axes import MicrobatchSplit
from llama405b.settings.schema import Data
from llama405b.spec.models import GENERATION_CONFIG, read_end_ids


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
        """Split each source into training and held-out data, by whole documents."""
        pairs = self.mixture.hold_out(fraction)
        train_sources, held_out_sources = ([pair[i] for pair in pairs] for i in (0, 1))
        weights, seed = self.mixture.counts if len(pairs) > 1 else (), self.mixture.seed
        return (
            Batches(Mixture.from_weights(train_sources, seed, weights), self.isolated),
            Batches(Mixture.from_weights(held_out_sources, seed), self.isolated),
        )

    def n_steps(self, epochs: float, global_batch: int, position: int = 0) -> int:
        """Return the number of full steps from ``position`` to the end of the epochs; at least one in all."""
        return max(0 if position else 1, int((epochs * self.n_sequences - position) // global_batch))

    def steps_per_epoch(self, global_batch: int) -> Fraction:
        """Return the number of steps in one epoch, as a fraction."""
        return Fraction(self.n_sequences, global_batch)

    def read(self, indices: Iterable[int]) -> Batch:
        """Return the sequences at these positions of the order as a batch."""
        return self.make_batch(self.windows(indices))

    def windows(self, indices: Iterable[int]) -> NDArray[np.uint32]:
        """Return the tokens of these sequences and the token that follows each, (B, S + 1)."""
        return np.stack([self.mixture.window(index) for index in indices])

    def read_unshuffled(self, places: Iterable[int]) -> Batch:
        """Return sequences by their place in the concatenated sources, without shuffling."""
        return self.make_batch(np.stack([self.mixture.unshuffled_window(place) for place in places]))

    def make_batch(self, windows: NDArray[np.uint32]) -> Batch:
        """Split windows of ``seq_len + 1`` tokens into inputs and targets."""
        ids = (windows & ~MARKS).astype(np.int64)
        ignore_mask = (
            windows[:, 1:] & (MARKS if self.isolated else NOT_TRAINED) != 0
        )  # loss and attention never cross documents
        targets = np.where(ignore_mask, IGNORE_INDEX, ids[:, 1:])
        positions = self._positions(windows[:, :-1] & DOCUMENT_START != 0)
        return Batch(
            torch.from_numpy(ids[:, :-1]),
            torch.from_numpy(targets),
            None if positions is None else torch.from_numpy(positions),
        )

    def _positions(self, begins: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Return positions within documents. A document that began in an earlier sequence restarts at 0."""
        if not (self.isolated and begins[:, 1:].any()):
            return None
        places = np.arange(begins.shape[1])
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def open_batches(
    config: Data,
    tokenizer_dir: Path,
    cache: Path,
    rank: Rank,
    on_progress: OnProgress,
    say: Say,
    option: str = "--data.paths",
) -> Batches:
    """Copy the token files to every host and open them as batches. ``option``: the option that names the texts.

    Raises:
        UserError: The data cannot be used (see ``distribute_tokens``), or is shorter than one sequence.
    """
    files = [distribute_tokens(part, tokenizer_dir, cache, rank, on_progress, say) for part in config.sources]
    return batches_from_files(config, cache, files, option)


def batches_from_files(config: Data, cache: Path, files: list[TokenFile], option: str = "--data.paths") -> Batches:
    """Open token files as batches. ``option``: the option that names their texts, for errors.

    Raises:
        UserError: A file is shorter than one sequence, or contributes nothing to an epoch.
    """
    for part, file in zip(config.sources, files, strict=True):
        if file.n_tokens <= config.seq_len:
            source_label = f" ({', '.join(part.paths)})" if len(files) > 1 else ""
            raise UserError(
                f"{option}: {file.n_tokens} tokens{source_label} are fewer than one sequence of {config.seq_len}; add text, or lower "
                "--data.seq_len"
            )
    documents = "split" if config.packing == "concatenated" else config.documents
    truncate = config.long_documents == "truncate"
    sources = [open_source(file.path(cache), config.seq_len, documents, truncate=truncate) for file in files]
    return Batches(Mixture.from_weights(sources, config.seed, config.weights), isolated=config.packing == "isolated")


SAMPLE_TOKENS, LAST_TOKENS = 1 << 20, 8  # of a source; and of a document, which a template may end with a line break


def end_token_warnings(config: Data, batches: Batches, tokenizer_dir: Path) -> list[str]:
    """Return warnings for sources whose documents never end with one of the model's stop tokens."""
    lines, ends = [], read_end_ids(tokenizer_dir)
    for part, source in zip(config.sources, batches.mixture.sources, strict=True):
        tokens_N = source.tokens_N[:SAMPLE_TOKENS]
        documents = np.split(tokens_N, document_bounds(tokens_N)[1:-1])
        if len(tokens_N) < len(source.tokens_N):  # the sample may cut the last document
            documents.pop()
        targets = [document_N[document_N & NOT_TRAINED == 0] & ~MARKS for document_N in documents]
        tails = [tokens.tolist()[-LAST_TOKENS:] for tokens in targets if len(tokens)]
        if len(tails) > 1 and ends and not any(ends & {*tail} for tail in tails):
            tokenizer = read_tokenizer(tokenizer_dir)
            special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
            end_tokens = [next((token for token in reversed(tail) if token in special_ids), tail[-1]) for tail in tails]
            [(end_token, _)] = collections.Counter(end_tokens).most_common(1)
            text = tokenizer.decode([end_token])
            lines.append(
                f"warning: documents of {', '.join(part.paths)} end with token {end_token} ({text!r}), but the model's eos_token_id is "
                f"{', '.join(map(str, sorted(ends)))}: the model would not learn to stop; make them agree, in "
                f"{GENERATION_CONFIG}, or by --data.chat_template"
            )
    return lines


def describe_held_out(config: Data, held_out: Batches) -> list[str]:
    """Return a log line for each source: its held-out documents, tokens and sequences."""
    lines = []
    for part, source in zip(config.sources, held_out.mixture.sources, strict=True):
        held_documents = (
            pluralize(source.n_documents, "document", thousands=True)
            if source.n_documents
            else "the end of the longest document"
        )
        source_label = f" of {', '.join(part.paths)}" if len(held_out.mixture.sources) > 1 else ""
        size = pluralize(source.n_tokens, "token", thousands=True)
        lines.append(
            f"evaluation: {held_documents}{source_label} held out, {size} in {pluralize(source.n_sequences, 'sequence', thousands=True)}"
        )
    return lines


def describe_epoch(config: Data, batches: Batches) -> list[str]:
    """Return a log line for each source: its share of an epoch, padding and unused tokens."""
    mixture, lines = batches.mixture, []
    for part, source, count in zip(config.sources, mixture.sources, mixture.counts, strict=True):
        line = (
            f"data: {pluralize(source.n_sequences, 'sequence', thousands=True)} of {pluralize(source.seq_len, 'token')}"
        )
        if len(mixture.sources) > 1:
            share = f"{100 * count / batches.n_sequences:.0f}% of an epoch"
            line += f" from {', '.join(part.paths)}: {share}, {count / source.n_sequences:.2f} passes"
        if source.spans_N2 is not None:
            line += f"; whole documents, {100 * source.padding:.1f}% padding"
        if source.n_unread:
            line += f"; {pluralize(source.n_unread, 'token', thousands=True)} unused"
        lines.append(line)
    return lines


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedRange:
    """A line of a skip list: a token range that is masked."""

    source: int  # of the run's, from 0
    n_tokens: int  # of that source's token file: a list is of one data set
    begin: int
    end: int
    document: str = ""  # for people
    why: str = ""


def read_skips(path: Path) -> tuple[SkippedRange, ...]:
    """Read a skip list.

    Raises:
        UserError: It cannot be read, or is not a skip list.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(
            reader.loads(SkippedRange, line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--data.skip: {path}: cannot be read ({reason_of(error)}); name a list that `llama405b blame` wrote"
        ) from None
    except MalformedError as error:
        raise UserError(f"--data.skip: {error}; name a list that `llama405b blame` wrote") from None


def mask_skipped(mixture: Mixture, skips: Sequence[SkippedRange]) -> Mixture:
    """Return the mixture with the targets in these ranges masked.

    Raises:
        UserError: The ranges were made from other data.
    """
    sources = list(mixture.sources)
    for number, source in enumerate(sources):
        source_skips = [skip for skip in skips if skip.source == number]
        if any(
            skip.n_tokens != len(source.tokens_N) or not 0 <= skip.begin < skip.end <= skip.n_tokens
            for skip in source_skips
        ):
            raise UserError(
                "--data.skip: the list was made from other data (the token file's length differs); pass a list made from this run's data"
            )
        sources[number] = dataclasses.replace(
            source, masked_ranges=MaskedRanges.from_ranges((skip.begin, skip.end) for skip in source_skips)
        )
    if any(skip.source >= len(sources) for skip in skips):
        raise UserError(
            "--data.skip: the list was made from other data (with more sources); pass a list made from this run's data"
        )
    return dataclasses.replace(mixture, sources=tuple(sources))


def describe_skipped(skips: Sequence[SkippedRange]) -> str:
    """Return a log line with the number of skipped ranges and tokens."""
    n_tokens = sum(skip.end - skip.begin for skip in skips)
    return f"data: {pluralize(len(skips), 'range')} of {pluralize(n_tokens, 'token', thousands=True)} excluded from the loss by data.skip"


Windows = NDArray[np.uint32]  # (B, S + 1)


class BatchLoader:
    """Iterate endlessly over steps: the micro-batches of this rank, on its device."""

    def __init__(
        self,
        batches: Batches,
        rank: Rank,
        split: MicrobatchSplit,
        micro_batch_size: int,
        position: int = 0,
        workers: int = 0,
    ) -> None:
        """``position``: sequences that were read before, over all ranks; ``workers``: processes that read ahead; 0: a thread.

        ``split``: of the step's micro-batches, of ``micro_batch_size`` sequences each, to the ranks that split the batch.
        """
        self.batches = batches
        self.rank = rank
        self.global_batch = split.n_microbatches * micro_batch_size
        self.micro_batch_size = micro_batch_size
        self.position = position
        first, n_local = split.first_and_count(rank.dp.rank)
        self.n_idle = (
            split.grad_accum_steps - n_local
        )  # masked micro-batches of the previous rank, read to keep ranks in step
        dataset = _WindowDataset(batches, split.grad_accum_steps * micro_batch_size)
        begins = itertools.count(position + (first - self.n_idle) * micro_batch_size, self.global_batch)
        self.windows = _read_by_workers(dataset, begins, workers) if workers else _read_by_thread(dataset, begins)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the micro-batches of the next step."""
        windows = next(self.windows)
        self.position += self.global_batch
        batch = self.batches.make_batch(windows)
        batch.targets_BS[: self.n_idle * self.micro_batch_size] = IGNORE_INDEX
        return [part.to(self.rank.device) for part in batch.split(self.micro_batch_size)]

    def close(self) -> None:
        """Stop the thread or the workers that load in the background."""
        self.windows.close()


class _WindowDataset(Dataset[Windows]):
    """Map the first sequence's position to the windows of one rank's step."""

    def __init__(self, batches: Batches, n_sequences: int) -> None:
        self.batches, self.n_sequences = batches, n_sequences

    def __getitem__(self, begin: int) -> Windows:
        return self.batches.windows(range(begin, begin + self.n_sequences))


def _read_by_thread(dataset: _WindowDataset, begins: Iterator[int]) -> Generator[Windows]:
    with ThreadPoolExecutor(1, "read-ahead") as executor:
        pending = executor.submit(dataset.__getitem__, next(begins))
        while True:
            future, pending = pending, executor.submit(dataset.__getitem__, next(begins))
            yield future.result()


def _read_by_workers(dataset: _WindowDataset, begins: Iterator[int], workers: int) -> Generator[Windows]:
    """Read in worker processes, which inherit no sockets or threads of the rank and end with it."""
    # forkserver, not fork: workers must not inherit sockets and locks of the rank. The preload imports modules once for all workers.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__, getattr(sys.modules["__main__"].__spec__, "name", __name__)])
    loader = DataLoader(
        dataset,
        sampler=begins,
        batch_size=None,
        num_workers=workers,
        collate_fn=_no_collate,
        multiprocessing_context=server,
        worker_init_fn=functools.partial(exit_with_process, os.getpid()),
    )
    try:
        yield from loader
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"--data.workers: a process that reads ahead died ({reason}); check the host's memory, or use fewer"
        ) from None


def _no_collate(windows: Windows) -> Windows:
    return windows
