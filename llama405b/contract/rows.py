"""The records of a JSON array and of CSV, one after another: a large file is never in memory. Knows text alone."""

import csv
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from llama405b.contract.document import NotUtf8, TooManyCells
from llama405b.contract.phrases import counted
from llama405b.contract.reader import Json

CHUNK = 1 << 16  # characters read at a time, at least
BLANKS = " \t\r\n"  # of JSON
DELIMITERS = ",;\t"


class NotWholeError(OSError):
    """A file that is not what it began as, or breaks off."""


def items_of(text: TextIO) -> Iterator[Json | NotUtf8]:
    """Yield the items of a JSON array.

    Raises:
        NotWholeError: It is none, not whole, or not all of the text.
    """
    found = _Items(text)
    number, expected = 0, "["
    while (mark := found.peek()) != "]" or not number:
        if mark != expected:
            raise NotWholeError(f"no {expected!r} after object {number}" if number else "not a JSON array")
        found.rest = found.rest[1:]
        if not number and found.peek() == "]":
            break
        number, expected = number + 1, ","
        yield found.take(number)
    found.rest = found.rest[1:]
    if found.peek():
        raise NotWholeError(
            f"more follows the array of {counted(number, 'object')}; write all in one array, or an object per line"
        )


class _Items:
    """The text of an array that has not been read as items yet."""

    def __init__(self, text: TextIO) -> None:
        self.text, self.rest = text, ""

    def peek(self) -> str:
        """Return the next character that is no blank, with which ``rest`` then begins; '' at the end."""
        while not (rest := self.rest.lstrip(BLANKS)) and (more := self.text.read(CHUNK)):
            self.rest = more
        self.rest = rest
        return rest[:1]

    def take(self, number: int) -> Json | NotUtf8:
        """Return the item that comes next."""
        decoder = json.JSONDecoder()
        self.peek()
        while True:
            try:
                item, end = decoder.raw_decode(self.rest)
            except (ValueError, RecursionError):
                end = len(self.rest)
            if end < len(self.rest):  # else it may go on
                read, self.rest = self.rest[:end], self.rest[end:]
                return NotUtf8.of(read) or item
            if not (more := self.text.read(max(CHUNK, len(self.rest)))):
                raise NotWholeError(f"object {number} of the array is not JSON, or breaks off")
            self.rest += more


def rows_of_csv(text: TextIO) -> Iterator[tuple[int, Json | NotUtf8 | TooManyCells]]:
    """Yield the line that each row begins in, from 1, and its fields by the names in the first row.

    Raises:
        NotWholeError: A quotation mark is missing, or two columns have one name.
    """
    csv.field_size_limit(sys.maxsize)
    first = text.readline()
    lines = csv.reader(itertools.chain([first], text), delimiter=max(DELIMITERS, key=first.count), strict=True)
    try:
        names = [name.strip() for name in next(lines, [])]
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise NotWholeError(f"two columns are called {twice[0]!r}")
        begin, bad = lines.line_num + 1, NotUtf8.of(",".join(names))
        for row in lines:
            if row:
                yield begin, bad or NotUtf8.of(",".join(row)) or _record(names, row)
            begin = lines.line_num + 1
    except csv.Error as error:
        raise NotWholeError(f"line {lines.line_num}: {error}") from None


def _record(names: Sequence[str], row: Sequence[str]) -> Json | TooManyCells:
    return dict(zip(names, row, strict=False)) if len(row) <= len(names) else TooManyCells(len(row), len(names))
