"""Find the files of ``data.paths`` and detect their formats from content.

Standard library only: launch runs the same checks on the head before anything starts. Knows nothing of tokens or ranks.
"""

import codecs
import contextlib
import enum
import glob
import gzip
import io
import itertools
import json
import re
import shlex
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TextIO

from llama405b.contract.errors import UserError, reason_of
from llama405b.contract.files import check_link, is_passed_over, walk
from llama405b.contract.reader import Json
from llama405b.formats.conversation import Chat, UnknownFormError, UnusableRecordError
from llama405b.formats.document import (
    NotUtf8,
    NotWholeError,
    TooManyCells,
    document_of,
    items_of,
    reading_of,
    rows_of_csv,
)

HUB = "hf://"  # prefix of a path that names a dataset of the Hub
OWNER_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # as the Hub names models and datasets
STDLIB = "stdlib"  # a path that works on every machine: the source of Python's standard library
NO_TEMPLATE = (
    "is a conversation, but the tokenizer has no chat template; name a file with one in --data.chat_template, or start from "
    "an instruction-tuned model"
)
NAME_FIELDS = "say which fields to read, like --data.fields prompt=instruction,completion=output"
ARRAY_OF_OBJECTS = re.compile(rb"\[\s*\{")  # how such an array begins; other text may begin so, too
UTF_16 = "iconv -f utf-16 -t utf-8 {0} >{0}.utf-8"
CONVERT = "convert the file, like `iconv -f latin1 -t utf-8`"
GZIP = b"\x1f\x8b"
NOT_READ = {  # first bytes of unsupported files -> what they are, and a command that converts them
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "zstd -d {}"),
    b"\xfd7zXZ\0": ("packed by xz", "xz -dk {}"),
    b"BZh": ("packed by bzip2", "bzip2 -dk {}"),
    b"PK\x03\x04": ("a zip archive", "unzip {}"),
    codecs.BOM_UTF16_LE: ("text in UTF-16", UTF_16),
    codecs.BOM_UTF16_BE: ("text in UTF-16", UTF_16),
}
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"  # written by `datasets` next to its data files
HEAD_BYTES = 8192  # enough to tell text from binary
FIRST_FILES = 1000  # of a path, opened by launch: opening all would take minutes
TEXT_BYTES = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x100)) - {0x7F})
TOKENIZED, TOKENS = "tokens.json", "tokens.bin"  # what `data tokenize` writes
UNREADABLE = (OSError, EOFError, zlib.error)  # EOFError, zlib.error: a truncated or damaged gzip file


FirstRows = Callable[[BinaryIO, Sequence[str]], Iterable[Json | NotUtf8]]  # of a table, with data.fields


class Stat(Protocol):
    """The part of ``os.stat_result`` that is used."""

    @property
    def st_size(self) -> int: ...  # noqa: D102
    @property
    def st_mtime_ns(self) -> int: ...  # noqa: D102


class File(Protocol):
    """A file that documents are read from: a ``Path`` or an object that behaves like one."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def suffix(self) -> str: ...  # noqa: D102
    def stat(self) -> Stat: ...  # noqa: D102
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...  # noqa: D102


class Form(enum.Enum):
    """How a file stores documents."""

    TEXT = "one document"
    RECORDS = "JSON Lines: a document per line"
    ARRAY = "a JSON array: a document per object"
    CSV = "CSV or TSV with a header: a document per row"
    TABLE = "Parquet or Arrow: a document per row"
    OWN = "what the user's module reads"


def expand(paths: Sequence[str]) -> list[Path]:
    """List the files that ``data.paths`` names, in a fixed order.

    Raises:
        UserError: A path matches no file.
    """
    return [file for path in paths for file in sorted(_matches(path))]


def is_tokenized(paths: Sequence[str]) -> bool:
    """Return whether the paths name an output directory of `data tokenize`.

    Raises:
        UserError: It is given with other paths in one source.
    """
    made = [path for path in paths if (Path(path) / TOKENIZED).is_file()]
    if made and len(paths) > 1:
        raise UserError(
            f"--data.paths: {made[0]} is already tokenized and cannot share a source: give each path a weight"
        )
    return bool(made)


def check_paths(
    paths: Sequence[str],
    names: Sequence[str] = (),
    *,
    skip: bool = False,
    has_template: bool = True,
    first_rows: FirstRows = lambda *_: (),
    passes: Callable[[Path], bool] = lambda _: False,
) -> None:
    """Check that the files of these paths can be trained on, by the first record of each.

    ``names``, ``skip``: as in ``data.fields`` and ``data.bad_records``; ``has_template``: whether conversations can be rendered;
    ``first_rows``: reads tables, which the standard library cannot (default: their rows are not checked); ``passes``: files to skip.

    Raises:
        UserError: A path matches no file, or one of its first files has no known format or cannot be used.
    """
    for path in paths:
        if path.startswith(HUB) or is_tokenized([path]):  # the first needs the network
            continue
        for file in itertools.islice(itertools.filterfalse(passes, _matches(path)), FIRST_FILES):
            form = form_of(file)
            if form is Form.TEXT:
                continue
            with reading(file) as raw:
                is_table = form is Form.TABLE
                records = enumerate(first_rows(raw, names), 1) if is_table else numbered(raw, form)
                for number, record in itertools.islice(records, 1):
                    try:
                        document = reading_of(record, names).document
                    except UnusableRecordError as why:
                        if not skip:
                            raise refusal(f"{file}:{number}", str(why), remedy_of_form(record, why)) from None
                        continue
                    if isinstance(document, Chat) and not has_template:
                        raise UserError(f"{file}:{number}: {NO_TEMPLATE}")


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
    """Detect from the content (JSON Lines also from the name) how a file stores documents.

    Raises:
        UserError: It cannot be read, or has no known format.
    """
    with reading(file) as raw:
        packed = raw.read(len(ARROW_FILE))
        raw.seek(0)
        head = _unpacked(raw).read(HEAD_BYTES)
    if packed.startswith((PARQUET, ARROW_FILE)) or (packed.startswith(ARROW_STREAM) and file.suffix == ".arrow"):
        return Form.TABLE
    if (is_binary := _is_binary(head)) or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        for magic, (what, command) in NOT_READ.items():
            if head.startswith(magic):
                raise UserError(f"{file}: {what}; convert it: `{command.format(shlex.quote(str(file)))}`")
        if _is_utf_16(head):
            raise UserError(f"{file}: probably text in UTF-16; convert it: `{UTF_16.format(shlex.quote(str(file)))}`")
    if is_binary:
        raise UserError(
            f"{file}: neither text nor JSON Lines (plain or in gzip) nor Parquet; convert it, or choose files with a glob "
            "like 'corpus/**/*.md'"
        )
    name, begin = file.name.lower().removesuffix(".gz"), head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if name.endswith((".jsonl", ".ndjson")):
        is_array = ARRAY_OF_OBJECTS.match(begin) and _begins_with_objects(file)
        return Form.ARRAY if is_array else Form.RECORDS
    if name.endswith((".csv", ".tsv")):
        return Form.CSV
    is_json = name.endswith(".json")
    if begin.startswith(b"{") and _begins_with_records(file, is_json=is_json):
        return Form.RECORDS
    if ARRAY_OF_OBJECTS.match(begin) and _begins_with_objects(file):
        return Form.ARRAY
    if is_json:
        raise UserError(
            f"{file}: JSON, but neither an array of objects nor an object per line; write its records as one of these, or "
            "choose other files with a glob like 'corpus/**/*.md'"
        )
    return Form.TEXT


def is_splittable(file: File) -> bool:
    """Return whether a file can be read from any offset: JSON Lines without compression.

    Raises:
        UserError: It cannot be read, or has no known format.
    """
    if form_of(file) is not Form.RECORDS:
        return False
    with reading(file) as raw:
        return raw.read(len(GZIP)) != GZIP


@contextlib.contextmanager
def reading(file: File) -> Iterator[BinaryIO]:
    """Open the raw bytes of a file.

    Raises:
        UserError: It cannot be opened, or a read within the block fails.
    """
    try:
        with file.open("rb") as raw:
            yield raw
    except UNREADABLE as error:
        raise UserError(f"{file}: cannot be read ({reason_of(error)}); correct it, or leave it out") from None


def text_of(raw: BinaryIO) -> TextIO:
    """Open raw bytes as text, with unchanged line ends; ``NotUtf8.of`` finds bytes that are not UTF-8."""
    return io.TextIOWrapper(_unpacked(raw), "utf-8-sig", "surrogateescape", newline="")


def numbered(raw: BinaryIO, form: Form) -> Iterator[tuple[int, Json | NotUtf8 | TooManyCells]]:
    """Yield line (or array index) from 1 and record, None if not JSON, of a file that is not a table.

    Raises:
        OSError: An array or a row is truncated or malformed.
    """
    match form:
        case Form.ARRAY:
            yield from enumerate(items_of(text_of(raw)), 1)
        case Form.CSV:
            yield from rows_of_csv(text_of(raw))
        case _:
            yield from ((n, record_of(line)) for n, line in enumerate(text_of(raw), 1) if line.strip())


def refusal(where: object, why: str, remedy: str = "") -> UserError:
    """Return the error of a record that cannot be used; ``remedy``: for a first record, as all may be alike."""
    skip = "leave such records out with --data.bad_records skip"
    return UserError(f"{where}: {why}; correct it, or {remedy or skip}")


def remedy_of_form(record: object, why: object = "") -> str:
    """Return what to do if the first record of a file is not a document; ``why``: as ``reading_of`` raises it."""
    match record:
        case NotUtf8():
            return CONVERT
        case TooManyCells():
            return "quote what has a delimiter or a line break in it"
    return NAME_FIELDS if isinstance(why, UnknownFormError) else ""


def record_of(line: str) -> Json | NotUtf8:
    """Parse a line of JSON Lines; None if it is not JSON."""
    return NotUtf8.of(line) or _parsed(line)


def _parsed(line: str) -> Json:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _matches(path: str) -> Iterator[Path]:
    """Yield the files that a path names, unordered."""
    found = _named(path)
    first = next(found, None)
    if first is None:
        hub = f", or write {HUB}datasets/{path} for the Hub's" if OWNER_NAME.fullmatch(path) else ""
        raise UserError(f"--data.paths: {path!r} matches no file; check the path{hub}")
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
        return _below(root)
    return _of_pattern(path)


def _below(root: Path) -> Iterator[Path]:
    """Yield the files below a directory; a link to something that is read below it anyway is skipped."""
    real = root.resolve()

    def is_read_there(link: Path) -> bool:
        target = link.resolve() if link.is_symlink() else Path("/")
        return target.is_relative_to(real) and not any(map(is_passed_over, target.relative_to(real).parts))

    for here, below, files in walk(root):
        below[:] = [name for name in below if not is_read_there(here / name)]
        paths = (here / name for name in files if not is_passed_over(name))
        yield from (path for path in paths if path.is_file() and not is_read_there(path))


def _of_pattern(pattern: str) -> Iterator[Path]:
    for path in map(Path, glob.iglob(pattern, recursive=True)):  # noqa: PTH207
        if path.is_symlink():
            check_link(path)
        if path.is_file():
            yield path


def _unpacked(raw: BinaryIO) -> BinaryIO:
    is_gzip = raw.read(len(GZIP)) == GZIP
    raw.seek(0)
    if is_gzip:
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return raw


def _is_binary(head: bytes) -> bool:
    """Return whether bytes hold a NUL, or control characters in text that is not UTF-8 (Latin-1 has none)."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return bool(head.translate(None, TEXT_BYTES))
    return b"\0" in head


def _is_utf_16(head: bytes) -> bool:
    """Return whether every other byte is NUL and the others are text, as in ASCII encoded as UTF-16."""
    pairs = (head[::2], head[1::2]), (head[1::2], head[::2])
    return any(
        letters and 10 * nuls.count(0) >= 9 * len(nuls) and not letters.translate(None, TEXT_BYTES)
        for letters, nuls in pairs
    )


def _begins_with_records(file: File, *, is_json: bool) -> bool:
    """Return whether the first line is a document, or the first two (one, if .json by name) are JSON objects."""
    with reading(file) as raw:
        lines = itertools.islice((line for line in text_of(raw) if line.strip()), 2)
        first, *more = map(_parsed, lines)
    if not isinstance(first, dict):
        return False
    return is_json or document_of(first) is not None or any(isinstance(each, dict) for each in more)


def _begins_with_objects(file: File) -> bool:
    """Return whether a file is an array whose first item is an object."""
    with reading(file) as raw, contextlib.suppress(NotWholeError):
        return isinstance(next(items_of(text_of(raw)), None), dict | NotUtf8)
    return False
