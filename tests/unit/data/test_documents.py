import gzip
import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llama405b.contract.errors import UserError
from llama405b.data.documents import Documents, FileRange, detect_formats
from llama405b.formats.corpus import FileFormat, expand_paths


def read(*files, max_bytes=0, skip=False):
    return Documents(list(detect_formats(map(FileRange, files))), max_bytes, skip=skip)


def documents_of(*files):
    return [(found.document.prompt, found.document.text) for found in read(*files)]


def test_documents(tmp_path):
    (tmp_path / "a.txt").write_text("café")
    lines = [{"text": "x"}, {"prompt": "p", "completion": "c"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    records = [("", "x"), ("p", "c")]
    assert documents_of(*expand_paths([str(tmp_path)])) == [("", "café"), *records, *records]
    (tmp_path / "half.jsonl").write_text('{"text": "a\\ud800b"}')  # JSON can spell half of a character
    assert documents_of(tmp_path / "half.jsonl") == [("", "a?b")]
    assert [str(found.location) for found in read(tmp_path / "a.txt", tmp_path / "b.jsonl")] == [
        f"{tmp_path}/a.txt",
        f"{tmp_path}/b.jsonl:1",
        f"{tmp_path}/b.jsonl:2",
    ]
    assert expand_paths([f"{tmp_path}/*.txt"]) == [tmp_path / "a.txt"]


def test_bad_documents_are_named(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(UserError, match=r"b.jsonl:2: not "):
        list(read(tmp_path / "b.jsonl"))


def test_how_far_reading_has_come_is_known_in_bytes_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 300)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "y"}\n' * 1000))
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl.gz", tmp_path / "a.txt"]
    texts = read(*files)
    assert texts.total_bytes == sum(file.stat().st_size for file in files)
    seen = [texts.n_read_bytes for _ in texts]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (300, texts.total_bytes)
    assert len(list(read(*files, max_bytes=300))) == 1


TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]}


def test_rows_of_parquet_are_records(tmp_path):
    rows = [{"text": f"text {i}", "source": None} for i in range(2500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([TALK]), tmp_path / "b.parquet")
    found = list(texts := read(*expand_paths([f"{tmp_path}/*.parquet"])))
    assert [each.document.text for each in found[:-1]] == [row["text"] for row in rows]
    assert (str(found[1700].location), texts.n_read_bytes) == (f"{tmp_path}/a.parquet:1701", texts.total_bytes)
    asked, called = (dict(message) for message in found[-1].document.messages)  # without the null fields
    assert asked == TALK["messages"][0]
    assert called == {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}


def test_a_dataset_that_was_saved_is_read_and_one_of_several_splits_is_not(tmp_path):
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    table = pyarrow.Table.from_pylist([{"prompt": "p", "completion": f"c{i}"} for i in range(3)])
    with pyarrow.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    with pyarrow.ipc.new_stream(saved / "cache-1234.arrow", table.schema) as stream:
        stream.write_table(table)
    (saved / "state.json").write_text("{}")
    (saved / "dataset_info.json").write_text('{"description": "text"}')
    assert documents_of(*expand_paths([str(saved)])) == [("p", "c0"), ("p", "c1"), ("p", "c2")]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(
        UserError, match=r"saved' is a dataset of several splits \(train\); name one, like .*saved/train"
    ):
        expand_paths([str(tmp_path / "saved")])


def test_bad_tables_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet:2: not "):
        list(read(tmp_path / "a.parquet"))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"b.parquet: cannot be read \(.*\); correct it, or leave it out"):
        list(read(tmp_path / "b.parquet"))


def test_columns_that_are_no_documents_are_not_read(tmp_path):
    times = pyarrow.array([2**62 + 1], pyarrow.timestamp("ns"))
    table = pyarrow.table({"text": ["x"], "when": times, "image": [b"\xff" * 100]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table)
    assert documents_of(tmp_path / "a.parquet", tmp_path / "b.arrow") == [("", "x"), ("", "x")]
    bad = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff"))
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"c.parquet:1: the byte 0xff after '' is not UTF-8; correct it, or convert"):
        list(read(tmp_path / "c.parquet"))


ENDS = "one\r\ntwo\nthree\rfour"


def _parquet(path, text):
    offsets = np.array([0, len(text), len(text) + 2], np.int32).tobytes()
    buffers = pyarrow.py_buffer(offsets), pyarrow.py_buffer(text + b"ok")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.StringArray.from_buffers(2, *buffers)}), path)


def _written(path, text):
    """Write a file whose first document is this text, as its name says; where others are possible, the second is "ok"."""
    line = text.replace(b"\r", rb"\r").replace(b"\n", rb"\n")
    match path.suffix:
        case ".parquet":
            _parquet(path, text)
        case ".jsonl":
            path.write_bytes(b'{"text": "%s"}\r\n{"text": "ok"}\r\n' % line)
        case ".json":
            path.write_bytes(b'[{"text": "%s"},\r\n{"text": "ok"}]' % line)
        case ".csv":
            path.write_bytes(b'text\r\n"%s"\r\nok\r\n' % text)
        case ".txt":
            path.write_bytes(text)
        case ".gz":
            path.write_bytes(gzip.compress(text))
    return path


FORMS = ("a.txt", "a.gz", "a.jsonl", "a.json", "a.csv", "a.parquet")


@pytest.mark.parametrize("name", FORMS)
def test_bytes_that_are_not_utf_8_are_a_bad_record(tmp_path, name):
    file = _written(tmp_path / name, "one été, two caf".encode() + b"\xe9 three")
    number = 2 if name == "a.csv" else 1
    words = (
        rf"{name}:{number}: the byte 0xe9 after '.*two caf' is not UTF-8; correct it, or convert the file, like `iconv"
    )
    with pytest.raises(UserError, match=words):
        list(read(file))
    texts = read(file, skip=True)
    assert [found.document.text for found in texts] == ["ok"] * (name not in ("a.txt", "a.gz"))
    [left_out] = texts.skipped_records.values()
    assert (left_out.count, left_out.first.partition(" is")[0].endswith("two caf'")) == (1, True)


def test_after_a_good_record_such_bytes_may_be_skipped_and_their_line_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\r\nbad \xff")
    (tmp_path / "b.txt").write_text("good")
    with pytest.raises(
        UserError, match=r"a.txt:2: the byte 0xff after 'bad ' is .*; .* out with --data.bad_records skip"
    ):
        list(read(tmp_path / "b.txt", tmp_path / "a.txt"))
    lines = b'{"text": "x"}\n' * 3 + b'{"text": "\xff"}\n'
    (tmp_path / "c.jsonl").write_bytes(lines)
    part = FileRange(tmp_path / "c.jsonl", 10, len(lines))
    with pytest.raises(UserError, match=r"c.jsonl:4: the byte 0xff after '.*\"' is not UTF-8"):
        list(Documents([(part, FileFormat.RECORDS)]))


def test_line_ends_are_the_same_in_every_form(tmp_path):
    texts = [next(iter(read(_written(tmp_path / name, ENDS.encode())))).document.text for name in FORMS]
    assert texts == [ENDS] * len(FORMS)
