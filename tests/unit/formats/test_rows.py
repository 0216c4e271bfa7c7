import io
import json

import pytest

from llama405b.contract.errors import UserError
from llama405b.formats import document
from llama405b.formats.conversation import UnusableRecordError
from llama405b.formats.corpus import detect_format, iterate_records, open_stored
from llama405b.formats.document import TooManyCells, parse_record


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.json",
            '[{"text": "x"}, {"text": "y"',
            r"cannot be read \(object 2 of the array is not JSON, or breaks off\)",
        ),
        ("a.json", '[{"text": "x"} {"text": "y"}]', r"cannot be read \(no ',' after object 1\)"),
        ("a.json", '[{"text": "x"},', r"cannot be read \(object 2 of the array is not JSON, or breaks off\)"),
        (
            "a.json",
            '[{"text": "x"}] [{"text": "y"}]',
            r"cannot be read \(more follows the array of 1 object; write all in one",
        ),
        (
            "a.json",
            '[{"text": "x"}]\n{"text": "y"}\n',
            r"cannot be read \(more follows the array of 1 object; write all in one",
        ),
        (
            "a.json",
            '[{"text": "x"}, {}]' + " " * document.READ_CHARS + "]",
            r"cannot be read \(more follows the array of 2 objects",
        ),
        ("a.csv", "text,source,text\nx,y,z\n", r"cannot be read \(two columns are called 'text'\)"),
        ("a.csv", 'text\n"x', r"cannot be read \(line 2: unexpected end of data\)"),
    ],
)
def test_what_breaks_off_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words), open_stored(tmp_path / name) as raw:
        list(iterate_records(raw, detect_format(tmp_path / name)))


def test_objects_are_read_whatever_piece_of_the_text_they_end_in(monkeypatch):
    items = [{"text": "x" * n, "more": [n, {"deep": None}]} for n in range(40)]
    for indent in (None, 2):
        text = json.dumps(items, indent=indent)
        for chunk in (1, 7, 64):
            monkeypatch.setattr(document, "READ_CHARS", chunk)
            assert list(document.iterate_array(io.StringIO(text))) == items


def test_rows_have_their_header_s_names_and_their_line():
    text = 'text; source\n"a; ""b""\r\nc";x\n\nd;y;z\ne\n'
    expected = [(2, {"text": 'a; "b"\r\nc', "source": "x"}), (5, TooManyCells(3, 2)), (6, {"text": "e"})]
    assert list(document.iterate_csv_rows(io.StringIO(text, newline=""))) == expected
    with pytest.raises(UnusableRecordError, match=r"^the row has 3 cells, but the header has 2$"):
        parse_record(TooManyCells(3, 2))
