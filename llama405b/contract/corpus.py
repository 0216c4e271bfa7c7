"""Which files ``data.paths`` names, and what each is: told by its content, so that nothing is trained as what it is not.

Standard library only: launch asks the same of the head before anything starts. Knows nothing of tokens or ranks.
"""

import codecs
import contextlib
import dataclasses
import enum
import glob
import gzip
import io
import itertools
import json
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TextIO

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import reason_of
from llama405b.contract.reader import Json

HUB = "hf://"  # what a path begins with that names a dataset of the Hub
STDLIB = "stdlib"  # the one path that every machine has: the source of Python's standard library
GZIP = b"\x1f\x8b"
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"  # what `datasets` writes beside its files
HEAD_BYTES = 8192  # enough to tell text from binary
FIRST_FILES = 1000  # of a path, that launch looks into: opening all would take minutes
TEXT_BYTES = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x100)) - {0x7F})
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of roles; others are the same
WANTED = '{"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}]}'
TOKENIZED, TOKENS = "tokens.json", "tokens.bin"  # what `data tokenize` writes
FIELDS = {
    "messages",
    "tools",
    "conversations",
    "prompt",
    "completion",
    "text",
}  # of a record: all that ``document_of`` reads
UNREADABLE = (OSError, EOFError, zlib.error)  # the last two: a gzip file that is cut short or damaged


class Stat(Protocol):
    """What is asked of a file."""

    @property
    def st_size(self) -> int: ...  # noqa: D102
    @property
    def st_mtime_ns(self) -> int: ...  # noqa: D102


class File(Protocol):
    """What documents are read from: a ``Path``, or what behaves like one."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def suffix(self) -> str: ...  # noqa: D102
    def stat(self) -> Stat: ...  # noqa: D102
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...  # noqa: D102


class Form(enum.Enum):
    """How a file holds documents."""

    TEXT = "one document"
    RECORDS = "JSON Lines: a document per line"
    TABLE = "Parquet or Arrow: a document per row"


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


Document = Text | Chat


def expand(paths: Sequence[str]) -> list[Path]:
    """List the files that ``data.paths`` names, in a fixed order.

    Raises:
        UserError: A path matches no file.
    """
    return [file for path in paths for file in sorted(_matches(path))]


def is_tokenized(paths: Sequence[str]) -> bool:
    """Whether the paths name what `data tokenize` has written.

    Raises:
        UserError: Beside other paths, which are one source with it.
    """
    made = [path for path in paths if (Path(path) / TOKENIZED).is_file()]
    if made and len(paths) > 1:
        raise UserError(
            f"--data.paths: {made[0]} is tokenized already, so it is a source of its own: give each path a weight"
        )
    return bool(made)


def check_paths(paths: Sequence[str]) -> None:
    """Check without reading them that the paths name files that can be trained on.

    Raises:
        UserError: A path matches no file, or one of its first files has no form that is known.
    """
    for path in paths:
        if path.startswith(HUB) or is_tokenized([path]):  # the first needs the network
            continue
        for file in itertools.islice(_matches(path), FIRST_FILES):
            form_of(file)


def check_template(path: Path) -> Path:
    """Return the file of ``data.chat_template``.

    Raises:
        UserError: It cannot be read.
    """
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--data.chat_template: {path}: cannot be read ({reason_of(error)}); correct the path"
        ) from None
    return path


def form_of(file: File) -> Form:
    """Tell by content (JSON Lines also by name) how a file holds documents.

    Raises:
        UserError: It cannot be read, or is none of these.
    """
    with reading(file) as raw:
        packed = raw.read(len(ARROW_FILE))
        raw.seek(0)
        head = _unpacked(raw).read(HEAD_BYTES)
    if packed.startswith((PARQUET, ARROW_FILE)) or (packed.startswith(ARROW_STREAM) and file.suffix == ".arrow"):
        return Form.TABLE
    if _is_binary(head):
        raise UserError(
            f"{file}: neither text nor JSON Lines (plain or in gzip) nor Parquet; convert it, or choose files with a glob "
            "like 'corpus/**/*.md'"
        )
    if file.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return Form.RECORDS
    if head.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"{") and _begins_with_records(file):
        return Form.RECORDS
    return Form.TEXT


def is_splittable(file: File) -> bool:
    """Whether a file can be read from any byte on: JSON Lines that are not packed.

    Raises:
        UserError: It cannot be read, or has no form that is known.
    """
    if form_of(file) is not Form.RECORDS:
        return False
    with reading(file) as raw:
        return raw.read(len(GZIP)) != GZIP


@contextlib.contextmanager
def reading(file: File) -> Iterator[BinaryIO]:
    """Open a file's bytes, as they are stored.

    Raises:
        UserError: It cannot be opened; or not be read, inside.
    """
    try:
        with file.open("rb") as raw:
            yield raw
    except UNREADABLE as error:
        raise UserError(f"{file}: cannot be read ({reason_of(error)}); correct it, or leave it out") from None


def text_of(raw: BinaryIO) -> TextIO:
    """The text of a file's bytes, unpacked; bytes that are not UTF-8 are replaced."""
    return io.TextIOWrapper(_unpacked(raw), "utf-8-sig", "replace")


def document_of(record: Any) -> Document | None:
    """The document of a JSON Lines record; None if it has no form that is known (``WANTED``, or ShareGPT's ``conversations``)."""
    match record:
        case {"messages": [*messages]} if messages and all(map(_is_message, messages)):
            return Chat(tuple(messages), record.get("tools"))
        case {"conversations": [*turns]} if turns and all(map(_is_turn, turns)):
            return Chat(tuple({"role": SHAREGPT.get(t["from"], t["from"]), "content": t["value"]} for t in turns))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Text(prompt, completion)
        case {"text": str(text)}:
            return Text("", text)
    return None


def _is_message(message: Any) -> bool:
    """Whether it has a role, and text or calls of tools; templates know no images."""
    match message:
        case {"role": str(), "content": str()}:
            return True
        case {"role": str(), "tool_calls": [_, *_]}:
            return message.get("content") is None
    return False


def _is_turn(found: Any) -> bool:
    match found:
        case {"from": str(), "value": str()}:
            return True
    return False


def parsed(line: str) -> Json:
    """A line as JSON; None if it is not."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _matches(path: str) -> Iterator[Path]:
    """The files that a path names, in no order.

    Raises:
        UserError: There is none.
    """
    found = _named(path)
    first = next(found, None)
    if first is None:
        raise UserError(f"--data.paths: {path!r} matches no file; check the path")
    return itertools.chain([first], found)


def _named(path: str) -> Iterator[Path]:
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return (p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    root = Path(path)
    if (root / SAVED_SPLITS).is_file():
        splits = ", ".join(sorted(each.name for each in root.iterdir() if each.is_dir()))
        raise UserError(
            f"--data.paths: {path!r} is a dataset of several splits ({splits}); name one, like {root / 'train'}"
        )
    if (root / SAVED_DATASET).is_file() and (found := list(root.glob("data-*.arrow"))):
        return iter(found)
    if root.is_file():
        return iter([root])
    if root.is_dir():
        return (p for p in root.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(root)))
    return (Path(p) for p in glob.iglob(path, recursive=True) if Path(p).is_file())  # noqa: PTH207


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _unpacked(raw: BinaryIO) -> BinaryIO:
    is_gzip = raw.read(len(GZIP)) == GZIP
    raw.seek(0)
    if is_gzip:
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return raw


def _is_binary(head: bytes) -> bool:
    """Whether bytes hold a NUL, or control characters in what is not UTF-8: Latin-1 has none."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return bool(head.translate(None, TEXT_BYTES))
    return b"\0" in head


def _begins_with_records(file: File) -> bool:
    """Whether the first line is a document, or the first two lines are JSON objects: a .json file may be one long line."""
    with reading(file) as raw:
        lines = itertools.islice((line for line in text_of(raw) if line.strip()), 2)
        first, *more = map(parsed, lines)
    return document_of(first) is not None or (isinstance(first, dict) and any(isinstance(each, dict) for each in more))
