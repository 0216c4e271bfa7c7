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
from llama405b.contract.errors import given
from llama405b.contract.reader import Json
from llama405b.data.hub import hub_files
from llama405b.formats.conversation import UnusableRecordError, in_order
from llama405b.formats.corpus import (
    ARROW_FILE,
    HUB,
    NAME_FIELDS,
    PARQUET,
    File,
    Form,
    expand,
    form_of,
    numbered,
    reading,
    record_of,
    refusal,
    remedy_of_form,
    text_of,
)
from llama405b.formats.document import FIELDS, Document, NotUtf8, Text, TooManyCells, reading_of

Row = dict[str, Any]  # the values of the columns
ROWS = 1000  # converted at a time, since a row of text may have megabytes
READ_BYTES = 1 << 20  # of a column at a time, if a row group is not read at once


def table_rows(
    raw: BinaryIO, fields: Sequence[str] = (), *, at_once: bool = True
) -> Iterator[tuple[Row | NotUtf8, float]]:
    """Yield each row and the share of the file that was read; columns that no document uses are None.

    ``fields``: data.fields; ``at_once``: read row groups in one request each, as suits the Hub, instead of only the needed bytes.
    """
    names = [name.partition("=")[2] for name in fields]
    try:
        is_parquet = raw.read(len(PARQUET)) == PARQUET
        raw.seek(0)
        yield from (
            _of_parquet(raw, names, at_once=at_once) if is_parquet else _of_arrow(pyarrow.PythonFile(raw, "r"), names)
        )
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: values that Python cannot hold
        raise OSError(" ".join(str(error).split())) from None


def first_rows(raw: BinaryIO, fields: Sequence[str]) -> Iterator[Row | NotUtf8]:
    """Yield the rows of a table without reading whole row groups, for callers that need only a few."""
    return (row for row, _ in table_rows(raw, fields, at_once=False))


def _of_parquet(file: BinaryIO, names: Collection[str], *, at_once: bool) -> Iterator[tuple[Row | NotUtf8, float]]:
    buffer_size = 0 if at_once else READ_BYTES
    with pyarrow.parquet.ParquetFile(file, pre_buffer=at_once, buffer_size=buffer_size) as table:
        total, done = max(1, table.metadata.num_rows), 0
        empty = dict.fromkeys(table.schema_arrow.names)
        for batch in table.iter_batches(ROWS, columns=_wanted(table.schema_arrow, names)):
            for row in _rows(batch, empty):
                done += 1
                yield row, done / total


def _of_arrow(file: pyarrow.NativeFile, names: Collection[str]) -> Iterator[tuple[Row | NotUtf8, float]]:
    with file as raw:
        is_file = raw.read(len(ARROW_FILE)) == ARROW_FILE
        raw.seek(0)
        if is_file:
            table = pyarrow.ipc.open_file(raw)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(raw))
        for whole in batches:
            batch, empty = whole.select(_wanted(whole.schema, names)), dict.fromkeys(whole.schema.names)
            for begin in range(0, batch.num_rows, ROWS):
                for row in _rows(batch.slice(begin, ROWS), empty):
                    yield row, raw.tell() / max(1, raw.size())


def _rows(batch: pyarrow.RecordBatch, empty: Row) -> list[Row | NotUtf8]:
    try:
        return [empty | _given(row) for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1), empty)]
        return [NotUtf8.of(error.object.decode("utf-8", "surrogateescape")) or empty]


def _wanted(schema: pyarrow.Schema, names: Collection[str]) -> list[str]:
    """Return the columns that a document may use. Others may be large, or of types that Python cannot hold."""
    return [name for name in schema.names if name.lower() in FIELDS or name in names]


def _given(value: Any) -> Any:
    """Drop null fields and sort the others, as a table gives each record the fields of all records."""
    match value:
        case dict():
            return {key: _given(each) for key, each in in_order(value).items()}
        case list():
            return [_given(each) for each in value]
    return value


COUNT_BYTES = 16 << 20
VALUE = re.compile(r"'[^']*'(, )?|\d+")  # the parts of a reason that differ between records


class FilePart(NamedTuple):
    """A file, or the lines that begin between two bytes of it."""

    file: File
    begin: int = 0
    end: int = 0  # 0: that of the file

    @property
    def size(self) -> int:
        """Size in bytes."""
        return (self.end or self.file.stat().st_size) - self.begin


class DocumentPlace(NamedTuple):
    """The file and line of a document."""

    file: File
    line: int = 0  # or row, from 1; 0: the document is the file
    after: int = 0  # bytes before the line 1 that ``line`` counts from

    def __str__(self) -> str:
        return f"{self.file}:{_count_lines(self.file, self.after) + self.line}" if self.line else str(self.file)


class Found(NamedTuple):
    """A document and its location."""

    document: Document
    place: DocumentPlace


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut:
    """Records that were skipped for one reason."""

    count: int
    first: str  # its location and the reason
    remedy: str  # for the first one

    @property
    def words(self) -> str:
        """The first skipped record and its remedy."""
        return f"{self.first}{given('; {}', self.remedy)}"

    def times(self, count: int) -> "LeftOut":
        """Return a copy with this count."""
        return dataclasses.replace(self, count=count)


class Documents:
    """Iterate over the documents of files, up to ``max_bytes`` of text (0: all); count the bytes read.

    A line of JSON Lines, an object of an array and a row of a table is a record (``document.reading_of``); any other file is one document.

    Raises:
        UserError: A file cannot be read, or a record has no known form and ``skip`` is not set.
    """

    def __init__(
        self,
        parts: Sequence[tuple[FilePart, Form]],
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
        self.n_good = 0
        self.max_bytes = max_bytes or float("inf")
        self.total_bytes = int(min(self.max_bytes, sum(part.size for part, _ in parts)))
        self.done_bytes = 0
        self.left_out = dict[str, LeftOut]()  # by reason
        self.unread = dict[str, str]()  # unused field -> the first file that has it

    def __iter__(self) -> Iterator[Found]:
        """Yield the documents in the order of the files."""
        room, before = self.max_bytes, 0
        for part, form in self.parts:
            for found, at in self._documents_of(part, form):
                if room <= 0:
                    return
                self.done_bytes = min(self.total_bytes, before + at)
                yield found
                self.n_good += 1
                room -= found.document.n_chars
            before = self.done_bytes

    def refuse(self, where: DocumentPlace, why: str, remedy: str = NAME_FIELDS) -> None:
        """Count a bad record or raise an error; ``remedy``: shown if no earlier record was usable."""
        if not self.skip:
            raise refusal(where, why, "" if self.n_good else remedy)
        kind = VALUE.sub("…", why)
        found = self.left_out.get(kind) or LeftOut(0, f"{where}: {why}", remedy)
        self.left_out[kind] = found.times(found.count + 1)

    def _documents_of(self, part: FilePart, form: Form) -> Iterator[tuple[Found, int]]:
        """Yield each document and the number of bytes of the part that were read."""
        file, begin, end = part
        if form is Form.TABLE:
            yield from self._rows_of(file)
            return
        if form is Form.OWN:
            for number, record in enumerate(extend.current().documents(Path(str(file))), 1):
                if found := self._own(record, DocumentPlace(file, number)):
                    yield found, 0
            return
        with reading(file) as raw:
            if form is Form.TEXT:
                text = text_of(raw)  # closes the file when it is freed
                if found := self._whole(text.read(), file):
                    yield found, raw.tell()
                return
            after = _first_line(raw, begin)
            for number, record in _lines(raw, end) if end else numbered(raw, form):
                if found := self._found(_sound(record), DocumentPlace(file, number, after)):
                    yield found, raw.tell() - begin

    def _rows_of(self, file: File) -> Iterator[tuple[Found, int]]:
        with reading(file) as raw:  # whose errors it names
            size = file.stat().st_size
            for number, (row, share) in enumerate(table_rows(raw, self.names), 1):
                if found := self._found(row, DocumentPlace(file, number)):
                    yield found, int(share * size)

    def _whole(self, text: str, file: File) -> Found | None:
        if bad := NotUtf8.of(text):
            self.refuse(DocumentPlace(file, bad.line), str(bad), remedy_of_form(bad))
            return None
        return Found(Text("", text), DocumentPlace(file))

    def _own(self, record: Any, place: DocumentPlace) -> Found | None:
        """Convert an item of the user's module; a str is one document."""
        if isinstance(record, str):
            return Found(Text("", _sound(record)), place)
        return self._found(_sound(record), place)

    def _found(self, record: Any, place: DocumentPlace) -> Found | None:
        try:
            found = reading_of(record, self.names, chat=self.chat)
        except UnusableRecordError as why:
            self.refuse(place, str(why), remedy_of_form(record, why))
            return None
        for name in found.unread:
            self.unread.setdefault(name, str(place.file))
        return Found(found.document, place)


def file_parts(paths: Iterable[str]) -> list[FilePart]:
    """Return the files that ``data.paths`` names. Files of the Hub are read only when they are reached."""
    files = (file for path in paths for file in (hub_files(path) if path.startswith(HUB) else expand([path])))
    return [FilePart(file) for file in files]


def with_forms(parts: Iterable[FilePart]) -> Iterator[tuple[FilePart, Form]]:
    """Yield each part with the format of its file."""
    own = extend.current().declared
    return ((part, Form.OWN if own.reads_file(part.file) else form_of(part.file)) for part in parts)


def _first_line(raw: BinaryIO, begin: int) -> int:
    """Seek to the first line that begins at ``begin`` or later, and return its offset."""
    if begin:
        raw.seek(begin - 1)
        raw.readline()
    return raw.tell()


def _lines(raw: BinaryIO, end: int) -> Iterator[tuple[int, Json | NotUtf8]]:
    """As ``numbered``, of the lines that begin before ``end``."""
    for number in itertools.count(1):
        if raw.tell() >= end or not (line := raw.readline()):
            return
        if line.strip():
            yield number, record_of(line.decode("utf-8-sig", "surrogateescape"))


def _count_lines(file: File, n_bytes: int) -> int:
    with reading(file) as raw:
        return sum(raw.read(min(COUNT_BYTES, n_bytes - at)).count(b"\n") for at in range(0, n_bytes, COUNT_BYTES))


def _sound(record: Json | NotUtf8 | TooManyCells) -> Any:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot, with question marks."""
    match record:
        case str():
            return record.encode("utf-8", "replace").decode("utf-8")
        case list():
            return [_sound(each) for each in record]
        case dict():
            return {_sound(key): _sound(value) for key, value in record.items()}
    return record
