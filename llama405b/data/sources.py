"""Pack token files into sequences, mix them, hold documents out, and find the document of a token.

Knows tokens and their marks; not ranks or steps. A list next to each token file, ``.files``, has the token at which a text file begins
or, every ``APART`` tokens, goes on.

Shape suffixes: S positions; N tokens, sequences, documents or stretches.
"""

import bisect
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama405b.contract.errors import UserError, pluralize
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED, SAME_CHAT, WITH_PREVIOUS, FileOffset

CHUNK_TOKENS = 64 << 20  # tokens scanned at a time


def needs_whole_documents(tokens_N: NDArray[np.uint32]) -> bool:
    """Return whether documents have prompts (tokens that are not trained on, first ones aside), or are kept together."""
    chunks = (tokens_N[i : i + CHUNK_TOKENS] for i in range(0, len(tokens_N), CHUNK_TOKENS))
    return any(bool(((chunk & MARKS == NOT_TRAINED) | (chunk & WITH_PREVIOUS != 0)).any()) for chunk in chunks)


def document_bounds(tokens_N: NDArray[np.uint32], *, joined: bool = False) -> NDArray[np.int64]:
    """Return the begin of each document and the end of the last; ``joined``: those kept together count as one."""
    marks = DOCUMENT_START | WITH_PREVIOUS if joined else DOCUMENT_START
    begins = [
        np.flatnonzero(tokens_N[i : i + CHUNK_TOKENS] & marks == DOCUMENT_START) + i
        for i in range(0, len(tokens_N), CHUNK_TOKENS)
    ]
    return np.unique(np.concatenate([[0], *begins, [len(tokens_N)]]))


def fixed_spans(n_tokens: int, seq_len: int) -> NDArray[np.int64]:
    """Return begin and end of each sequence, (N, 2): every ``seq_len`` tokens, and the remainder."""
    begins_N = np.arange(0, n_tokens, seq_len)
    return np.stack([begins_N, np.minimum(begins_N + seq_len, n_tokens)], axis=1)


def whole_document_spans(bounds_N: NDArray[np.int64], seq_len: int, *, truncate: bool) -> NDArray[np.int64]:
    """Return begin and end of each sequence, (N, 2), filled with complete documents in order.

    A document longer than a sequence continues in the next ones, unless it is truncated; ``bounds_N``: as ``document_bounds`` has it.
    """
    bounds = bounds_N.tolist()
    spans, begin = list[tuple[int, int]](), 0
    while begin < bounds[-1]:
        last = bounds[bisect.bisect_right(bounds, begin + seq_len) - 1]  # the last end of a document that fits
        end = last if last > begin else begin + seq_len
        spans.append((begin, end))
        begin = bounds[bisect.bisect_right(bounds, begin)] if truncate and last <= begin else end
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


MIN_HELD_OUT = 4  # documents to evaluate on, if enough are short enough: a single one may not be typical


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSelection:
    """Ranges of a token file, concatenated."""

    begins_N: NDArray[np.int64]  # of each range, in the file
    ends_N: NDArray[np.int64]  # of each range, in the concatenation

    @classmethod
    def from_documents(cls, documents_N2: NDArray[np.int64]) -> "TokenSelection":
        """Build from the begin and end of documents; adjacent documents become one range."""
        begins_N, ends_N = documents_N2.T
        apart_N = begins_N[1:] != ends_N[:-1]
        first_N, last_N = np.append(True, apart_N), np.append(apart_N, True)
        return cls(begins_N[first_N], np.cumsum(ends_N[last_N] - begins_N[first_N]))

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return int(self.ends_N[-1])

    def file_ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the file that hold these tokens, in order."""
        ranges, number = list[tuple[int, int]](), int(np.searchsorted(self.ends_N, begin, "right"))
        while begin < end and number < len(self.ends_N):
            previous_end = int(self.ends_N[number - 1]) if number else 0
            stop = min(end, int(self.ends_N[number]))
            start = int(self.begins_N[number]) - previous_end
            ranges.append((start + begin, start + stop))
            begin, number = stop, number + 1
        return ranges


def split_documents(
    tokens_N: NDArray[np.uint32], n_held_out: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split documents into training and held-out ones, (N, 2): begin and end of each.

    Those held out have about ``n_held_out`` tokens and the same mix of lengths as the others: every n-th document in order of size.
    Only documents short enough to hold out ``MIN_HELD_OUT`` of them, or else one, are candidates. If they are
    too few, the end of the longest document is held out instead. Documents of one conversation, and documents kept in one sequence,
    stay together.
    """
    bounds_N = document_bounds(tokens_N)
    documents_N2 = np.stack([bounds_N[:-1], bounds_N[1:]], axis=1)
    group_N = np.cumsum(tokens_N[bounds_N[:-1]] & (SAME_CHAT | WITH_PREVIOUS) == 0) - 1  # or a document by itself
    sizes_N = np.bincount(group_N, np.diff(bounds_N)).astype(np.int64)
    for max_tokens in (n_held_out // MIN_HELD_OUT, n_held_out):
        candidates_N = rng.permutation(np.flatnonzero(sizes_N <= max_tokens))
        candidates_N = candidates_N[sizes_N[candidates_N].argsort(kind="stable")]
        share = min(1.0, n_held_out / max(1, sizes_N[candidates_N].sum()))
        quota_N = np.floor(np.arange(len(candidates_N) + 1) * share + rng.random())
        held_out_N = candidates_N[np.diff(quota_N) > 0]
        while len(held_out_N) > 1 and 2 * sizes_N[held_out_N].sum() > 3 * n_held_out:
            held_out_N = held_out_N[:-1]
        held_out_N = np.sort(held_out_N)
        if 2 * abs(sizes_N[held_out_N].sum() - n_held_out) <= n_held_out:
            is_held_out_N = np.isin(group_N, held_out_N)
            return documents_N2[~is_held_out_N], documents_N2[is_held_out_N]
    is_alone_N = np.bincount(group_N)[group_N] == 1
    if not is_alone_N.any():
        raise UserError(
            "--evaluation.fraction: too few documents to hold some out; add some, or name --evaluation.paths"
        )
    longest = int((np.diff(bounds_N) * is_alone_N).argmax())
    end = int(bounds_N[longest + 1])
    cut = end - min(n_held_out, int(end - bounds_N[longest]) // 2)
    documents_N2[longest, 1] = cut
    return documents_N2, np.array([[cut, end]])


TURN_STREAM, HOLD_OUT_STREAM = 2**32 - 1, 2**32 - 2  # seeds of random streams, distinct from the numbers of sources


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedRanges:
    """Sorted, disjoint ranges of a token file that are read but not trained on."""

    begins_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]

    @classmethod
    def from_ranges(cls, ranges: Iterable[tuple[int, int]]) -> "MaskedRanges | None":
        """Build from ranges in any order, which may overlap; None if there is none."""
        merged = list[tuple[int, int]]()
        for begin, end in sorted(ranges):
            if merged and begin <= merged[-1][1]:
                begin, end = merged[-1][0], max(merged.pop()[1], end)
            merged.append((begin, end))
        if not merged:
            return None
        begins_N, ends_N = np.array(merged, dtype=np.int64).T
        return cls(begins_N, ends_N)

    def mark(self, tokens_N: NDArray[np.uint32], begin: int) -> NDArray[np.uint32]:
        """Return tokens of the file from ``begin``, with those in the ranges marked as not trained on."""
        end = begin + len(tokens_N)
        first, last = int(np.searchsorted(self.ends_N, begin, "right")), int(np.searchsorted(self.begins_N, end))
        if first >= last:
            return tokens_N
        marked_N = np.array(tokens_N)
        for start, stop in zip(self.begins_N[first:last].tolist(), self.ends_N[first:last].tolist(), strict=True):
            marked_N[max(0, start - begin) : stop - begin] |= NOT_TRAINED
        return marked_N


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Packed sequences of a token file; each token is a target once, an isolated document's first never."""

    tokens_N: NDArray[np.uint32]  # memory-mapped
    seq_len: int
    spans_N2: NDArray[np.int64] | None = None  # first token and end of each sequence; None: every S tokens
    truncate: bool = False  # documents end with their sequence
    selection: TokenSelection | None = None  # the tokens that are read, if not all; positions count within it
    masked_ranges: MaskedRanges | None = None  # not trained on

    @property
    def n_tokens(self) -> int:
        """Number of tokens that are read."""
        return len(self.tokens_N) if self.selection is None else self.selection.n_tokens

    @property
    def n_documents(self) -> int:
        """Number of documents that begin in these tokens."""
        return sum(
            int(np.count_nonzero(self.tokens_N[b:e] & DOCUMENT_START)) for b, e in self.file_ranges(0, self.n_tokens)
        )

    @property
    def n_sequences(self) -> int:
        """Number of sequences. Without spans, tokens after the last full sequence are not read."""
        return (self.n_tokens - 1) // self.seq_len if self.spans_N2 is None else len(self.spans_N2)

    @property
    def padding(self) -> float:
        """Share of padding in all sequences."""
        if self.spans_N2 is None:
            return 0.0
        return 1 - float(np.diff(self.spans_N2).mean()) / self.seq_len

    @property
    def n_unread(self) -> int:
        """Number of tokens that are in no sequence."""
        if self.spans_N2 is None:
            return self.n_tokens - 1 - self.seq_len * self.n_sequences
        return self.n_tokens - int(np.diff(self.spans_N2).sum())

    def window(self, place: int) -> NDArray[np.uint32]:
        """Return the tokens of a sequence and the next token, S + 1; padding is a document that is not trained on."""
        begin, end = self.span(place)
        window_N = self._tokens(begin, end + (end - begin == self.seq_len))
        if len(window_N) > self.seq_len:
            return window_N
        padding = np.full(self.seq_len + 1 - len(window_N), NOT_TRAINED)
        padding[0] |= DOCUMENT_START
        return np.concatenate([window_N, padding])

    def span(self, place: int) -> tuple[int, int]:
        """Return begin and end of a sequence within the tokens that are read."""
        if self.spans_N2 is None:
            return self.seq_len * place, self.seq_len * (place + 1)
        begin, end = self.spans_N2[place].tolist()
        return begin, end

    def file_ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Map a range of the tokens that are read to ranges of the file."""
        return [(begin, end)] if self.selection is None else self.selection.file_ranges(begin, end)

    def _tokens(self, begin: int, end: int) -> NDArray[np.uint32]:
        parts = [self.tokens_N[start:stop] for start, stop in self.file_ranges(begin, end)]
        if self.masked_ranges:
            starts = [start for start, _ in self.file_ranges(begin, end)]
            parts = [self.masked_ranges.mark(part, start) for part, start in zip(parts, starts, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def hold_out(self, fraction: float, rng: np.random.Generator) -> tuple["Source", "Source"]:
        """Split into training and held-out documents, which have this share of the tokens (>= 1 sequence).

        Raises:
            UserError: There is too little data to split.
        """
        too_little = "--evaluation.fraction: there is only one sequence; add text, or name --evaluation.paths"
        if self.n_sequences < 2:
            raise UserError(too_little)
        n_held_out = min(max(round(fraction * self.n_tokens), self.seq_len), (self.n_tokens - 1) // 2)
        train_N2, held_out_N2 = split_documents(self.tokens_N, n_held_out, rng)
        train, held_out = self._select(train_N2), self._select(held_out_N2)
        if not train.n_sequences:
            raise UserError(too_little)
        if held_out.spans_N2 is None:  # all of it is read
            held_out = dataclasses.replace(held_out, spans_N2=fixed_spans(held_out.n_tokens, self.seq_len))
        return train, held_out

    def _select(self, documents_N2: NDArray[np.int64]) -> "Source":
        """Return a source of these documents only, packed in the same way."""
        spans_N2 = self.spans_N2
        if spans_N2 is not None:
            is_first_N = self.tokens_N[documents_N2[:, 0]] & WITH_PREVIOUS == 0
            bounds_N = np.append(0, np.cumsum(np.diff(documents_N2)))
            bounds_N = bounds_N[np.append(is_first_N, True)]
            spans_N2 = whole_document_spans(bounds_N, self.seq_len, truncate=self.truncate)
        return dataclasses.replace(self, spans_N2=spans_N2, selection=TokenSelection.from_documents(documents_N2))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file's path: another process opens it itself, and a pickled memory map would copy the data."""
        file = getattr(self.tokens_N, "filename", None)
        rest = (self.seq_len, self.spans_N2, self.truncate, self.selection, self.masked_ranges)
        return _open_tokens, (self.tokens_N if file is None else Path(file), *rest)


def _open_tokens(tokens: Path | NDArray[np.uint32], *rest: Any) -> Source:
    return Source(np.memmap(tokens, dtype=np.uint32, mode="r") if isinstance(tokens, Path) else tokens, *rest)


def open_source(file: Path, seq_len: int, documents: str = "split", *, truncate: bool = False) -> Source:
    """Open a token file as a source; ``documents``, ``truncate``: as in the settings.

    Raises:
        UserError: Documents that belong together would be separated, or are longer than a sequence.
    """
    source = _open_tokens(file, seq_len)
    if documents == "split" and (source.tokens_N[:CHUNK_TOKENS] & WITH_PREVIOUS).any():
        raise UserError("--data.documents: split would separate documents that belong together; use auto or whole")
    keep_whole = documents == "whole" or (documents == "auto" and needs_whole_documents(source.tokens_N))
    if not (keep_whole or truncate):
        return source
    bounds_N, joined_N = (document_bounds(source.tokens_N, joined=joined) for joined in (False, True))
    n_documents_N, sizes_N = np.diff(np.searchsorted(bounds_N, joined_N)), np.diff(joined_N)
    if (longest := int(sizes_N[n_documents_N > 1].max(initial=0))) > seq_len:
        raise UserError(
            f"--data.seq_len: documents that are kept together have up to {longest} tokens, more than {seq_len}; raise it, or have "
            "documents() of --extend yield shorter ones"
        )
    spans_N2 = whole_document_spans(joined_N, seq_len, truncate=truncate)
    return dataclasses.replace(source, spans_N2=spans_N2, truncate=truncate)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """An endless, shuffled order of the sequences of several sources.

    An epoch has as many sequences as all sources together, and ``counts`` of each. Each source is read in its own passes: a sequence
    repeats only after all others of its source were read.
    """

    sources: tuple[Source, ...]
    seed: int
    counts: tuple[int, ...]  # sequences of each source in an epoch

    @classmethod
    def from_weights(cls, sources: Sequence[Source], seed: int, weights: Sequence[float] = ()) -> "Mixture":
        """Mix by weight, rounding by largest remainder; without weights an epoch has every sequence once."""
        sizes = [source.n_sequences for source in sources]
        shares = np.array(weights or sizes, dtype=np.float64)
        exact_counts = shares / shares.sum() * sum(sizes)
        counts = np.floor(exact_counts).astype(np.int64)
        by_remainder = np.argsort(counts - exact_counts, kind="stable")
        counts[by_remainder[: sum(sizes) - int(counts.sum())]] += 1
        for number, count in enumerate(counts, 1):
            if not count:
                raise UserError(
                    f"--data.weights: an epoch of {pluralize(sum(sizes), 'sequence')} would have none of source "
                    f"{number}; raise its weight, "
                    "or leave it out"
                )
        return cls(tuple(sources), seed, tuple(counts.tolist()))

    def hold_out(self, fraction: float) -> list[tuple[Source, Source]]:
        """Split each source into training and held-out data."""
        rngs = (np.random.default_rng([self.seed, number, HOLD_OUT_STREAM]) for number in range(len(self.sources)))
        return [source.hold_out(fraction, rng) for source, rng in zip(self.sources, rngs, strict=True)]

    @property
    def n_sequences(self) -> int:
        """Number of sequences in one epoch."""
        return sum(self.counts)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source and its sequence at ``index`` of the order."""
        epoch, place = divmod(index, self.n_sequences)
        number, nth = 0, place
        if len(self.sources) > 1:
            source_N, nth_N = _epoch_turns(self.seed, epoch, self.counts)
            number, nth = int(source_N[place]), int(nth_N[place])
        size = self.sources[number].n_sequences
        n_passes, place = divmod(epoch * self.counts[number] + nth, size)
        return number, int(_pass_order(self.seed, n_passes, number, size)[place])

    def window(self, index: int) -> NDArray[np.uint32]:
        """Return the tokens at ``index`` of the order and the next token, S + 1."""
        number, place = self.locate(index)
        return self.sources[number].window(place)

    def n_filled(self, index: int) -> int:
        """Return the number of tokens at ``index`` that are not padding; at most S."""
        number, place = self.locate(index)
        begin, end = self.sources[number].span(place)
        return end - begin

    def unshuffled_window(self, place: int) -> NDArray[np.uint32]:
        """Return the tokens at a place in the concatenated sources and the next token, S + 1."""
        for source in self.sources:
            if place < source.n_sequences:
                return source.window(place)
            place -= source.n_sequences
        raise IndexError(place)


@functools.lru_cache(maxsize=64)
def _pass_order(seed: int, n_passes: int, number: int, size: int) -> NDArray[np.int64]:
    """Return the shuffled order of one pass over a source."""
    return np.random.default_rng([seed, n_passes, number]).permutation(size)


@functools.lru_cache(maxsize=2)
def _epoch_turns(seed: int, epoch: int, counts: tuple[int, ...]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return the source at each position of an epoch, and how often it came before in the epoch."""
    turns = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    source_N = np.random.default_rng([seed, epoch, TURN_STREAM]).permutation(turns)
    nth_N = np.empty(len(source_N), dtype=np.int64)
    for number, count in enumerate(counts):
        nth_N[source_N == number] = np.arange(count)
    return source_N, nth_N


OFFSETS_SUFFIX = ".files"


class DocumentRange(NamedTuple):
    """A range of documents of a file, counted from 1, inclusive."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file} {self.first}" + (f"-{self.last}" if self.last > self.first else "")


def write_offsets(tokens: Path, files: Iterable[FileOffset]) -> None:
    """Write the ``.files`` list next to a token file."""
    text = "".join(json.dumps(entry) + "\n" for entry in files)
    tokens.with_suffix(OFFSETS_SUFFIX).write_text(text, encoding="utf-8")


def read_offsets(tokens: Path) -> tuple[FileOffset, ...]:
    """Return the ``.files`` list of a token file; () if there is none."""
    return _load_offsets(tokens.with_suffix(OFFSETS_SUFFIX))


def document_names_at(mixture: Mixture, indices: Iterable[int]) -> Iterator[str]:
    """Name the documents at these indices of the order, like ``talk.jsonl 7-9`` (7th to 9th of that file)."""
    for index in indices:
        number, place = mixture.locate(index)
        yield from map(str, documents_in_sequence(mixture.sources[number], place))


def documents_in_sequence(source: Source, place: int) -> list[DocumentRange]:
    """Return the documents of a sequence; [] without a ``.files`` list."""
    name = getattr(source.tokens_N, "filename", None)
    files = read_offsets(Path(name)) if name else ()
    parts = source.file_ranges(*source.span(place))
    return [span for begin, end in parts for span in _documents_between(source.tokens_N, files, begin, end)]


def document_name(source: Source, token: int) -> str:
    """Name the document of a token; by the token's index without a ``.files`` list."""
    name = getattr(source.tokens_N, "filename", None)
    files = read_offsets(Path(name)) if name else ()
    spans = _documents_between(source.tokens_N, files, token, token + 1)
    return str(spans[0]) if spans else f"token {token}"


def _documents_between(
    tokens_N: NDArray[np.uint32], files: tuple[FileOffset, ...], begin: int, end: int
) -> list[DocumentRange]:
    number = bisect.bisect_right(files, begin, key=lambda entry: entry.token) - 1
    ranges = list[DocumentRange]()
    while 0 <= number < len(files) and files[number].token < end:
        entry = files[number]
        file_end = files[number + 1].token if number + 1 < len(files) else len(tokens_N)
        start, stop = max(begin, entry.token), min(end, file_end)
        first = entry.before + int(np.count_nonzero(tokens_N[entry.token : start + 1] & DOCUMENT_START))
        last = first + int(np.count_nonzero(tokens_N[start + 1 : stop] & DOCUMENT_START))
        if ranges and ranges[-1].file == entry.file:
            first = ranges.pop().first
        ranges.append(DocumentRange(entry.file, first, last))
        number += 1
    return ranges


@functools.lru_cache(maxsize=16)
def _load_offsets(path: Path) -> tuple[FileOffset, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(FileOffset(*entry) for entry in map(json.loads, lines))
    except (OSError, ValueError, TypeError):
        return ()
