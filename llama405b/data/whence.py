"""Which documents are in a sequence: to name those of a step that went wrong. Knows token files; not ranks.

A token file has a list beside it, ``.files``: a line per file of text, with its first token.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llama405b.data.encode import FIRST
from llama405b.data.sources import Mixture, Source

SUFFIX = ".files"


def write_files(tokens: Path, files: Iterable[tuple[int, str]]) -> None:
    """Write the list beside a token file: the first token of each file of text."""
    text = "".join(json.dumps(entry) + "\n" for entry in files)
    tokens.with_suffix(SUFFIX).write_text(text, encoding="utf-8")


def read_files(tokens: Path) -> tuple[tuple[int, str], ...]:
    """Return the list beside a token file; nothing if it is not there."""
    return _files(tokens.with_suffix(SUFFIX))


def documents_at(mixture: Mixture, indices: Iterable[int]) -> list[str]:
    """Name the documents at these places of the order, as ``talk.jsonl 7-9``: the 7th to 9th document of that file."""
    found = list[str]()
    for index in indices:
        number, place = mixture.at(index)
        found += documents_in(mixture.sources[number], place)
    return found


def documents_in(source: Source, place: int) -> list[str]:
    """Name the documents of a sequence; none if the list of files is not there."""
    tokens_N = source.tokens_N
    name = getattr(tokens_N, "filename", None)
    files = read_files(Path(name)) if name else ()
    begin, end = source.span(place)
    found = list[str]()
    bounds = [first for first, _ in files[1:]] + [len(tokens_N)] * bool(files)
    for (first, file), after in zip(files, bounds, strict=True):
        start, stop = max(begin, first), min(end, after)
        if start < stop:
            nth = np.count_nonzero(tokens_N[first : start + 1] & FIRST)
            last = nth + np.count_nonzero(tokens_N[start + 1 : stop] & FIRST)
            found.append(f"{file} {nth}" if nth == last else f"{file} {nth}-{last}")
    return found


@functools.lru_cache(maxsize=16)
def _files(path: Path) -> tuple[tuple[int, str], ...]:
    try:
        return tuple((first, file) for first, file in map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    except (OSError, ValueError):
        return ()
