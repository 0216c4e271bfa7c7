import json
import os

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llama405b.contract.errors import RunError, UserError
from llama405b.data import encode, tokens
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED
from llama405b.settings.schema import Data


class Told:
    """What a report tells, instead of a heartbeat, ranks and a log."""

    def __init__(self):
        self.progress, self.beats, self.lines = [], 0, []

    def report(self):
        return tokens.ProgressReport(lambda *bytes_: self.progress.append(bytes_), self._beat, self.lines.append)

    def _beat(self):
        self.beats += 1


def tokenised(path, demo, cache, told=None):
    return tokens.load_or_tokenize(Data(paths=(str(path),)), demo, cache, (told or Told()).report())


def test_a_token_file_is_reused_unless_its_size_is_wrong(demo, corpus, tmp_path):
    made = tokenised(corpus, demo, tmp_path)
    path, told = tmp_path / made.name, Told()
    content = path.read_bytes()
    assert len(content) == 4 * made.n_tokens
    assert tokenised(corpus, demo, tmp_path, told) == made
    assert [line.partition(" ")[0] for line in told.lines] == ["data:"]  # what was counted then
    for size in (len(content) - 4, 0, len(content) + 4):
        os.truncate(path, size)
        told = Told()
        assert tokenised(corpus, demo, tmp_path, told) == made
        assert path.read_bytes() == content
        assert told.lines[0].startswith("tokenizing 2 files, ")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        made.name.replace(".bin", suffix) for suffix in (".bin", ".files", ".json")
    ]


def test_tokenizing_tells_how_far_it_is_after_every_piece(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "ENCODE_CHARS", 100)
    monkeypatch.setattr(tokens, "LOG_INTERVAL_S", 0.0)
    (tmp_path / "a.txt").write_text("a line of text\n" * 100)
    told = Told()
    tokenised(tmp_path / "a.txt", demo, tmp_path, told)
    assert told.beats == len(told.progress) >= 10
    assert told.progress == sorted(set(told.progress))
    assert told.progress[-1] == (1500, 1500)
    assert told.lines[-2] == "tokenizing: 0.0 of 0.0 MB (100%)"
    assert told.lines[-1].startswith("data: 1 document, ")


def test_a_document_that_is_split_keeps_its_tokens(demo, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "ask me\n" * 40, "completion": "I say\n" * 40}))
    whole = tokenised(tmp_path / "a.jsonl", demo, tmp_path)
    before = np.fromfile(tmp_path / whole.name, np.uint32)
    (tmp_path / whole.name).unlink()
    monkeypatch.setattr(encode, "ENCODE_CHARS", 50)
    split = tokenised(tmp_path / "a.jsonl", demo, tmp_path)
    after = np.fromfile(tmp_path / split.name, np.uint32)
    assert np.array_equal(before, after)
    learnt = (after & NOT_TRAINED) == 0
    assert not learnt[0]
    assert learnt[-1]
    assert np.count_nonzero(np.diff(learnt)) == 1


def test_the_first_token_of_each_document_is_marked(demo, tmp_path):
    records = [{"text": "one"}, {"prompt": "", "completion": "two words"}, {"prompt": "three", "completion": "four"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    made = tokenised(tmp_path / "a.jsonl", demo, tmp_path)
    found = np.fromfile(tmp_path / made.name, np.uint32)
    tokenizer = AutoTokenizer.from_pretrained(demo)
    begins = np.flatnonzero(found & DOCUMENT_START)
    texts = [tokenizer.decode(part & ~MARKS, skip_special_tokens=True) for part in np.split(found, begins[1:])]
    assert (begins[0], texts) == (0, ["one", "two words", "threefour"])
    assert tokenizer.bos_token_id is None or set(found[begins] & ~MARKS) == {tokenizer.bos_token_id}


def test_a_document_whose_prompt_is_empty_begins_with_its_text(demo, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(demo)
    tokenizer.bos_token = None
    monkeypatch.setattr(tokens, "read_tokenizer", lambda *_: tokenizer)
    (tmp_path / "a.jsonl").write_text('{"prompt": "", "completion": "abc"}\n' * 2)
    made = tokenised(tmp_path / "a.jsonl", demo, tmp_path)
    found = np.fromfile(tmp_path / made.name, np.uint32)
    begins = np.flatnonzero(found & DOCUMENT_START)
    assert len(begins) == 2
    assert np.array_equal(*np.split(found, begins[1:]))
    assert not any(found & NOT_TRAINED)


def test_a_bad_file_leaves_no_half_token_file(demo, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n' * 600 + '{"txt": "y"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:601: not "):
        tokenised(tmp_path / "b.jsonl", demo, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_token_file_that_cannot_be_written_is_named(demo, corpus, tmp_path):
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(RunError, match="cache: the tokens cannot be written"):
        tokenised(corpus, demo, tmp_path / "cache")


def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_before_the_rest_of_one(demo, tmp_path, monkeypatch):
    """As Llama 2's does: what follows a prompt must be what follows it in the whole text."""
    characters = sorted(set("▁abcdefghijklmnopqrstuvwxyz:.?\n"))
    backend = Tokenizer(
        models.BPE({c: i for i, c in enumerate(characters)} | {"<0x0A>": len(characters)}, [], byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    monkeypatch.setattr(tokens, "read_tokenizer", lambda *_: tokenizer)
    prompt, completion = "what is it? ", "a line.\nand more"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "completion": completion}))
    for chars in (1 << 20, 5):
        monkeypatch.setattr(encode, "ENCODE_CHARS", chars)
        made = tokenised(tmp_path / "a.jsonl", demo, tmp_path / str(chars))
        found = np.fromfile(tmp_path / str(chars) / made.name, np.uint32)
        assert (found & ~MARKS).tolist() == tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        assert np.count_nonzero(found & NOT_TRAINED) == len(prompt) + 1


def test_a_text_begins_as_its_tokenizer_begins_one(demo, tmp_path, monkeypatch):
    """Also without a prompt before it: with the blank that some put there."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.backend_tokenizer.post_processor = None
    monkeypatch.setattr(tokens, "read_tokenizer", lambda *_: tokenizer)
    (tmp_path / "a.jsonl").write_text('{"text": "abc def"}\n{"prompt": "abc", "completion": " def"}\n')
    made = tokenised(tmp_path / "a.jsonl", demo, tmp_path)
    found = np.fromfile(tmp_path / made.name, np.uint32)
    one, two = np.split(found & ~MARKS, np.flatnonzero(found & DOCUMENT_START)[1:])
    assert one.tolist() == [*tokenizer("abc def")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(two) == f"_abc def{tokenizer.eos_token}"
