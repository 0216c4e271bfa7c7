"""Which documents are in a sequence: to name those of a step that went wrong. Knows token files; not ranks.

A token file has a list beside it, ``.files``: where in the tokens a file of text begins or, every ``APART`` tokens, goes on.
"""

import bisect
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama405b.data.encode import FIRST, FileOffset
from llama405b.data.sources import Mixture, Source

SUFFIX = ".files"


class Span(NamedTuple):
    """Documents of a file, from 1."""

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file} {self.first}" + (f"-{self.last}" if self.last > self.first else "")


def write_offsets(tokens: Path, files: Iterable[FileOffset]) -> None:
    """Write the list beside a token file."""
    text = "".join(json.dumps(entry) + "\n" for entry in files)
    tokens.with_suffix(SUFFIX).write_text(text, encoding="utf-8")


def read_offsets(tokens: Path) -> tuple[FileOffset, ...]:
    """Return the list beside a token file; nothing if it is not there."""
    return _files(tokens.with_suffix(SUFFIX))


def documents_at(mixture: Mixture, indices: Iterable[int]) -> Iterator[str]:
    """Name the documents at these places of the order, as ``talk.jsonl 7-9``: the 7th to 9th document of that file."""
    for index in indices:
        number, place = mixture.at(index)
        yield from map(str, documents_in(mixture.sources[number], place))


def documents_in(source: Source, place: int) -> list[Span]:
    """Return the documents of a sequence; none if the list of files is not there."""
    name = getattr(source.tokens_N, "filename", None)
    files = read_offsets(Path(name)) if name else ()
    parts = source.ranges(*source.span(place))
    return [span for begin, end in parts for span in _documents_between(source.tokens_N, files, begin, end)]


def name_of(source: Source, token: int) -> str:
    """Name the document that a token of the file is in; by its place where the list of files is not there."""
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
