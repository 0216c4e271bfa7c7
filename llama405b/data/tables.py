"""The rows of Parquet files, and of datasets that Hugging Face's ``datasets`` saved (Arrow), as records.

Knows the bytes of a file; not what a record means.
"""

from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llama405b.contract.corpus import ARROW_FILE, PARQUET
from llama405b.contract.document import FIELDS

ROWS = 1000  # at a time: a row of text may have megabytes


def rows_of(raw: BinaryIO, names: Collection[str] = ()) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each row, and the share of the file that has been read; what cannot be a document's is None.

    ``names``: of columns that are read beside those of all documents.

    Raises:
        OSError: The file is damaged.
    """
    try:
        is_parquet = raw.read(len(PARQUET)) == PARQUET
        raw.seek(0)
        yield from _of_parquet(raw, names) if is_parquet else _of_arrow(pyarrow.PythonFile(raw, "r"), names)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: values that Python cannot hold
        raise OSError(" ".join(str(error).split())) from None


def _of_parquet(file: BinaryIO, names: Collection[str]) -> Iterator[tuple[dict[str, Any], float]]:
    with pyarrow.parquet.ParquetFile(file) as table:
        total, done = max(1, table.metadata.num_rows), 0
        empty = dict.fromkeys(table.schema_arrow.names)
        for batch in table.iter_batches(ROWS, columns=_wanted(table.schema_arrow, names)):
            for row in batch.to_pylist():
                done += 1
                yield empty | _given(row), done / total


def _of_arrow(file: pyarrow.NativeFile, names: Collection[str]) -> Iterator[tuple[dict[str, Any], float]]:
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
                for row in batch.slice(begin, ROWS).to_pylist():
                    yield empty | _given(row), raw.tell() / max(1, raw.size())


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
