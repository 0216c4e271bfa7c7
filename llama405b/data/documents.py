"""Read documents from files: text, code, Markdown, JSON, CSV, Parquet and Arrow.

Arrow is what Hugging Face's ``datasets`` saves. Knows files and records; not tokens or
ranks. What a record means is in ``formats.document``.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llama405b import extend
from llama405b.contract.errors import fmt_if
from llama405b.contract.reader import Json
from llama405b.data.hub import hub_files
from llama405b.formats.conversation import UnusableRecordError, sort_fields
from llama405b.formats.corpus import (
    ARROW_FILE,
    HUB,
    NAME_FIELDS,
    PARQUET,
    File,
    FileFormat,
    detect_format,
    expand_paths,
    format_remedy,
    iterate_records,
    open_stored,
    open_text,
    parse_json_line,
    record_error,
)
from llama405b.formats.document import KNOWN_FIELDS, Document, NotUtf8, Text, TooManyCells, parse_record

Row = dict[str, Any]  # the values of the columns
ROWS_PER_BATCH = 1000  # converted at a time, since a row of text may have megabytes
READ_BYTES = 1 << 20  # of a column at a time, if a row group is not read at once


def iterate_table(
    raw: BinaryIO, fields: Sequence[str] = (), *, prefetch: bool = True
) -> Iterator[tuple[Row | NotUtf8, float]]:
    """Yield each row and the share of the file that was read; columns that no document uses are None.

    ``fields``: data.fields; ``prefetch``: read row groups in one request each, as suits the Hub, instead of only the needed bytes.
    """
    names = [name.partition("=")[2] for name in fields]
    try:
        is_parquet = raw.read(len(PARQUET)) == PARQUET
        raw.seek(0)
        yield from (
            _parquet_rows(raw, names, prefetch=prefetch)
            if is_parquet
            else _arrow_rows(pyarrow.PythonFile(raw, "r"), names)
        )
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: values that Python cannot hold
        raise OSError(" ".join(str(error).split())) from None


def first_rows(raw: BinaryIO, fields: Sequence[str]) -> Iterator[Row | NotUtf8]:
    """Yield the rows of a table without reading whole row groups, for callers that need only a few."""
    return (row for row, _ in iterate_table(raw, fields, prefetch=False))


def _parquet_rows(file: BinaryIO, names: Collection[str], *, prefetch: bool) -> Iterator[tuple[Row | NotUtf8, float]]:
    buffer_size = 0 if prefetch else READ_BYTES
    with pyarrow.parquet.ParquetFile(file, pre_buffer=prefetch, buffer_size=buffer_size) as table:
        total, n_rows = max(1, table.metadata.num_rows), 0
        empty = dict.fromkeys(table.schema_arrow.names)
        for batch in table.iter_batches(ROWS_PER_BATCH, columns=_document_columns(table.schema_arrow, names)):
            for row in _batch_rows(batch, empty):
                n_rows += 1
                yield row, n_rows / total


def _arrow_rows(file: pyarrow.NativeFile, names: Collection[str]) -> Iterator[tuple[Row | NotUtf8, float]]:
    with file as raw:
        is_file = raw.read(len(ARROW_FILE)) == ARROW_FILE
        raw.seek(0)
        if is_file:
            table = pyarrow.ipc.open_file(raw)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(raw))
        for full_batch in batches:
            batch, empty = (
                full_batch.select(_document_columns(full_batch.schema, names)),
                dict.fromkeys(full_batch.schema.names),
            )
            for begin in range(0, batch.num_rows, ROWS_PER_BATCH):
                for row in _batch_rows(batch.slice(begin, ROWS_PER_BATCH), empty):
                    yield row, raw.tell() / max(1, raw.size())


def _batch_rows(batch: pyarrow.RecordBatch, empty: Row) -> list[Row | NotUtf8]:
    try:
        return [empty | _without_nulls(row) for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1), empty)]
        return [NotUtf8.from_text(error.object.decode("utf-8", "surrogateescape")) or empty]


def _document_columns(schema: pyarrow.Schema, names: Collection[str]) -> list[str]:
    """Return the columns that a document may use. Others may be large, or of types that Python cannot hold."""
    return [name for name in schema.names if name.lower() in KNOWN_FIELDS or name in names]


def _without_nulls(value: Any) -> Any:
    """Drop null fields and sort the others, as a table gives each record the fields of all records."""
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in sort_fields(value).items()}
        case list():
            return [_without_nulls(item) for item in value]
    return value


COUNT_BYTES = 16 << 20
RECORD_VALUE = re.compile(r"'[^']*'(, )?|\d+")  # the parts of a reason that differ between records


class FileRange(NamedTuple):
    """A file, or the lines that begin between two bytes of it."""

    file: File
    begin: int = 0
    end: int = 0  # 0: that of the file

    @property
    def size(self) -> int:
        """Size in bytes."""
        return (self.end or self.file.stat().st_size) - self.begin


class DocumentLocation(NamedTuple):
    """The file and line of a document."""

    file: File
    line: int = 0  # or row, from 1; 0: the document is the file
    skipped_bytes: int = 0  # bytes before the line 1 that ``line`` counts from

    def __str__(self) -> str:
        return f"{self.file}:{_count_lines(self.file, self.skipped_bytes) + self.line}" if self.line else str(self.file)


class LocatedDocument(NamedTuple):
    """A document and its location."""

    document: Document
    location: DocumentLocation
    with_previous: bool = False  # kept in one sequence with the document before
    with_next: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedRecords:
    """Records that were skipped for one reason."""

    count: int
    first: str  # its location and the reason
    remedy: str  # for the first one

    @property
    def summary(self) -> str:
        """The first skipped record and its remedy."""
        return f"{self.first}{fmt_if('; {}', self.remedy)}"

    def with_count(self, count: int) -> "SkippedRecords":
        """Return a copy with this count."""
        return dataclasses.replace(self, count=count)


class Documents:
    """Iterate over the documents of files, up to ``max_bytes`` of text (0: all); count the bytes read.

    A line of JSON Lines, an object of an array and a row of a table is a record (``document.parse_record``).
    Any other file is one document.

    Raises:
        UserError: A file cannot be read, or a record has no known form and ``skip`` is not set.
    """

    def __init__(
        self,
        parts: Sequence[tuple[FileRange, FileFormat]],
        max_bytes: int = 0,
        *,
        skip: bool = False,
        names: Sequence[str] = (),
        chat: bool = False,
    ) -> None:
        """``skip``, ``names``, ``chat``: as ``data.bad_records``, ``data.fields`` and ``data.prompts`` say it."""
        self.parts = parts
        self.skip = skip
        self.names, self.chat = names, chat
        self.n_usable = 0
        self.max_bytes = max_bytes or float("inf")
        self.total_bytes = int(min(self.max_bytes, sum(part.size for part, _ in parts)))
        self.n_read_bytes = 0
        self.skipped_records = dict[str, SkippedRecords]()  # by reason
        self.unread = dict[str, str]()  # unused field -> the first file that has it

    def __iter__(self) -> Iterator[LocatedDocument]:
        """Yield the documents in the order of the files."""
        remaining_chars, previous_bytes = self.max_bytes, 0
        for part, file_format in self.parts:
            for item, part_bytes in self._read_part(part, file_format):
                if remaining_chars <= 0 and not item.with_previous:
                    return
                self.n_read_bytes = min(self.total_bytes, previous_bytes + part_bytes)
                yield item
                self.n_usable += 1
                remaining_chars -= item.document.n_chars
            previous_bytes = self.n_read_bytes

    def reject(self, location: DocumentLocation, reason: str, remedy: str = NAME_FIELDS) -> None:
        """Count a bad record or raise an error; ``remedy``: shown if no earlier record was usable."""
        if not self.skip:
            raise record_error(location, reason, "" if self.n_usable else remedy)
        kind = RECORD_VALUE.sub("…", reason)
        skipped = self.skipped_records.get(kind) or SkippedRecords(0, f"{location}: {reason}", remedy)
        self.skipped_records[kind] = skipped.with_count(skipped.count + 1)

    def _read_part(self, part: FileRange, file_format: FileFormat) -> Iterator[tuple[LocatedDocument, int]]:
        """Yield each document and the number of bytes of the part that were read."""
        file, begin, end = part
        if file_format is FileFormat.TABLE:
            yield from self._read_table(file)
            return
        if file_format is FileFormat.USER:
            for number, item in enumerate(extend.current().documents(Path(str(file))), 1):
                for document in self._user_documents(item, DocumentLocation(file, number)):
                    yield document, 0
            return
        with open_stored(file) as raw:
            if file_format is FileFormat.TEXT:
                text = open_text(raw)  # closes the file when it is freed
                if item := self._text_document(text.read(), file):
                    yield item, raw.tell()
                return
            skipped_bytes = _seek_line(raw, begin)
            for number, record in _read_lines(raw, end) if end else iterate_records(raw, file_format):
                if item := self._record_document(
                    _replace_surrogates(record), DocumentLocation(file, number, skipped_bytes)
                ):
                    yield item, raw.tell() - begin

    def _read_table(self, file: File) -> Iterator[tuple[LocatedDocument, int]]:
        with open_stored(file) as raw:  # whose errors it names
            size = file.stat().st_size
            for number, (row, share) in enumerate(iterate_table(raw, self.names), 1):
                if item := self._record_document(row, DocumentLocation(file, number)):
                    yield item, int(share * size)

    def _text_document(self, text: str, file: File) -> LocatedDocument | None:
        if not_utf8 := NotUtf8.from_text(text):
            self.reject(DocumentLocation(file, not_utf8.line), str(not_utf8), format_remedy(not_utf8))
            return None
        return LocatedDocument(Text("", text), DocumentLocation(file))

    def _user_documents(self, item: Any, place: DocumentLocation) -> list[LocatedDocument]:
        """Convert an item of the user's module: a text, a record, or several, which are kept together or left out together."""
        documents = list[LocatedDocument]()
        for record in item if isinstance(item, tuple) else (item,):
            if isinstance(record, str):
                document: LocatedDocument | None = LocatedDocument(Text("", _replace_surrogates(record)), place)
            else:
                document = self._record_document(_replace_surrogates(record), place)
            if document is None:
                return []
            documents.append(document)
        last = len(documents) - 1
        return [
            document._replace(with_previous=index > 0, with_next=index < last)
            for index, document in enumerate(documents)
        ]

    def _record_document(self, record: Any, place: DocumentLocation) -> LocatedDocument | None:
        try:
            parsed = parse_record(record, self.names, chat=self.chat)
        except UnusableRecordError as error:
            self.reject(place, str(error), format_remedy(record, error))
            return None
        for name in parsed.unread:
            self.unread.setdefault(name, str(place.file))
        return LocatedDocument(parsed.document, place)


def list_file_ranges(paths: Iterable[str]) -> list[FileRange]:
    """Return the files that ``data.paths`` names. Files of the Hub are read only when they are reached."""
    files = (file for path in paths for file in (hub_files(path) if path.startswith(HUB) else expand_paths([path])))
    return [FileRange(file) for file in files]


def detect_formats(parts: Iterable[FileRange]) -> Iterator[tuple[FileRange, FileFormat]]:
    """Yield each part with the format of its file."""
    user_module = extend.current().declared
    return (
        (part, FileFormat.USER if user_module.reads_file(part.file) else detect_format(part.file)) for part in parts
    )


def _seek_line(raw: BinaryIO, begin: int) -> int:
    """Seek to the first line that begins at ``begin`` or later, and return its offset."""
    if begin:
        raw.seek(begin - 1)
        raw.readline()
    return raw.tell()


def _read_lines(raw: BinaryIO, end: int) -> Iterator[tuple[int, Json | NotUtf8]]:
    """As ``iterate_records``, of the lines that begin before ``end``."""
    for number in itertools.count(1):
        if raw.tell() >= end or not (line := raw.readline()):
            return
        if line.strip():
            yield number, parse_json_line(line.decode("utf-8-sig", "surrogateescape"))


def _count_lines(file: File, n_bytes: int) -> int:
    with open_stored(file) as raw:
        return sum(
            raw.read(min(COUNT_BYTES, n_bytes - offset)).count(b"\n") for offset in range(0, n_bytes, COUNT_BYTES)
        )


def _replace_surrogates(record: Json | NotUtf8 | TooManyCells) -> Any:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot, with question marks."""
    match record:
        case str():
            return record.encode("utf-8", "replace").decode("utf-8")
        case list():
            return [_replace_surrogates(item) for item in record]
        case dict():
            return {_replace_surrogates(key): _replace_surrogates(value) for key, value in record.items()}
    return record
