"""What a record says, and the records of a JSON array and of CSV.

What a record says: the forms of records that are known by the names of their fields.

The records of a JSON array and of CSV, one after another: a large file is never in memory.
"""

import csv
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from llama405b.contract.errors import and_more, counted
from llama405b.contract.reader import Json

NAMED = 8  # fields of a record
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of roles; others are the same
WANTED = '{"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}]}'
ALPACA = (  # the prompts that Alpaca's fields are made for: without an input, and with one
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n",
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n",
)
APART = "\n\n"  # between a question and its answer
TEXTS = ("text", "input_text", "output_text")  # types of a message's part
SHOWN = 20  # characters before a byte that is no text
OURS = ("text", "prompt", "completion", "messages", "tools")  # what data.fields gives another name
FIELDS = {
    *OURS, "conversations", "response", "instruction", "input", "output", "question", "answer", "content",
}  # fmt: skip  # of a record: all that ``document_of`` reads


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A document: what is read but not learnt, and the text to learn."""

    prompt: str
    text: str

    @property
    def n_chars(self) -> int:
        """Its length."""
        return len(self.prompt) + len(self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, for the tokenizer's chat template: its messages, each with a role, and the tools that it may call."""

    messages: tuple[Mapping[str, Any], ...]  # as they were written
    tools: Any = None

    @property
    def n_chars(self) -> int:
        """Its length, without the roles."""
        return sum(len(str(message.get("content") or "")) for message in self.messages)


@dataclasses.dataclass(frozen=True, slots=True)
class NotUtf8:
    """What was read instead of a record, or of a document: bytes that are no text."""

    line: int  # of the text, from 1, in which the first of them is
    before: str  # the text before it, in its line
    byte: int

    @classmethod
    def of(cls, text: str) -> "NotUtf8 | None":
        """Look into a text that was read with "surrogateescape"; None if all of it is UTF-8."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            before = text[: error.start].split("\n")
            return cls(len(before), before[-1][-SHOWN:], ord(text[error.start]) - 0xDC00)
        return None

    def __str__(self) -> str:
        return f"the byte 0x{self.byte:02x} after {self.before!r} is not UTF-8"


@dataclasses.dataclass(frozen=True, slots=True)
class TooManyCells:
    """What was read instead of a record: a row of CSV with more cells than its header."""

    cells: int
    names: int

    def __str__(self) -> str:
        return f"the row has {counted(self.cells, 'cell')}, but the header has {self.names}"


Document = Text | Chat


def document_of(record: Any, names: Sequence[str] = ()) -> Document | None:
    """The document of a record; None if it has no form that is known (see docs/data.md).

    ``names``: as ``data.fields`` has them, ``prompt=instruction``; a record that lacks all of these is read without them.
    """
    if names and isinstance(record, dict):
        pairs = (name.partition("=")[::2] for name in names)
        if renamed := {ours: record[theirs] for ours, theirs in pairs if theirs in record}:
            return document_of(renamed)
    match record:
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            return Chat(tuple(map(_with_text, messages)), record.get("tools"))
        case {"conversations": [*turns]} if turns and all(map(_is_turn, turns)):
            return Chat(tuple({"role": SHAREGPT.get(t["from"], t["from"]), "content": t["value"]} for t in turns))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Text(prompt, completion)
        case {"prompt": str(question), "response": str(answer)} | {"question": str(question), "answer": str(answer)}:
            return Text(question + APART, answer)
        case {"instruction": str(instruction), "output": str(answer)}:
            context = record.get("input") or ""
            if isinstance(context, str):
                return Text(ALPACA[bool(context)].format(instruction, context), answer)
        case {"text": str(text)} | {"content": str(text)}:
            return Text("", text)
    return None


def fields_of(record: Any) -> str:
    """Name the fields that a record has, as a clause."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    names = [name for name in map(str, record) if name]
    return (
        f"its fields are {', '.join(map(repr, names[:NAMED]))}{and_more(names, NAMED)}" if names else "it has no fields"
    )


def unusable(record: Any) -> str:
    """Why a record is no document, as a clause."""
    if isinstance(record, NotUtf8 | TooManyCells):
        return str(record)
    if isinstance(record, dict) and (others := list(filter(None, map(_part_of_no_text, _items(record, "messages"))))):
        return f"a message has a part of type {others[0]!r}, and only text can be trained on"
    return f"not {WANTED}, but {fields_of(record)}"


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is text, where it was a list of parts of text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_message(message: Any) -> bool:
    """Whether it has a role, and text or calls of tools; templates know no images."""
    match message:
        case {"role": str(), "content": str()}:
            return True
        case {"role": str(), "content": [_, *_] as parts}:
            return all(map(_is_text, parts))
        case {"role": str(), "tool_calls": [_, *_]}:
            return message.get("content") is None
    return False


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") in TEXTS


def _part_of_no_text(message: Any) -> str:
    """The type of a message's first part that is no text; '' if it has none."""
    parts = _items(message, "content") if isinstance(message, dict) else []
    return next((str(part.get("type")) for part in parts if isinstance(part, dict) and not _is_text(part)), "")


def _items(fields: Mapping[str, Any], name: str) -> list[Any]:
    return found if isinstance(found := fields.get(name), list) else []


def _is_turn(found: Any) -> bool:
    match found:
        case {"from": str(), "value": str()}:
            return True
    return False


CHUNK = 1 << 16  # characters read at a time, at least
BLANKS = " \t\r\n"  # of JSON
DELIMITERS = ",;\t"


class NotWholeError(OSError):
    """A file that is not what it began as, or breaks off."""


def items_of(text: TextIO) -> Iterator[Json | NotUtf8]:
    """Yield the items of a JSON array."""
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
    """Yield the line that each row begins in, from 1, and its fields by the names in the first row."""
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
