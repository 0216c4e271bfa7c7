"""Parse records into documents by their field names, and stream records of JSON arrays and CSV.

A large file is never in memory as a whole. Knows records and texts; not tokens.
"""

import csv
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from llama405b.contract.errors import and_more, counted, short
from llama405b.contract.reader import Json
from llama405b.formats.conversation import Chat, UnknownFormError, UnusableRecordError, chat_of, list_of

NAMED = 8  # fields listed in a message
WANTED = '{"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}]}'
ALPACA = (  # Alpaca's prompts: without and with an input
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n",
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n",
)
APART = "\n\n"  # between a question and its answer
CONVERSATIONS = ("messages", "conversations", "conversation")
OF_CHATS = (
    "system",
    "tools",
    "functions",
    "chat_template_kwargs",
    "parallel_tool_calls",
)  # the last one does not affect the text
OF_LEAD = ("system", "system_prompt")
OF_ALPACA = ("instruction", "input", "output", "history", *OF_LEAD)
OF_DOLLY = ("instruction", "context", "response", "history", *OF_LEAD)
ASKED = (  # fields of a question, its answer, and optional context after the question
    ("prompt", "completion", ""), ("instruction", "output", "input"), ("instruction", "response", "context"), ("prompt", "response", ""),
    ("question", "answer", ""), ("question", "response", ""),
)  # fmt: skip
PAIR = ("user", "assistant")
QUESTIONS = (("prompt", "response"), ("question", "answer"), ("question", "response"))
PREFERENCES = ("chosen", "rejected")
NOT_TEXT = ("image", "images", "audio", "audios", "video", "videos")
SHOWN = 20  # characters shown before a byte that is not UTF-8
OURS = ("text", "prompt", "completion", "messages", "tools")  # names that data.fields can map
FIELDS = {
    *OURS, *CONVERSATIONS, *OF_CHATS, *PREFERENCES, "response", "instruction", "input", "output", "question", "answer", "content",
    "context", "history", "system_prompt",
}  # fmt: skip  # of a record: all that ``reading_of`` looks at, but for what is no text


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A document: a prompt that is not trained on, and the text that is."""

    prompt: str
    text: str

    @property
    def n_chars(self) -> int:
        """Length in characters."""
        return len(self.prompt) + len(self.text)


@dataclasses.dataclass(frozen=True, slots=True)
class NotUtf8:
    """Stands for a record or document that is not valid UTF-8."""

    line: int  # of the first bad byte, from 1
    before: str  # text before the byte, in its line
    byte: int

    @classmethod
    def of(cls, text: str) -> "NotUtf8 | None":
        """Check a text that was decoded with "surrogateescape"; None if it is valid UTF-8."""
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
    """Stands for a CSV row with more cells than the header."""

    cells: int
    names: int

    def __str__(self) -> str:
        return f"the row has {counted(self.cells, 'cell')}, but the header has {self.names}"


Document = Text | Chat


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The document of a record, and the record's unused fields."""

    document: Document
    unread: tuple[str, ...] = ()


def document_of(record: Any, names: Sequence[str] = ()) -> Document | None:
    """Return the document of a record; None if its form is unknown or it cannot be used (see docs/data.md)."""
    try:
        return reading_of(record, names).document
    except UnusableRecordError:
        return None


def reading_of(record: Any, names: Sequence[str] = (), *, chat: bool = False) -> Reading:
    """Parse a record into a document.

    ``names``: as in ``data.fields``, like ``prompt=instruction``; ignored for a record that has none of these fields. ``chat``:
    prompt and completion become a conversation, as ``data.prompts`` sets it.

    Raises:
        UnusableRecordError: Its form is unknown, or it cannot be trained on.
    """
    if isinstance(record, NotUtf8 | TooManyCells):
        raise UnusableRecordError(str(record))
    if not isinstance(record, dict):
        raise UnknownFormError(f"not {WANTED}, but it is not a JSON object")
    pairs = (name.partition("=")[::2] for name in names)
    renamed = {ours: record[theirs] for ours, theirs in pairs if theirs in record}
    fields = renamed and {name: record[name] for name in OF_CHATS if name in record} | renamed
    found = _read(fields or {str(name): value for name, value in record.items()}, chat=chat)
    if found is None:
        raise UnknownFormError(f"not {WANTED}, but {fields_of(record)}")
    document, used = found
    theirs = {name.partition("=")[2] for name in names}
    return Reading(
        document, tuple(name for name in map(str, record) if name and name.lower() not in used and name not in theirs)
    )


def _read(record: Mapping[str, Any], *, chat: bool) -> tuple[Document, tuple[str, ...]] | None:
    """Return a record's document and the fields used, in lower case; None if its form is unknown."""
    if all(map(record.get, PREFERENCES)):
        raise UnusableRecordError(
            f"it has {' and '.join(map(repr, PREFERENCES))}, but preference pairs are not supported; keep one answer"
        )
    if other := next((name for name in NOT_TEXT if record.get(name)), ""):
        raise UnusableRecordError(f"it has {other!r}, but only text can be trained on")
    for name in CONVERSATIONS:
        if (turns := list_of(record.get(name))) is not None:
            return chat_of(turns, record), (name, *OF_CHATS)
    match record:
        case {"prompt": [*asked], "completion": [*answered]}:
            return chat_of([*asked, *answered], record, len(asked)), ("prompt", "completion", *OF_CHATS)
    return (_chat_of(record) if chat else None) or _text_of(record)


def _chat_of(record: Mapping[str, Any]) -> tuple[Chat, tuple[str, ...]] | None:
    """As ``_text_of``, but return prompt and completion as a conversation."""
    small = {name.lower(): value for name, value in record.items()}
    for question, answer, context in ASKED:
        asked, answered = small.get(question), small.get(answer)
        if isinstance(asked, str) and isinstance(answered, str):
            pairs = [*_history(small), ("\n".join(filter(None, (asked, small.get(context)))), answered)]
            turns = [{"role": role, "content": text} for pair in pairs for role, text in zip(PAIR, pair, strict=True)]
            used = (question, answer, context, "history", *OF_LEAD)
            return chat_of(turns, {"system": small.get("system") or small.get("system_prompt")}), used
    return None


def _text_of(record: Mapping[str, Any]) -> tuple[Text, tuple[str, ...]] | None:
    """As ``_read``, for a record that is not a conversation; the case of field names does not matter."""
    small = {name.lower(): value for name, value in record.items()}
    lead = small.get("system") or small.get("system_prompt") or ""
    before = f"{lead}{APART}" if lead and isinstance(lead, str) else ""
    match small:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Text(before + prompt, completion), ("prompt", "completion", *OF_LEAD)
        case {"instruction": str(instruction), "output": str(answer)}:
            return _alpaca(small, instruction, small.get("input") or "", answer), OF_ALPACA
        case {"instruction": str(instruction), "response": str(answer)}:
            return _alpaca(small, instruction, small.get("context") or "", answer), OF_DOLLY
    for question, answer in QUESTIONS:
        match (small.get(question), small.get(answer)):
            case (str(asked), str(answered)):
                return Text(before + asked + APART, answered), (question, answer, *OF_LEAD)
    for name in ("text", "content"):
        if isinstance(text := small.get(name), str):
            return Text("", text), (name,)
    return None


def _alpaca(record: Mapping[str, Any], instruction: str, context: Any, answer: str) -> Text:
    """Return an Alpaca record as text; its system text replaces the first sentence, earlier turns come first."""
    if not isinstance(context, str):
        raise UnusableRecordError(f"its input is {short(str(context))}, not text")
    system = record.get("system") or record.get("system_prompt")
    prompt = ALPACA[bool(context)].format(instruction, context)
    if system:
        prompt = f"{system}{APART}{prompt.partition(APART)[2]}"
    blocks = [ALPACA[0].format(asked).partition(APART)[2] + answered + APART for asked, answered in _history(record)]
    begin, _, rest = prompt.partition(APART)
    return Text(f"{begin}{APART}{''.join(blocks)}{rest}", answer)


def _history(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the earlier questions and answers of an Alpaca record."""
    turns = record.get("history") or []
    pairs = list_of(turns)
    if pairs is None or not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        raise UnusableRecordError("its history is not a list of pairs of texts")
    return [(asked, answered) for asked, answered in pairs]


def fields_of(record: Any) -> str:
    """Return a clause that names the fields of a record."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    names = [name for name in map(str, record) if name]
    if empty := [name for name in names if record[name] is None and name.lower() in FIELDS]:
        return f"its {empty[0]!r} is null"
    return (
        f"its fields are {', '.join(map(repr, names[:NAMED]))}{and_more(names, NAMED)}" if names else "it has no fields"
    )


CHUNK = 1 << 16  # characters read at a time, at least
BLANKS = " \t\r\n"  # of JSON
DELIMITERS = ",;\t"


class NotWholeError(OSError):
    """A truncated or malformed file."""


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
    """Reads the items of a JSON array one by one from a text stream."""

    def __init__(self, text: TextIO) -> None:
        self.text, self.rest = text, ""

    def peek(self) -> str:
        """Return the next non-blank character, at which ``rest`` then begins; '' at the end."""
        while not (rest := self.rest.lstrip(BLANKS)) and (more := self.text.read(CHUNK)):
            self.rest = more
        self.rest = rest
        return rest[:1]

    def take(self, number: int) -> Json | NotUtf8:
        """Return the next item."""
        decoder = json.JSONDecoder()
        self.peek()
        while True:
            try:
                item, end = decoder.raw_decode(self.rest)
            except (ValueError, RecursionError):
                end = len(self.rest)
            if end < len(self.rest):  # else the item may continue in the next chunk
                read, self.rest = self.rest[:end], self.rest[end:]
                return NotUtf8.of(read) or item
            if not (more := self.text.read(max(CHUNK, len(self.rest)))):
                raise NotWholeError(f"object {number} of the array is not JSON, or breaks off")
            self.rest += more


def rows_of_csv(text: TextIO) -> Iterator[tuple[int, Json | NotUtf8 | TooManyCells]]:
    """Yield the first line of each row, from 1, and the row as a dict by the header's names."""
    # The default limit of 128 KiB would refuse long texts.
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
