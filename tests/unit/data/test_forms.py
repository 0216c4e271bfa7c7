"""One file in each of its forms: the tokens are the same, whatever fields its records have."""

import csv
import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llama405b.data import tokens
from llama405b.data.encode import DOCUMENT_START
from llama405b.settings.schema import Data

ODD = 'say\r\n"it"; é,\t☃'  # what each form writes in its own way
RECORDS = {
    "text": [{"text": f"{n}: {ODD * (n % 3)}\n", "id": str(n)} for n in range(30)],
    "prompts": [{"prompt": f"Say {n}", "completion": f"{ODD} {n}"} for n in range(30)],
    "alpaca": [{"instruction": f"Say {n}", "input": ODD * (n % 3), "output": f"{n}\n{ODD}"} for n in range(30)],
    "questions": [{"question": f"What is {n}?", "answer": ODD * n} for n in range(30)],
    "named": [{"title": f"Say {n}", "body": f"{ODD} {n}"} for n in range(30)],
}
FIELDS = {"named": ("prompt=title", "completion=body")}


def written(to, records):
    """The records in every form, by its name: the paths that ``data.paths`` would have."""
    (to / "array.json").write_text(json.dumps(records, indent=1))
    (to / "lines.jsonl").write_text("\n".join(map(json.dumps, records)))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (to / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, records[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(records)
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, to / "a.parquet")
    saved = to / "saved"  # as `datasets` does
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    with pyarrow.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    return sorted(str(path) for path in to.iterdir())


@pytest.mark.parametrize("kind", RECORDS)
def test_records_give_the_same_tokens_in_every_form(demo, tmp_path, kind):
    (tmp_path / "forms").mkdir()
    paths = written(tmp_path / "forms", RECORDS[kind])
    found = [tokenised(path, demo, tmp_path / "cache", FIELDS.get(kind, ())) for path in paths]
    assert len(found) == 6
    for path, tokens_N in zip(paths, found, strict=True):
        assert np.array_equal(tokens_N, found[0]), path
    assert np.count_nonzero(found[0] & DOCUMENT_START) == 30


def tokenised(path, demo, cache, fields):
    report = tokens.ProgressReport(lambda *_: None, lambda: None, lambda _: None)
    config = Data(paths=(path,), **({"fields": fields} if fields else {}))
    made = tokens.load_or_tokenize(config, demo, cache, report)
    return np.fromfile(cache / made.name, np.uint32)
