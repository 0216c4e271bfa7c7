"""The names of the documents of a sequence, from real token files."""

import json

from llama405b.contract.schema import Data
from llama405b.data.sources import Mixture, open_source
from llama405b.data.tokens import Report, tokenised
from llama405b.data.whence import documents_at, documents_in


def test_documents_are_named_by_their_file_and_number(demo, tmp_path):
    (tmp_path / "a.txt").write_text("one whole file of text, which is a document. " * 3)
    records = [{"text": f"record {i} " * 3} for i in range(12)]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    (tmp_path / "empty.txt").write_text("")
    data = Data(paths=(f"{tmp_path}/*.*",))
    made = tokenised(data, demo, tmp_path / "cache", Report(lambda *_: None, lambda: None, lambda _: None))
    source = open_source(tmp_path / "cache" / made.name, 8)
    found = [documents_in(source, place) for place in range(source.n_sequences)]
    assert found[0] == [f"{tmp_path}/a.txt 1"]
    assert any(len(names) == 2 and names[0].endswith("a.txt 1") and "b.jsonl 1" in names[1] for names in found)
    last = [int(names[-1].rpartition(" ")[2].rpartition("-")[2]) for names in found if "b.jsonl" in names[-1]]
    assert last == sorted(last)
    assert last[-1] in (11, 12)
    mixture = Mixture.of([source], 0)
    assert documents_at(mixture, [3]) == documents_in(source, mixture.at(3)[1])
    (tmp_path / "cache" / made.name).with_suffix(".files").unlink()
    from llama405b.data import whence

    whence._files.cache_clear()
    assert documents_in(source, 0) == []
