"""The rows of Parquet files, and of datasets that Hugging Face's ``datasets`` saved (Arrow), as records.

Knows the bytes of a file; not what a record means.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llama405b.contract.corpus import ARROW_FILE, PARQUET
from llama405b.contract.document import FIELDS, NotUtf8

Row = dict[str, Any]  # the values of the columns
ROWS = 1000  # at a time: a row of text may have megabytes
READ_BYTES = 1 << 20  # of a column at a time, where a row group is not read at once


def table_rows(
    raw: BinaryIO, fields: Sequence[str] = (), *, at_once: bool = True
) -> Iterator[tuple[Row | NotUtf8, float]]:
    """Yield each row, and the share of the file that has been read; what cannot be a document's is None.

    ``fields``: as data.fields has them; ``at_once``: read whole row groups, which the Hub wants, rather than what a row needs.

    Raises:
        OSError: The file is damaged.
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
    """Yield rows as ``rows_of``, for who wants the first ones alone."""
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
    """The columns that a document may be in; others may be large, or nothing that Python can hold."""
    return [name for name in schema.names if name in FIELDS or name in names]


def _given(value: Any) -> Any:
    """A value without the fields that are null: where records differ, a table fills in what one of them lacks."""
    match value:
        case dict():
            return {key: _given(each) for key, each in value.items() if each is not None}
        case list():
            return [_given(each) for each in value]
    return value
