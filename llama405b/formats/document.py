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

from llama405b.contract.errors import and_more, pluralize, shorten
from llama405b.contract.reader import Json
from llama405b.formats.conversation import Chat, UnknownFormatError, UnusableRecordError, parse_chat, parse_list

MAX_NAMED = 8  # fields listed in a message
EXPECTED = '{"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}]}'
ALPACA = (  # Alpaca's prompts: without and with an input
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n",
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n",
)
BLANK_LINE = "\n\n"  # between a question and its answer
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")
CHAT_FIELDS = (
    "system",
    "tools",
    "functions",
    "chat_template_kwargs",
    "parallel_tool_calls",
)  # the last one does not affect the text
SYSTEM_FIELDS = ("system", "system_prompt")
ALPACA_FIELDS = ("instruction", "input", "output", "history", *SYSTEM_FIELDS)
DOLLY_FIELDS = ("instruction", "context", "response", "history", *SYSTEM_FIELDS)
PROMPT_FIELDS = (  # fields of a question, its answer, and optional context after the question
    ("prompt", "completion", ""), ("instruction", "output", "input"), ("instruction", "response", "context"), ("prompt", "response", ""),
    ("question", "answer", ""), ("question", "response", ""),
)  # fmt: skip
PAIR_ROLES = ("user", "assistant")
QUESTION_FIELDS = (("prompt", "response"), ("question", "answer"), ("question", "response"))
PREFERENCE_FIELDS = ("chosen", "rejected")
MEDIA_FIELDS = ("image", "images", "audio", "audios", "video", "videos")
CONTEXT_CHARS = 20  # characters shown before a byte that is not UTF-8
FIELD_NAMES = ("text", "prompt", "completion", "messages", "tools")  # names that data.fields can map
KNOWN_FIELDS = {
    *FIELD_NAMES, *CONVERSATION_FIELDS, *CHAT_FIELDS, *PREFERENCE_FIELDS, "response", "instruction", "input", "output", "question",
    "answer", "content", "context", "history", "system_prompt",
}  # fmt: skip  # of a record: all that ``parse_record`` looks at, but for what is no text


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
    context: str  # text before the byte, in its line
    byte: int

    @classmethod
    def from_text(cls, text: str) -> "NotUtf8 | None":
        """Check a text that was decoded with "surrogateescape"; None if it is valid UTF-8."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            lines = text[: error.start].split("\n")
            return cls(len(lines), lines[-1][-CONTEXT_CHARS:], ord(text[error.start]) - 0xDC00)
        return None

    def __str__(self) -> str:
        return f"the byte 0x{self.byte:02x} after {self.context!r} is not UTF-8"


@dataclasses.dataclass(frozen=True, slots=True)
class TooManyCells:
    """Stands for a CSV row with more cells than the header."""

    n_cells: int
    n_columns: int

    def __str__(self) -> str:
        return f"the row has {pluralize(self.n_cells, 'cell')}, but the header has {self.n_columns}"


Document = Text | Chat


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedRecord:
    """The document of a record, and the record's unused fields."""

    document: Document
    unread: tuple[str, ...] = ()


def parse_document(record: Any, names: Sequence[str] = ()) -> Document | None:
    """Return the document of a record; None if its form is unknown or it cannot be used (see docs/data.md)."""
    try:
        return parse_record(record, names).document
    except UnusableRecordError:
        return None


def parse_record(record: Any, names: Sequence[str] = (), *, chat: bool = False) -> ParsedRecord:
    """Parse a record into a document.

    ``names``: as in ``data.fields``, like ``prompt=instruction``; ignored for a record that has none of these fields. ``chat``:
    prompt and completion become a conversation, as ``data.prompts`` sets it.

    Raises:
        UnusableRecordError: Its form is unknown, or it cannot be trained on.
    """
    if isinstance(record, NotUtf8 | TooManyCells):
        raise UnusableRecordError(str(record))
    if not isinstance(record, dict):
        raise UnknownFormatError(f"not {EXPECTED}, but it is not a JSON object")
    pairs = (name.partition("=")[::2] for name in names)
    renamed = {target: record[source] for target, source in pairs if source in record}
    fields = renamed and {name: record[name] for name in CHAT_FIELDS if name in record} | renamed
    parsed = _parse_fields(fields or {str(name): value for name, value in record.items()}, chat=chat)
    if parsed is None:
        raise UnknownFormatError(f"not {EXPECTED}, but {describe_fields(record)}")
    document, used_fields = parsed
    source_names = {name.partition("=")[2] for name in names}
    return ParsedRecord(
        document,
        tuple(
            name for name in map(str, record) if name and name.lower() not in used_fields and name not in source_names
        ),
    )


def _parse_fields(record: Mapping[str, Any], *, chat: bool) -> tuple[Document, tuple[str, ...]] | None:
    """Return a record's document and the fields used, in lower case; None if its form is unknown."""
    if all(map(record.get, PREFERENCE_FIELDS)):
        raise UnusableRecordError(
            f"it has {' and '.join(map(repr, PREFERENCE_FIELDS))}, but preference pairs are not supported; keep one answer"
        )
    if media_field := next((name for name in MEDIA_FIELDS if record.get(name)), ""):
        raise UnusableRecordError(f"it has {media_field!r}, but only text can be trained on")
    for name in CONVERSATION_FIELDS:
        if (turns := parse_list(record.get(name))) is not None:
            return parse_chat(turns, record), (name, *CHAT_FIELDS)
    match record:
        case {"prompt": [*asked], "completion": [*answered]}:
            return parse_chat([*asked, *answered], record, len(asked)), ("prompt", "completion", *CHAT_FIELDS)
    return (_parse_pair_chat(record) if chat else None) or _parse_text(record)


def _parse_pair_chat(record: Mapping[str, Any]) -> tuple[Chat, tuple[str, ...]] | None:
    """As ``_parse_text``, but return prompt and completion as a conversation."""
    fields = {name.lower(): value for name, value in record.items()}
    for question, answer, context in PROMPT_FIELDS:
        question_text, answer_text = fields.get(question), fields.get(answer)
        if isinstance(question_text, str) and isinstance(answer_text, str):
            pairs = [
                *_parse_history(fields),
                ("\n".join(filter(None, (question_text, fields.get(context)))), answer_text),
            ]
            turns = [
                {"role": role, "content": text} for pair in pairs for role, text in zip(PAIR_ROLES, pair, strict=True)
            ]
            used_fields = (question, answer, context, "history", *SYSTEM_FIELDS)
            return parse_chat(turns, {"system": fields.get("system") or fields.get("system_prompt")}), used_fields
    return None


def _parse_text(record: Mapping[str, Any]) -> tuple[Text, tuple[str, ...]] | None:
    """As ``_parse_fields``, for a record that is not a conversation; the case of field names does not matter."""
    fields = {name.lower(): value for name, value in record.items()}
    system = fields.get("system") or fields.get("system_prompt") or ""
    prefix = f"{system}{BLANK_LINE}" if system and isinstance(system, str) else ""
    match fields:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Text(prefix + prompt, completion), ("prompt", "completion", *SYSTEM_FIELDS)
        case {"instruction": str(instruction), "output": str(answer)}:
            return _parse_alpaca(fields, instruction, fields.get("input") or "", answer), ALPACA_FIELDS
        case {"instruction": str(instruction), "response": str(answer)}:
            return _parse_alpaca(fields, instruction, fields.get("context") or "", answer), DOLLY_FIELDS
    for question, answer in QUESTION_FIELDS:
        match (fields.get(question), fields.get(answer)):
            case (str(question_text), str(answer_text)):
                return Text(prefix + question_text + BLANK_LINE, answer_text), (question, answer, *SYSTEM_FIELDS)
    for name in ("text", "content"):
        if isinstance(text := fields.get(name), str):
            return Text("", text), (name,)
    return None


def _parse_alpaca(record: Mapping[str, Any], instruction: str, context: Any, answer: str) -> Text:
    """Return an Alpaca record as text; its system text replaces the first sentence, earlier turns come first."""
    if not isinstance(context, str):
        raise UnusableRecordError(f"its input is {shorten(str(context))}, not text")
    system = record.get("system") or record.get("system_prompt")
    prompt = ALPACA[bool(context)].format(instruction, context)
    if system:
        prompt = f"{system}{BLANK_LINE}{prompt.partition(BLANK_LINE)[2]}"
    blocks = [
        ALPACA[0].format(question).partition(BLANK_LINE)[2] + reply + BLANK_LINE
        for question, reply in _parse_history(record)
    ]
    begin, _, rest = prompt.partition(BLANK_LINE)
    return Text(f"{begin}{BLANK_LINE}{''.join(blocks)}{rest}", answer)


def _parse_history(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the earlier questions and answers of an Alpaca record."""
    turns = record.get("history") or []
    pairs = parse_list(turns)
    if pairs is None or not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        raise UnusableRecordError("its history is not a list of pairs of texts")
    return [(question, answer) for question, answer in pairs]


def describe_fields(record: Any) -> str:
    """Return a clause that names the fields of a record."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    names = [name for name in map(str, record) if name]
    if empty := [name for name in names if record[name] is None and name.lower() in KNOWN_FIELDS]:
        return f"its {empty[0]!r} is null"
    return (
        f"its fields are {', '.join(map(repr, names[:MAX_NAMED]))}{and_more(names, MAX_NAMED)}"
        if names
        else "it has no fields"
    )


READ_CHARS = 1 << 16  # characters read at a time, at least
BLANKS = " \t\r\n"  # of JSON
DELIMITERS = ",;\t"


class BrokenFileError(OSError):
    """A truncated or malformed file."""


def iterate_array(text: TextIO) -> Iterator[Json | NotUtf8]:
    """Yield the items of a JSON array."""
    array = _ArrayReader(text)
    number, expected = 0, "["
    while (delimiter := array.peek()) != "]" or not number:
        if delimiter != expected:
            raise BrokenFileError(f"no {expected!r} after object {number}" if number else "not a JSON array")
        array.rest = array.rest[1:]
        if not number and array.peek() == "]":
            break
        number, expected = number + 1, ","
        yield array.read_item(number)
    array.rest = array.rest[1:]
    if array.peek():
        raise BrokenFileError(
            f"more follows the array of {pluralize(number, 'object')}; write all in one array, or an object per line"
        )


class _ArrayReader:
    """Reads the items of a JSON array one by one from a text stream."""

    def __init__(self, text: TextIO) -> None:
        self.text, self.rest = text, ""

    def peek(self) -> str:
        """Return the next non-blank character, at which ``rest`` then begins; '' at the end."""
        while not (rest := self.rest.lstrip(BLANKS)) and (chunk := self.text.read(READ_CHARS)):
            self.rest = chunk
        self.rest = rest
        return rest[:1]

    def read_item(self, number: int) -> Json | NotUtf8:
        """Return the next item."""
        decoder = json.JSONDecoder()
        self.peek()
        while True:
            try:
                item, end = decoder.raw_decode(self.rest)
            except (ValueError, RecursionError):
                end = len(self.rest)
            if end < len(self.rest):  # else the item may continue in the next chunk
                item_text, self.rest = self.rest[:end], self.rest[end:]
                return NotUtf8.from_text(item_text) or item
            if not (chunk := self.text.read(max(READ_CHARS, len(self.rest)))):
                raise BrokenFileError(f"object {number} of the array is not JSON, or breaks off")
            self.rest += chunk


def iterate_csv_rows(text: TextIO) -> Iterator[tuple[int, Json | NotUtf8 | TooManyCells]]:
    """Yield the first line of each row, from 1, and the row as a dict by the header's names."""
    # The default limit of 128 KiB would refuse long texts.
    csv.field_size_limit(sys.maxsize)
    first = text.readline()
    lines = csv.reader(itertools.chain([first], text), delimiter=max(DELIMITERS, key=first.count), strict=True)
    try:
        names = [name.strip() for name in next(lines, [])]
        if duplicates := [name for name in names if name and names.count(name) > 1]:
            raise BrokenFileError(f"two columns are called {duplicates[0]!r}")
        begin, bad_header = lines.line_num + 1, NotUtf8.from_text(",".join(names))
        for row in lines:
            if row:
                yield begin, bad_header or NotUtf8.from_text(",".join(row)) or _make_record(names, row)
            begin = lines.line_num + 1
    except csv.Error as error:
        raise BrokenFileError(f"line {lines.line_num}: {error}") from None


def _make_record(names: Sequence[str], row: Sequence[str]) -> Json | TooManyCells:
    return dict(zip(names, row, strict=False)) if len(row) <= len(names) else TooManyCells(len(row), len(names))
