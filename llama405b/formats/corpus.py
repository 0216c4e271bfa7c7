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
from llama405b.contract.files import check_link, is_hidden_or_system, walk
from llama405b.contract.reader import Json
from llama405b.formats.conversation import Chat, UnknownFormatError, UnusableRecordError
from llama405b.formats.document import (
    BrokenFileError,
    NotUtf8,
    TooManyCells,
    iterate_array,
    iterate_csv_rows,
    parse_document,
    parse_record,
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
UTF_16_COMMAND = "iconv -f utf-16 -t utf-8 {0} >{0}.utf-8"
CONVERT_HINT = "convert the file, like `iconv -f latin1 -t utf-8`"
GZIP = b"\x1f\x8b"
UNSUPPORTED = {  # first bytes of unsupported files -> what they are, and a command that converts them
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "zstd -d {}"),
    b"\xfd7zXZ\0": ("packed by xz", "xz -dk {}"),
    b"BZh": ("packed by bzip2", "bzip2 -dk {}"),
    b"PK\x03\x04": ("a zip archive", "unzip {}"),
    codecs.BOM_UTF16_LE: ("text in UTF-16", UTF_16_COMMAND),
    codecs.BOM_UTF16_BE: ("text in UTF-16", UTF_16_COMMAND),
}
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"  # written by `datasets` next to its data files
HEAD_BYTES = 8192  # enough to tell text from binary
MAX_CHECKED_FILES = 1000  # of a path, opened by launch: opening all would take minutes
TEXT_BYTES = bytes({7, 8, 9, 10, 12, 13, 27} | set(range(0x20, 0x100)) - {0x7F})
TOKENIZED, TOKENS = "tokens.json", "tokens.bin"  # what `data tokenize` writes
READ_ERRORS = (OSError, EOFError, zlib.error)  # EOFError, zlib.error: a truncated or damaged gzip file


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


class FileFormat(enum.Enum):
    """How a file stores documents."""

    TEXT = "one document"
    RECORDS = "JSON Lines: a document per line"
    ARRAY = "a JSON array: a document per object"
    CSV = "CSV or TSV with a header: a document per row"
    TABLE = "Parquet or Arrow: a document per row"
    USER = "what the user's module reads"


def expand_paths(paths: Sequence[str]) -> list[Path]:
    """List the files that ``data.paths`` names, in a fixed order.

    Raises:
        UserError: A path matches no file.
    """
    return [file for path in paths for file in sorted(_match_path(path))]


def is_tokenized(paths: Sequence[str]) -> bool:
    """Return whether the paths name an output directory of `data tokenize`.

    Raises:
        UserError: It is given with other paths in one source.
    """
    tokenized_paths = [path for path in paths if (Path(path) / TOKENIZED).is_file()]
    if tokenized_paths and len(paths) > 1:
        raise UserError(
            f"--data.paths: {tokenized_paths[0]} is already tokenized and cannot share a source: give each path a weight"
        )
    return bool(tokenized_paths)


def check_paths(
    paths: Sequence[str],
    names: Sequence[str] = (),
    *,
    skip: bool = False,
    has_template: bool = True,
    first_rows: FirstRows = lambda *_: (),
    is_exempt: Callable[[Path], bool] = lambda _: False,
) -> None:
    """Check that the files of these paths can be trained on, by the first record of each.

    ``names``, ``skip``: as in ``data.fields`` and ``data.bad_records``; ``has_template``: whether conversations can be rendered;
    ``first_rows``: reads tables, which the standard library cannot (default: their rows are not checked); ``is_exempt``: files to skip.

    Raises:
        UserError: A path matches no file, or one of its first files has no known format or cannot be used.
    """
    for path in paths:
        if path.startswith(HUB) or is_tokenized([path]):  # the first needs the network
            continue
        for file in itertools.islice(itertools.filterfalse(is_exempt, _match_path(path)), MAX_CHECKED_FILES):
            file_format = detect_format(file)
            if file_format is FileFormat.TEXT:
                continue
            with open_stored(file) as raw:
                is_table = file_format is FileFormat.TABLE
                records = enumerate(first_rows(raw, names), 1) if is_table else iterate_records(raw, file_format)
                for number, record in itertools.islice(records, 1):
                    try:
                        document = parse_record(record, names).document
                    except UnusableRecordError as error:
                        if not skip:
                            raise record_error(f"{file}:{number}", str(error), format_remedy(record, error)) from None
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


def detect_format(file: File) -> FileFormat:
    """Detect from the content (JSON Lines also from the name) how a file stores documents.

    Raises:
        UserError: It cannot be read, or has no known format.
    """
    with open_stored(file) as raw:
        magic_bytes = raw.read(len(ARROW_FILE))
        raw.seek(0)
        head = _gunzip(raw).read(HEAD_BYTES)
    if magic_bytes.startswith((PARQUET, ARROW_FILE)) or (
        magic_bytes.startswith(ARROW_STREAM) and file.suffix == ".arrow"
    ):
        return FileFormat.TABLE
    if (is_binary := _is_binary(head)) or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        for magic, (description, command) in UNSUPPORTED.items():
            if head.startswith(magic):
                raise UserError(f"{file}: {description}; convert it: `{command.format(shlex.quote(str(file)))}`")
        if _is_utf_16(head):
            raise UserError(
                f"{file}: probably text in UTF-16; convert it: `{UTF_16_COMMAND.format(shlex.quote(str(file)))}`"
            )
    if is_binary:
        raise UserError(
            f"{file}: neither text nor JSON Lines (plain or in gzip) nor Parquet; convert it, or choose files with a glob "
            "like 'corpus/**/*.md'"
        )
    name, start = file.name.lower().removesuffix(".gz"), head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if name.endswith((".jsonl", ".ndjson")):
        is_array = ARRAY_OF_OBJECTS.match(start) and _begins_with_objects(file)
        return FileFormat.ARRAY if is_array else FileFormat.RECORDS
    if name.endswith((".csv", ".tsv")):
        return FileFormat.CSV
    is_json = name.endswith(".json")
    if start.startswith(b"{") and _begins_with_records(file, is_json=is_json):
        return FileFormat.RECORDS
    if ARRAY_OF_OBJECTS.match(start) and _begins_with_objects(file):
        return FileFormat.ARRAY
    if is_json:
        raise UserError(
            f"{file}: JSON, but neither an array of objects nor an object per line; write its records as one of these, or "
            "choose other files with a glob like 'corpus/**/*.md'"
        )
    return FileFormat.TEXT


def is_splittable(file: File) -> bool:
    """Return whether a file can be read from any offset: JSON Lines without compression.

    Raises:
        UserError: It cannot be read, or has no known format.
    """
    if detect_format(file) is not FileFormat.RECORDS:
        return False
    with open_stored(file) as raw:
        return raw.read(len(GZIP)) != GZIP


@contextlib.contextmanager
def open_stored(file: File) -> Iterator[BinaryIO]:
    """Open the raw bytes of a file.

    Raises:
        UserError: It cannot be opened, or a read within the block fails.
    """
    try:
        with file.open("rb") as raw:
            yield raw
    except READ_ERRORS as error:
        raise UserError(f"{file}: cannot be read ({reason_of(error)}); correct it, or leave it out") from None


def open_text(raw: BinaryIO) -> TextIO:
    """Open raw bytes as text, with unchanged line ends; ``NotUtf8.from_text`` finds bytes that are not UTF-8."""
    return io.TextIOWrapper(_gunzip(raw), "utf-8-sig", "surrogateescape", newline="")


def iterate_records(raw: BinaryIO, file_format: FileFormat) -> Iterator[tuple[int, Json | NotUtf8 | TooManyCells]]:
    """Yield line (or array index) from 1 and record, None if not JSON, of a file that is not a table.

    Raises:
        OSError: An array or a row is truncated or malformed.
    """
    match file_format:
        case FileFormat.ARRAY:
            yield from enumerate(iterate_array(open_text(raw)), 1)
        case FileFormat.CSV:
            yield from iterate_csv_rows(open_text(raw))
        case _:
            yield from ((n, parse_json_line(line)) for n, line in enumerate(open_text(raw), 1) if line.strip())


def record_error(location: object, reason: str, remedy: str = "") -> UserError:
    """Return the error of a record that cannot be used; ``remedy``: for a first record, as all may be alike."""
    skip = "leave such records out with --data.bad_records skip"
    return UserError(f"{location}: {reason}; correct it, or {remedy or skip}")


def format_remedy(record: object, error: object = "") -> str:
    """Return what to do if the first record of a file is not a document; ``error``: as ``parse_record`` raises it."""
    match record:
        case NotUtf8():
            return CONVERT_HINT
        case TooManyCells():
            return "quote what has a delimiter or a line break in it"
    return NAME_FIELDS if isinstance(error, UnknownFormatError) else ""


def parse_json_line(line: str) -> Json | NotUtf8:
    """Parse a line of JSON Lines; None if it is not JSON."""
    return NotUtf8.from_text(line) or _parse_json(line)


def _parse_json(line: str) -> Json:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _match_path(path: str) -> Iterator[Path]:
    """Yield the files that a path names, unordered."""
    files = _list_files(path)
    first = next(files, None)
    if first is None:
        hub = f", or write {HUB}datasets/{path} for the Hub's" if OWNER_NAME.fullmatch(path) else ""
        raise UserError(f"--data.paths: {path!r} matches no file; check the path{hub}")
    return itertools.chain([first], files)


def _list_files(path: str) -> Iterator[Path]:
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return (p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts))
    root = Path(path)
    if (root / SAVED_SPLITS).is_file():
        splits = ", ".join(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
        raise UserError(
            f"--data.paths: {path!r} is a dataset of several splits ({splits}); name one, like {root / 'train'}"
        )
    if (root / SAVED_DATASET).is_file() and (arrow_files := list(root.glob("data-*.arrow"))):
        return iter(arrow_files)
    if root.is_file():
        return iter([root])
    if root.is_dir():
        return _walk_directory(root)
    return _glob_files(path)


def _walk_directory(root: Path) -> Iterator[Path]:
    """Yield the files below a directory; a link to something that is read below it anyway is skipped."""
    real = root.resolve()

    def is_read_there(link: Path) -> bool:
        target = link.resolve() if link.is_symlink() else Path("/")
        return target.is_relative_to(real) and not any(map(is_hidden_or_system, target.relative_to(real).parts))

    for directory, subdirectories, files in walk(root):
        subdirectories[:] = [name for name in subdirectories if not is_read_there(directory / name)]
        paths = (directory / name for name in files if not is_hidden_or_system(name))
        yield from (path for path in paths if path.is_file() and not is_read_there(path))


def _glob_files(pattern: str) -> Iterator[Path]:
    for path in map(Path, glob.iglob(pattern, recursive=True)):  # noqa: PTH207
        if path.is_symlink():
            check_link(path)
        if path.is_file():
            yield path


def _gunzip(raw: BinaryIO) -> BinaryIO:
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
    with open_stored(file) as raw:
        lines = itertools.islice((line for line in open_text(raw) if line.strip()), 2)
        first, *others = map(_parse_json, lines)
    if not isinstance(first, dict):
        return False
    return is_json or parse_document(first) is not None or any(isinstance(item, dict) for item in others)


def _begins_with_objects(file: File) -> bool:
    """Return whether a file is an array whose first item is an object."""
    with open_stored(file) as raw, contextlib.suppress(BrokenFileError):
        return isinstance(next(iterate_array(open_text(raw)), None), dict | NotUtf8)
    return False
