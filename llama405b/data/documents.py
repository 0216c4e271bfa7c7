"""Read documents from files: text, code, Markdown, JSON Lines, Parquet, Arrow. Knows files; not tokens or ranks."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama405b.contract.corpus import WANTED, Document, Form, Text, document_of, parsed, reading, text_of
from llama405b.contract.errors import UserError
from llama405b.contract.reader import Json
from llama405b.data.tables import rows_of


class Found(NamedTuple):
    """A document, and where it is."""

    document: Document
    file: Path
    line: int = 0  # or row, from 1; 0: it is the whole file

    @property
    def where(self) -> str:
        """Its place, for people."""
        return f"{self.file}:{self.line}" if self.line else str(self.file)


class Documents:
    """The documents of files, up to ``max_bytes`` of text (0: all); knows how many bytes have been read.

    A line of JSON Lines and a row of a table is a record (``corpus.document_of``); any other file is one document.

    Raises:
        UserError: A file cannot be read, or a line has no form that is known, and ``skip`` is not set.
    """

    def __init__(self, files: Sequence[tuple[Path, Form]], max_bytes: int = 0, *, skip: bool = False) -> None:
        self.files, self.skip = files, skip
        self.max_bytes = max_bytes or float("inf")
        self.total_bytes = int(min(self.max_bytes, sum(file.stat().st_size for file, _ in files)))
        self.done_bytes = 0
        self.n_bad, self.first_bad = 0, ""

    def __iter__(self) -> Iterator[Found]:
        """Yield the documents in the order of the files."""
        room, before = self.max_bytes, 0
        for file, form in self.files:
            for found, at in self._documents_of(file, form):
                if room <= 0:
                    return
                self.done_bytes = min(self.total_bytes, before + at)
                yield found
                room -= found.document.n_chars
            before = self.done_bytes

    def refuse(self, where: str, why: str) -> None:
        """Count a record that cannot be used.

        Raises:
            UserError: Such records are not to be skipped.
        """
        if not self.skip:
            raise UserError(f"{where}: {why}; correct it, or leave such records out with --data.bad_records skip")
        self.n_bad += 1
        self.first_bad = self.first_bad or f"{where}: {why}"

    def _documents_of(self, file: Path, form: Form) -> Iterator[tuple[Found, int]]:
        """Each document, and the bytes of the file that have been read."""
        if form is Form.TABLE:
            yield from self._rows_of(file)
            return
        with reading(file) as raw:
            lines = text_of(raw)
            if form is Form.TEXT:
                yield Found(Text("", lines.read()), file), raw.tell()
                return
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                document = document_of(_sound(parsed(line)))
                if document is None:
                    self.refuse(f"{file}:{number}", f"not {WANTED}")
                    continue
                yield Found(document, file, number), raw.tell()

    def _rows_of(self, file: Path) -> Iterator[tuple[Found, int]]:
        with reading(file) as raw:  # whose errors it names
            size = os.fstat(raw.fileno()).st_size
            for number, (row, share) in enumerate(rows_of(file), 1):
                document = document_of(row)
                if document is None:
                    self.refuse(f"{file}:{number}", f"not {WANTED}")
                    continue
                yield Found(document, file, number), int(share * size)


def _sound(record: Json) -> Any:
    """Replace lone surrogates, which JSON can spell but text cannot hold, with question marks."""
    match record:
        case str():
            return record.encode("utf-8", "replace").decode("utf-8")
        case list():
            return [_sound(each) for each in record]
        case dict():
            return {key: _sound(value) for key, value in record.items()}
    return record
