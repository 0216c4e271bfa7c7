import bz2
import gzip
import io
import lzma
import re
from pathlib import Path

import pytest

from llama405b.contract.errors import UserError
from llama405b.formats.corpus import FileFormat, check_paths, detect_format, expand_paths

RECORDS = '{"text": "x"}\n{"prompt": "p", "completion": "c"}\n'
NEITHER = "neither text nor JSON Lines (plain or in gzip) nor Parquet; convert it, or choose files with a glob like 'corpus/**/*.md'"


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.jsonl", RECORDS.encode(), FileFormat.RECORDS),
        ("a.JSONL", RECORDS.encode(), FileFormat.RECORDS),
        ("a.jsonl.gz", gzip.compress(RECORDS.encode(), mtime=0), FileFormat.RECORDS),
        ("a.md", gzip.compress(b"# text that nobody calls .gz", mtime=0), FileFormat.TEXT),
        ("a.json", RECORDS.encode(), FileFormat.RECORDS),
        ("a.json", b"\xef\xbb\xbf\n" + RECORDS.encode(), FileFormat.RECORDS),
        ("a.json", b'{"messages": []}\n{"messages": []}\n', FileFormat.RECORDS),  # which the reader refuses by line
        ("one-long-line.json", b'{"name": "x"}', FileFormat.RECORDS),
        ("one-long-line.txt", b'{"name": "x"}', FileFormat.TEXT),
        ("latin-1.txt", b"caf\xe9\r\n\ttab", FileFormat.TEXT),
        ("odd.py", b"a = '\x01\x1f'\n", FileFormat.TEXT),
        ("cut.txt", "é".encode() * 5000, FileFormat.TEXT),  # the head ends within a character
        ("empty", b"", FileFormat.TEXT),
        ("a.txt", b"PAR1\x15\x00\x15\x10hello\x00\x00PAR1", FileFormat.TABLE),
        ("a.arrow", b"ARROW1\x00\x00", FileFormat.TABLE),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00", FileFormat.TABLE),
    ],
)
def test_a_file_is_what_its_content_says(tmp_path, name, content, form):
    (tmp_path / name).write_bytes(content)
    assert detect_format(tmp_path / name) is form


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("array.json", b'\n[ {"text": "x"},\n{"text": "y"}]', "ARRAY"),
        ("array.txt", b'[{"text": "x"}]', "ARRAY"),
        ("array.json.gz", gzip.compress(b'[{"text": "x"}]', mtime=0), "ARRAY"),
        ("array.jsonl", b'[{"text": "x"}, {"text": "y"}]', "ARRAY"),
        ("array.jsonl.gz", gzip.compress(b'[\n{"text": "x"}]', mtime=0), "ARRAY"),
        ("a.jsonl", b'["x"]\n', "RECORDS"),  # which the reader refuses by line
        ("a.csv", b"text\nx\n", "CSV"),
        ("a.TSV.gz", gzip.compress(b"text\nx\n", mtime=0), "CSV"),
    ],
)
def test_an_array_of_objects_and_csv_are_records(tmp_path, name, content, form):
    (tmp_path / name).write_bytes(content)
    assert detect_format(tmp_path / name).name == form
    (tmp_path / "link.md").write_text("[a link](there) and more")
    assert detect_format(tmp_path / "link.md") is FileFormat.TEXT


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.feather", b"FEA1\x15\x00\x15\x10hello\x00\x00FEA1"),
        ("a.bin", b"\xff\xff\xff\xff\x10\x00\x00\x00"),
        ("a.jsonl", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"),
        ("a.gz", gzip.compress(gzip.compress(RECORDS.encode(), mtime=0), mtime=0)),
    ],
)
def test_what_is_neither_text_nor_records_is_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        detect_format(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}: {NEITHER}"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl.xz", lzma.compress(RECORDS.encode() * 50), "packed by xz; convert it: `xz -dk PATH`"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x58\x81\x01" + RECORDS.encode(), "packed by zstd; convert it: `zstd -d PATH`"),
        ("a.bz2", bz2.compress(RECORDS.encode() * 50), "packed by bzip2; convert it: `bzip2 -dk PATH`"),
        ("a.zip", b"PK\x03\x04\x14\x00\x00\x00", "a zip archive; convert it: `unzip PATH`"),
        ("a.txt", "text".encode("utf-16"), "text in UTF-16; convert it: `iconv -f utf-16 -t utf-8 PATH >PATH.utf-8`"),
        ("a.jsonl", "文字".encode("utf-16"), "text in UTF-16; convert it: `iconv -f utf-16 -t utf-8 PATH >PATH.utf-8`"),
        ("a.jsonl", RECORDS.encode("utf-16-le"), "probably text in UTF-16; convert it: `iconv -f utf-16 -t utf-8 PATH >PATH.utf-8`"),
        ("a.jsonl", RECORDS.encode("utf-16-be"), "probably text in UTF-16; convert it: `iconv -f utf-16 -t utf-8 PATH >PATH.utf-8`"),
    ],
)  # fmt: skip
def test_what_a_command_makes_readable_is_refused_with_it(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        detect_format(tmp_path / name)
    path = str(tmp_path / name)
    assert str(caught.value) == f"{path}: {says.replace('PATH', path)}"


def test_texts_that_begin_like_archives_are_text(tmp_path):
    for text in ("BZh is how bzip2 begins", "PK and others"):
        (tmp_path / "a.txt").write_text(text)
        assert detect_format(tmp_path / "a.txt") is FileFormat.TEXT


def test_a_damaged_gzip_file_is_refused_by_name(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(RECORDS.encode(), mtime=0)[:-9])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read \(Compressed file ended.*leave it out"):
        detect_format(tmp_path / "a.jsonl.gz")


@pytest.mark.slow
def test_every_file_of_the_standard_library_is_text():
    assert {detect_format(file) for file in expand_paths(["stdlib"])} == {FileFormat.TEXT}


def test_paths_that_match_nothing_or_hold_a_binary_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    check_paths([str(tmp_path), f"{tmp_path}/*.txt", "stdlib"])
    with pytest.raises(UserError, match=r"--data\.paths: '.*none\*' matches no file; check the path"):
        check_paths([str(tmp_path), f"{tmp_path}/none*"])
    (tmp_path / "b").write_bytes(b"\0")
    with pytest.raises(UserError, match=re.escape(NEITHER.split(",")[0])):
        check_paths([str(tmp_path)])


def test_hidden_files_are_left_out_but_not_what_is_below_a_hidden_or_parent_folder(tmp_path, monkeypatch):
    corpus = tmp_path / ".data" / "corpus"
    (corpus / ".git").mkdir(parents=True)
    (corpus / ".git" / "c").write_text("no")
    (corpus / "a.txt").write_text("yes")
    assert expand_paths([str(corpus)]) == [corpus / "a.txt"]
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert expand_paths(["../.data/corpus"]) == [Path("../.data/corpus/a.txt")]


@pytest.mark.parametrize("content", ['{\n  "text": "x"\n}\n', "[1, 2]", '"x"', "", "[]", '["text"]', "no JSON"])
def test_json_that_holds_no_records_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        UserError, match=r"a\.json: JSON, but neither an array of objects nor an object per line; write "
    ):
        detect_format(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.json",
            '[{"q": "x", "a": "y"}]',
            r"a\.json:1: not \{.*\}, but its fields are 'q', 'a'; correct it, or say which",
        ),
        (
            "a.csv",
            "q,a\nx,y\n",
            r"a\.csv:2: not .*, but its fields are 'q', 'a'; correct it, or say which fields to read, like --d",
        ),
        ("a.jsonl", "no json\n", r"a\.jsonl:1: not .*, but it is not a JSON object; "),
        (
            "b.jsonl",
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"b\.jsonl:1: is a conversation, but the tokenizer has",
        ),
    ],
)
def test_the_first_record_is_looked_at_before_a_launch(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        check_paths([str(tmp_path)], has_template=False)
    assert "skip" not in str(caught.value)
    if name != "b.jsonl":
        check_paths([str(tmp_path)], skip=True)
    if name in ("a.json", "a.csv"):
        check_paths([str(tmp_path)], ("prompt=q", "completion=a"))


def test_a_dataset_of_the_hub_is_named_as_one():
    with pytest.raises(
        UserError, match=r"'tatsu-lab/alpaca' matches no file; .* or write hf://datasets/tatsu-lab/alpaca for"
    ):
        check_paths(["tatsu-lab/alpaca"])


def test_a_text_that_begins_with_a_bracket_is_not_read_to_its_end(tmp_path, monkeypatch):
    (tmp_path / "play.md").write_text("[Scene: a room]\n" + "He speaks. " * 200_000)
    n_bytes = []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            n_bytes.append(super().readinto(buffer))
            return n_bytes[-1]

    monkeypatch.setattr(Path, "open", lambda path, _: io.BufferedReader(Counting(path)))
    assert detect_format(tmp_path / "play.md") is FileFormat.TEXT
    assert sum(n_bytes) < 1 << 20


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", b'{"text": "caf\xe9"}'), ("a.json", b'[{"text": "caf\xe9"}]')])
def test_a_first_record_that_is_not_utf_8_is_refused_before_anything_starts(tmp_path, name, text):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=rf"{name}:1: the byte 0xe9 after '.*caf' is not UTF-8; correct it, or convert"):
        check_paths([str(tmp_path)])
    check_paths([str(tmp_path)], skip=True)


@pytest.mark.parametrize("path", ["corpus", "corpus/**", "corpus/*/*.txt"])
def test_linked_files_and_folders_are_read_and_links_to_nothing_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/a/1.txt", "corpus/.hidden/2.txt", "elsewhere/3.txt", "elsewhere/below/4.txt", "5.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    Path("corpus/b").symlink_to(tmp_path / "elsewhere")
    Path("corpus/a/5.txt").symlink_to(tmp_path / "5.txt")
    below = ["corpus/b/below/4.txt"] * (path != "corpus/*/*.txt")
    if path == "corpus":  # what is read where it is, and what is the disk's own
        Path("corpus/latest").symlink_to("a")
        Path("corpus/newest.txt").symlink_to("a/1.txt")
        Path("corpus/repo").symlink_to(".hidden")  # which is read nowhere else
        below.append("corpus/repo/2.txt")
        Path("corpus/lost+found").mkdir(mode=0)
        Path("corpus/a/@eaDir/1.txt").mkdir(parents=True)  # as Synology's servers have for each file
        Path("corpus/a/@eaDir/1.txt/SYNOINDEX.txt").write_text("x")
        Path("corpus/a/Thumbs.db").write_text("x")
    assert [str(file) for file in expand_paths([path])] == sorted(
        ["corpus/a/1.txt", "corpus/a/5.txt", "corpus/b/3.txt", *below]
    )
    check_paths([path])
    Path("corpus/a/6.txt").symlink_to("gone")
    for read in (expand_paths, check_paths):
        with pytest.raises(
            UserError, match=r"^corpus/a/6\.txt: is a link to gone, which does not exist; add the missing file, or"
        ):
            read([path])
