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

from llama405b.contract.errors import UserError, counted
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT, SAME, FileOffset

CHUNK = 64 << 20  # tokens scanned at a time


def has_prompts(tokens_N: NDArray[np.uint32]) -> bool:
    """Return whether any token is not trained on, first tokens of documents aside."""
    return any(bool((tokens_N[i : i + CHUNK] & MARKS == NOT_LEARNT).any()) for i in range(0, len(tokens_N), CHUNK))


def bounds_of(tokens_N: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the begin of each document and the end of the last."""
    begins = [np.flatnonzero(tokens_N[i : i + CHUNK] & FIRST) + i for i in range(0, len(tokens_N), CHUNK)]
    return np.unique(np.concatenate([[0], *begins, [len(tokens_N)]]))


def filled_spans(n_tokens: int, seq_len: int) -> NDArray[np.int64]:
    """Return begin and end of each sequence, (N, 2): every ``seq_len`` tokens, and the remainder."""
    begins_N = np.arange(0, n_tokens, seq_len)
    return np.stack([begins_N, np.minimum(begins_N + seq_len, n_tokens)], axis=1)


def whole_spans(bounds_N: NDArray[np.int64], seq_len: int, *, truncate: bool) -> NDArray[np.int64]:
    """Return begin and end of each sequence, (N, 2), filled with complete documents in order.

    A document longer than a sequence continues in the next ones, unless it is truncated; ``bounds_N``: as ``bounds_of`` has it.
    """
    bounds = bounds_N.tolist()
    spans, begin = list[tuple[int, int]](), 0
    while begin < bounds[-1]:
        last = bounds[bisect.bisect_right(bounds, begin + seq_len) - 1]  # the last end of a document that fits
        end = last if last > begin else begin + seq_len
        spans.append((begin, end))
        begin = bounds[bisect.bisect_right(bounds, begin)] if truncate and last <= begin else end
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


ENOUGH = 4  # documents to evaluate on, if enough are short enough: a single one may not be typical


@dataclasses.dataclass(frozen=True, slots=True)
class Excerpt:
    """Ranges of a token file, concatenated."""

    begins_N: NDArray[np.int64]  # of each range, in the file
    ends_N: NDArray[np.int64]  # of each range, in the concatenation

    @classmethod
    def of(cls, documents_N2: NDArray[np.int64]) -> "Excerpt":
        """Build from the begin and end of documents; adjacent documents become one range."""
        begins_N, ends_N = documents_N2.T
        apart_N = begins_N[1:] != ends_N[:-1]
        first_N, last_N = np.append(True, apart_N), np.append(apart_N, True)
        return cls(begins_N[first_N], np.cumsum(ends_N[last_N] - begins_N[first_N]))

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return int(self.ends_N[-1])

    def ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the file that hold these tokens, in order."""
        found, number = list[tuple[int, int]](), int(np.searchsorted(self.ends_N, begin, "right"))
        while begin < end and number < len(self.ends_N):
            before = int(self.ends_N[number - 1]) if number else 0
            stop = min(end, int(self.ends_N[number]))
            start = int(self.begins_N[number]) - before
            found.append((start + begin, start + stop))
            begin, number = stop, number + 1
        return found


def divided(
    tokens_N: NDArray[np.uint32], n_held: int, draw: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split documents into training and held-out ones, (N, 2): begin and end of each.

    Those held out have about ``n_held`` tokens and the same mix of lengths as the others: every n-th document in order of size.
    Only documents short enough to hold out ``ENOUGH`` of them, or else one, are candidates. If they are
    too few, the end of the longest document is held out instead. Documents of one conversation stay together.
    """
    bounds_N = bounds_of(tokens_N)
    documents_N2 = np.stack([bounds_N[:-1], bounds_N[1:]], axis=1)
    which_N = np.cumsum(tokens_N[bounds_N[:-1]] & SAME == 0) - 1  # conversation, or document that is none
    sizes_N = np.bincount(which_N, np.diff(bounds_N)).astype(np.int64)
    for most in (n_held // ENOUGH, n_held):
        some_N = draw.permutation(np.flatnonzero(sizes_N <= most))
        some_N = some_N[sizes_N[some_N].argsort(kind="stable")]
        share = min(1.0, n_held / max(1, sizes_N[some_N].sum()))
        turns_N = np.floor(np.arange(len(some_N) + 1) * share + draw.random())
        held_N = some_N[np.diff(turns_N) > 0]
        while len(held_N) > 1 and 2 * sizes_N[held_N].sum() > 3 * n_held:
            held_N = held_N[:-1]
        held_N = np.sort(held_N)
        if 2 * abs(sizes_N[held_N].sum() - n_held) <= n_held:
            is_held_N = np.isin(which_N, held_N)
            return documents_N2[~is_held_N], documents_N2[is_held_N]
    longest = int(np.diff(bounds_N).argmax())
    end = int(bounds_N[longest + 1])
    cut = end - min(n_held, int(end - bounds_N[longest]) // 2)
    documents_N2[longest, 1] = cut
    return documents_N2, np.array([[cut, end]])


TURNS, HELD = 2**32 - 1, 2**32 - 2  # seeds of random streams, distinct from the numbers of sources


@dataclasses.dataclass(frozen=True, slots=True)
class Masked:
    """Sorted, disjoint ranges of a token file that are read but not trained on."""

    begins_N: NDArray[np.int64]
    ends_N: NDArray[np.int64]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "Masked | None":
        """Build from ranges in any order, which may overlap; None if there is none."""
        apart = list[tuple[int, int]]()
        for begin, end in sorted(ranges):
            if apart and begin <= apart[-1][1]:
                begin, end = apart[-1][0], max(apart.pop()[1], end)
            apart.append((begin, end))
        if not apart:
            return None
        begins_N, ends_N = np.array(apart, dtype=np.int64).T
        return cls(begins_N, ends_N)

    def marked(self, tokens_N: NDArray[np.uint32], begin: int) -> NDArray[np.uint32]:
        """Return tokens of the file from ``begin``, with those in the ranges marked as not trained on."""
        end = begin + len(tokens_N)
        first, last = int(np.searchsorted(self.ends_N, begin, "right")), int(np.searchsorted(self.begins_N, end))
        if first >= last:
            return tokens_N
        found = np.array(tokens_N)
        for start, stop in zip(self.begins_N[first:last].tolist(), self.ends_N[first:last].tolist(), strict=True):
            found[max(0, start - begin) : stop - begin] |= NOT_LEARNT
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Packed sequences of a token file; each token is a target once, an isolated document's first never."""

    tokens_N: NDArray[np.uint32]  # memory-mapped
    seq_len: int
    spans_N2: NDArray[np.int64] | None = None  # first token and end of each sequence; None: every S tokens
    truncate: bool = False  # documents end with their sequence
    excerpt: Excerpt | None = None  # the tokens that are read, if not all; positions count within it
    masked: Masked | None = None  # not trained on

    @property
    def n_tokens(self) -> int:
        """Number of tokens that are read."""
        return len(self.tokens_N) if self.excerpt is None else self.excerpt.n_tokens

    @property
    def n_documents(self) -> int:
        """Number of documents that begin in these tokens."""
        return sum(int(np.count_nonzero(self.tokens_N[b:e] & FIRST)) for b, e in self.ranges(0, self.n_tokens))

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
    def unread(self) -> int:
        """Number of tokens that are in no sequence."""
        if self.spans_N2 is None:
            return self.n_tokens - 1 - self.seq_len * self.n_sequences
        return self.n_tokens - int(np.diff(self.spans_N2).sum())

    def window(self, place: int) -> NDArray[np.uint32]:
        """Return the tokens of a sequence and the next token, S + 1; padding is a document that is not trained on."""
        begin, end = self.span(place)
        found = self._tokens(begin, end + (end - begin == self.seq_len))
        if len(found) > self.seq_len:
            return found
        padding = np.full(self.seq_len + 1 - len(found), NOT_LEARNT)
        padding[0] |= FIRST
        return np.concatenate([found, padding])

    def span(self, place: int) -> tuple[int, int]:
        """Return begin and end of a sequence within the tokens that are read."""
        if self.spans_N2 is None:
            return self.seq_len * place, self.seq_len * (place + 1)
        begin, end = self.spans_N2[place].tolist()
        return begin, end

    def ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Map a range of the tokens that are read to ranges of the file."""
        return [(begin, end)] if self.excerpt is None else self.excerpt.ranges(begin, end)

    def _tokens(self, begin: int, end: int) -> NDArray[np.uint32]:
        parts = [self.tokens_N[start:stop] for start, stop in self.ranges(begin, end)]
        if self.masked:
            starts = [start for start, _ in self.ranges(begin, end)]
            parts = [self.masked.marked(part, start) for part, start in zip(parts, starts, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def hold_out(self, fraction: float, draw: np.random.Generator) -> tuple["Source", "Source"]:
        """Split into training and held-out documents, which have this share of the tokens (>= 1 sequence).

        Raises:
            UserError: There is too little data to split.
        """
        too_little = "--evaluation.fraction: there is only one sequence; add text, or name --evaluation.paths"
        if self.n_sequences < 2:
            raise UserError(too_little)
        n_held = min(max(round(fraction * self.n_tokens), self.seq_len), (self.n_tokens - 1) // 2)
        kept_N2, held_N2 = divided(self.tokens_N, n_held, draw)
        kept, held = self._of(kept_N2), self._of(held_N2)
        if not kept.n_sequences:
            raise UserError(too_little)
        if held.spans_N2 is None:  # all of it is read
            held = dataclasses.replace(held, spans_N2=filled_spans(held.n_tokens, self.seq_len))
        return kept, held

    def _of(self, documents_N2: NDArray[np.int64]) -> "Source":
        """Return a source of these documents only, packed in the same way."""
        spans_N2 = self.spans_N2
        if spans_N2 is not None:
            bounds_N = np.append(0, np.cumsum(np.diff(documents_N2)))
            spans_N2 = whole_spans(bounds_N, self.seq_len, truncate=self.truncate)
        return dataclasses.replace(self, spans_N2=spans_N2, excerpt=Excerpt.of(documents_N2))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file's path: another process opens it itself, and a pickled memory map would copy the data."""
        file = getattr(self.tokens_N, "filename", None)
        rest = (self.seq_len, self.spans_N2, self.truncate, self.excerpt, self.masked)
        return _opened, (self.tokens_N if file is None else Path(file), *rest)


def _opened(tokens: Path | NDArray[np.uint32], *rest: Any) -> Source:
    return Source(np.memmap(tokens, dtype=np.uint32, mode="r") if isinstance(tokens, Path) else tokens, *rest)


def open_source(file: Path, seq_len: int, documents: str = "split", *, truncate: bool = False) -> Source:
    """Open a token file as a source; ``documents``, ``truncate``: as in the settings."""
    source = _opened(file, seq_len)
    whole = documents == "whole" or (documents == "auto" and has_prompts(source.tokens_N))
    if not (whole or truncate):
        return source
    spans_N2 = whole_spans(bounds_of(source.tokens_N), seq_len, truncate=truncate)
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
    def of(cls, sources: Sequence[Source], seed: int, weights: Sequence[float] = ()) -> "Mixture":
        """Mix by weight, rounding by largest remainder; without weights an epoch has every sequence once."""
        sizes = [source.n_sequences for source in sources]
        shares = np.array(weights or sizes, dtype=np.float64)
        exact = shares / shares.sum() * sum(sizes)
        counts = np.floor(exact).astype(np.int64)
        most_left = np.argsort(counts - exact, kind="stable")
        counts[most_left[: sum(sizes) - int(counts.sum())]] += 1
        for number, count in enumerate(counts, 1):
            if not count:
                raise UserError(
                    f"--data.weights: an epoch of {counted(sum(sizes), 'sequence')} would have none of source {number}; raise its weight, "
                    "or leave it out"
                )
        return cls(tuple(sources), seed, tuple(counts.tolist()))

    def hold_out(self, fraction: float) -> list[tuple[Source, Source]]:
        """Split each source into training and held-out data."""
        draws = (np.random.default_rng([self.seed, number, HELD]) for number in range(len(self.sources)))
        return [source.hold_out(fraction, draw) for source, draw in zip(self.sources, draws, strict=True)]

    @property
    def n_sequences(self) -> int:
        """Number of sequences in one epoch."""
        return sum(self.counts)

    def at(self, index: int) -> tuple[int, int]:
        """Return the source and its sequence at ``index`` of the order."""
        epoch, place = divmod(index, self.n_sequences)
        number, nth = 0, place
        if len(self.sources) > 1:
            which_N, nth_N = _turns(self.seed, epoch, self.counts)
            number, nth = int(which_N[place]), int(nth_N[place])
        size = self.sources[number].n_sequences
        passed, place = divmod(epoch * self.counts[number] + nth, size)
        return number, int(_order(self.seed, passed, number, size)[place])

    def window(self, index: int) -> NDArray[np.uint32]:
        """Return the tokens at ``index`` of the order and the next token, S + 1."""
        number, place = self.at(index)
        return self.sources[number].window(place)

    def filled(self, index: int) -> int:
        """Return the number of tokens at ``index`` that are not padding; at most S."""
        number, place = self.at(index)
        begin, end = self.sources[number].span(place)
        return end - begin

    def in_order(self, place: int) -> NDArray[np.uint32]:
        """Return the tokens at a place in the concatenated sources and the next token, S + 1."""
        for source in self.sources:
            if place < source.n_sequences:
                return source.window(place)
            place -= source.n_sequences
        raise IndexError(place)


@functools.lru_cache(maxsize=64)
def _order(seed: int, passed: int, number: int, size: int) -> NDArray[np.int64]:
    """Return the shuffled order of one pass over a source."""
    return np.random.default_rng([seed, passed, number]).permutation(size)


@functools.lru_cache(maxsize=2)
def _turns(seed: int, epoch: int, counts: tuple[int, ...]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return the source at each position of an epoch, and how often it came before in the epoch."""
    turns = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    which_N = np.random.default_rng([seed, epoch, TURNS]).permutation(turns)
    nth_N = np.empty(len(which_N), dtype=np.int64)
    for number, count in enumerate(counts):
        nth_N[which_N == number] = np.arange(count)
    return which_N, nth_N


SUFFIX = ".files"


class Span(NamedTuple):
    """A range of documents of a file, counted from 1, inclusive."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file} {self.first}" + (f"-{self.last}" if self.last > self.first else "")


def write_offsets(tokens: Path, files: Iterable[FileOffset]) -> None:
    """Write the ``.files`` list next to a token file."""
    text = "".join(json.dumps(entry) + "\n" for entry in files)
    tokens.with_suffix(SUFFIX).write_text(text, encoding="utf-8")


def read_offsets(tokens: Path) -> tuple[FileOffset, ...]:
    """Return the ``.files`` list of a token file; () if there is none."""
    return _files(tokens.with_suffix(SUFFIX))


def documents_at(mixture: Mixture, indices: Iterable[int]) -> Iterator[str]:
    """Name the documents at these indices of the order, like ``talk.jsonl 7-9`` (7th to 9th of that file)."""
    for index in indices:
        number, place = mixture.at(index)
        yield from map(str, documents_in(mixture.sources[number], place))


def documents_in(source: Source, place: int) -> list[Span]:
    """Return the documents of a sequence; [] without a ``.files`` list."""
    name = getattr(source.tokens_N, "filename", None)
    files = read_offsets(Path(name)) if name else ()
    parts = source.ranges(*source.span(place))
    return [span for begin, end in parts for span in _documents_between(source.tokens_N, files, begin, end)]


def name_of(source: Source, token: int) -> str:
    """Name the document of a token; by the token's index without a ``.files`` list."""
    name = getattr(source.tokens_N, "filename", None)
    files = read_offsets(Path(name)) if name else ()
    spans = _documents_between(source.tokens_N, files, token, token + 1)
    return str(spans[0]) if spans else f"token {token}"


def _documents_between(tokens_N: NDArray[np.uint32], files: tuple[FileOffset, ...], begin: int, end: int) -> list[Span]:
    at = bisect.bisect_right(files, begin, key=lambda entry: entry.token) - 1
    found = list[Span]()
    while 0 <= at < len(files) and files[at].token < end:
        entry = files[at]
        after = files[at + 1].token if at + 1 < len(files) else len(tokens_N)
        start, stop = max(begin, entry.token), min(end, after)
        first = entry.before + int(np.count_nonzero(tokens_N[entry.token : start + 1] & FIRST))
        last = first + int(np.count_nonzero(tokens_N[start + 1 : stop] & FIRST))
        if found and found[-1].file == entry.file:
            first = found.pop().first
        found.append(Span(entry.file, first, last))
        at += 1
    return found


@functools.lru_cache(maxsize=16)
def _files(path: Path) -> tuple[FileOffset, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(FileOffset(*map_entry) for map_entry in map(json.loads, lines))
    except (OSError, ValueError, TypeError):
        return ()
