"""The names of the documents of a sequence, from real token files."""

import json
import re

import pytest
from transformers import AutoTokenizer

from llama405b.data import encode, sources
from llama405b.data.encode import MARKS
from llama405b.data.sources import Mixture, document_names_at, documents_in_sequence, open_source
from llama405b.data.tokens import ProgressReport, load_or_tokenize
from llama405b.settings.schema import Data


@pytest.mark.parametrize("apart", [1 << 20, 20])
def test_documents_are_named_by_their_file_and_number(demo, tmp_path, monkeypatch, apart):
    monkeypatch.setattr(encode, "OFFSET_INTERVAL", apart)
    tokenizer = AutoTokenizer.from_pretrained(demo)
    (tmp_path / "a.txt").write_text("one whole file of text, which is a document. " * 3)
    records = [{"text": f"record {i} " * 3} for i in range(12)]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    (tmp_path / "empty.txt").write_text("")
    data = Data(paths=(f"{tmp_path}/*.*",))
    made = load_or_tokenize(
        data, demo, tmp_path / "cache", ProgressReport(lambda *_: None, lambda: None, lambda _: None)
    )
    source = open_source(tmp_path / "cache" / made.name, 8)
    found = [documents_in_sequence(source, place) for place in range(source.n_sequences)]
    assert [str(span) for span in found[0]] == [f"{tmp_path}/a.txt 1"]
    assert any(
        len(spans) == 2 and str(spans[0]).endswith("a.txt 1") and "b.jsonl 1" in str(spans[1]) for spans in found
    )
    for place, spans in enumerate(found):
        text = tokenizer.decode(source.window(place)[:-1] & ~MARKS)
        numbers = [int(number) + 1 for number in re.findall(r"record (\d+)", text)]
        for span in spans:
            if span.file.endswith("b.jsonl"):
                assert all(span.first <= number <= span.last for number in numbers)
    records = [span for spans in found for span in spans if span.file.endswith("b.jsonl")]
    assert records[-1].last in (11, 12)
    mixture = Mixture.from_weights([source], 0)
    assert list(document_names_at(mixture, [3])) == [
        str(span) for span in documents_in_sequence(source, mixture.locate(3)[1])
    ]
    (tmp_path / "cache" / made.name).with_suffix(".files").unlink()
    sources._load_offsets.cache_clear()
    assert documents_in_sequence(source, 0) == []
