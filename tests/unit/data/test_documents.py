import gzip
import json

import pytest

from llama405b.contract.corpus import expand, form_of
from llama405b.contract.errors import UserError
from llama405b.data.documents import Documents


def read(*files, max_bytes=0):
    return Documents([(file, form_of(file)) for file in files], max_bytes)


def documents_of(*files):
    return [(found.document.prompt, found.document.text) for found in read(*files)]


def test_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")  # not UTF-8
    lines = [{"text": "x"}, {"prompt": "p", "completion": "c"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    records = [("", "x"), ("p", "c")]
    assert documents_of(*expand([str(tmp_path)])) == [("", "caf�"), *records, *records]
    (tmp_path / "half.jsonl").write_text('{"text": "a\\ud800b"}')  # JSON can spell half of a character
    assert documents_of(tmp_path / "half.jsonl") == [("", "a?b")]
    assert [found.where for found in read(tmp_path / "a.txt", tmp_path / "b.jsonl")] == [
        f"{tmp_path}/a.txt",
        f"{tmp_path}/b.jsonl:1",
        f"{tmp_path}/b.jsonl:2",
    ]
    assert expand([f"{tmp_path}/*.txt"]) == [tmp_path / "a.txt"]


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
    seen = [texts.done_bytes for _ in texts]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (300, texts.total_bytes)
    assert len(list(read(*files, max_bytes=300))) == 1
