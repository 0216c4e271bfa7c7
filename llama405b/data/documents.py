"""Read documents from files: text, code, Markdown, JSON, CSV, Parquet, Arrow. Knows files; not tokens or ranks."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llama405b import extend
from llama405b.contract.corpus import (
    HUB,
    NAME_FIELDS,
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
from llama405b.contract.document import Document, NotUtf8, Text, TooManyCells, document_of, unusable
from llama405b.contract.reader import Json
from llama405b.data.hub import hub_files
from llama405b.data.tables import table_rows

COUNT_BYTES = 16 << 20


class FilePart(NamedTuple):
    """A file, or the lines that begin between two bytes of it."""

    file: File
    begin: int = 0
    end: int = 0  # 0: that of the file

    @property
    def size(self) -> int:
        """Its bytes."""
        return (self.end or self.file.stat().st_size) - self.begin


class DocumentPlace(NamedTuple):
    """Where a document is."""

    file: File
    line: int = 0  # or row, from 1; 0: it is the whole file
    after: int = 0  # so many bytes, whose lines do not count

    def __str__(self) -> str:
        return f"{self.file}:{_count_lines(self.file, self.after) + self.line}" if self.line else str(self.file)


class Found(NamedTuple):
    """A document, and where it is."""

    document: Document
    place: DocumentPlace


class Documents:
    """The documents of files, up to ``max_bytes`` of text (0: all); knows how many bytes have been read.

    A line of JSON Lines, an object of an array and a row of a table is a record (``document.document_of``); any other file is one document.

    Raises:
        UserError: A file cannot be read, or a line has no form that is known, and ``skip`` is not set.
    """

    def __init__(
        self,
        parts: Sequence[tuple[FilePart, Form]],
        max_bytes: int = 0,
        *,
        skip: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        """``skip``, ``names``: as ``data.bad_records`` and ``data.fields`` say it."""
        self.parts = parts
        self.skip = skip
        self.names = names
        self.n_good = 0
        self.max_bytes = max_bytes or float("inf")
        self.total_bytes = int(min(self.max_bytes, sum(part.size for part, _ in parts)))
        self.done_bytes = 0
        self.n_bad = 0
        self.first_bad = ""
        self.remedy = ""

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
        """Count a record that cannot be used; ``remedy``: if there was none before that can.

        Raises:
            UserError: Such records are not to be skipped.
        """
        if not self.skip:
            raise refusal(where, why, "" if self.n_good else remedy)
        self.n_bad += 1
        if self.n_bad == 1:
            self.first_bad, self.remedy = f"{where}: {why}", remedy

    def _documents_of(self, part: FilePart, form: Form) -> Iterator[tuple[Found, int]]:
        """Each document, and the bytes of the part that have been read."""
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
                text = text_of(raw)  # which closes the file with itself
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
        """A document of the user's module, of which a text is whole."""
        if isinstance(record, str):
            return Found(Text("", _sound(record)), place)
        return self._found(_sound(record), place)

    def _found(self, record: Any, place: DocumentPlace) -> Found | None:
        document = document_of(record, self.names)
        if document is None:
            self.refuse(place, unusable(record), remedy_of_form(record))
            return None
        return Found(document, place)


def file_parts(paths: Iterable[str]) -> list[FilePart]:
    """Return the files that ``data.paths`` names, each whole; those of the Hub are only read when their turn comes."""
    files = (file for path in paths for file in (hub_files(path) if path.startswith(HUB) else expand([path])))
    return [FilePart(file) for file in files]


def with_forms(parts: Iterable[FilePart]) -> Iterator[tuple[FilePart, Form]]:
    """Tell the form of each part's file."""
    own = extend.current().declared
    return ((part, Form.OWN if own.reads_file(part.file) else form_of(part.file)) for part in parts)


def _first_line(raw: BinaryIO, begin: int) -> int:
    """Go to the first line that begins there or later; returns where."""
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
    """Replace lone surrogates, which JSON can spell but text cannot hold, with question marks."""
    match record:
        case str():
            return record.encode("utf-8", "replace").decode("utf-8")
        case list():
            return [_sound(each) for each in record]
        case dict():
            return {_sound(key): _sound(value) for key, value in record.items()}
    return record
