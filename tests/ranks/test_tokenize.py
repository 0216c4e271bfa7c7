"""Texts that were tokenized once, for any number of runs: by real processes, with real files."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b.data import tokens as of_tokenize
from llama405b.data.sources import documents_in_sequence, open_source, read_offsets
from llama405b.data.tokens import ProgressReport, load_or_tokenize
from llama405b.formats.corpus import TOKENIZED, TOKENS
from llama405b.settings.schema import Data
from llama405b_tools.verbs import data
from ops_rig import Patience, wait_for


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files that make several parts."""
    monkeypatch.setattr(of_tokenize, "PART_BYTES", 5000)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for i in range(7):
        records = [{"prompt": f"Count from {i}", "completion": f"{number} " * 9} for number in range(40)]
        (tmp_path / "texts" / f"{i}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "texts" / "[odd].md").write_text("a text " * 100)
    (tmp_path / "texts" / "bad.jsonl").write_text('{"no": 1}\n{"text": "good"}\n')
    return tmp_path / "texts"


def typed(demo, *more):
    flags = {"--model.path": demo, "--data.paths": "texts", "--data.bad_records": "skip", "--out": "made"}
    return ["tokenize", *(str(word) for pair in flags.items() for word in pair), "--workers", "2", *more]


def report():
    return ProgressReport(lambda *_: None, lambda: None, lambda _: None)


def test_they_are_the_tokens_that_a_run_would_make(demo, texts, capsys):
    config = Data(paths=("texts",), bad_records="skip")
    expected = load_or_tokenize(config, demo, texts.parent / "cache", report())
    data.main(typed(demo))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("s left") for line in lines) > 3
    assert lines[-2].startswith("data: 282 documents, ")
    assert "; 1 record left out: 1 like " in lines[-2]
    whole = (texts.parent / "cache" / expected.name).read_bytes()
    assert (texts.parent / "made" / TOKENS).read_bytes() == whole
    assert read_offsets(texts.parent / "made" / TOKENS) == read_offsets(texts.parent / "cache" / expected.name)
    assert sorted(path.name for path in (texts.parent / "made").iterdir()) == ["tokens.bin", "tokens.files", TOKENIZED]

    made = load_or_tokenize(Data(paths=("made",), bad_records="skip"), demo, texts.parent / "none", report())
    assert np.array_equal(np.fromfile(made.path(texts.parent / "none"), np.uint32), np.frombuffer(whole, np.uint32))
    before = (texts.parent / "made" / TOKENS).stat().st_mtime_ns
    data.main(typed(demo))
    assert (texts.parent / "made" / TOKENS).stat().st_mtime_ns == before  # nothing changed


def test_a_large_file_of_records_is_shared_out_in_pieces(demo, texts, capsys):
    records = [{"text": f"größer als {number} " * (1 + number % 7)} for number in range(400)]
    records[200] = {"text": "a line of several pieces " * 800}
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    lines[300] = '{"no": 1}'
    (texts / "3.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    config = Data(paths=("texts",), bad_records="skip")
    expected = load_or_tokenize(config, demo, texts.parent / "cache", report())
    data.main(typed(demo))
    assert "2 records left out: 2 like texts/3.jsonl:301: not " in capsys.readouterr().out
    cache, made = texts.parent / "cache" / expected.name, texts.parent / "made" / TOKENS
    assert made.read_bytes() == cache.read_bytes()
    assert len(read_offsets(made)) > len(read_offsets(cache)) + 5  # pieces
    sources = [open_source(file, 64, "split", truncate=False) for file in (cache, made)]
    first, second = (
        [str(span) for place in range(s.n_sequences) for span in documents_in_sequence(s, place)] for s in sources
    )
    assert first == second
    assert any(span.startswith("texts/3.jsonl 39") for span in first)
    with pytest.raises(UserError, match=r"texts/3\.jsonl:301: not .*; correct it, or leave such records out"):
        data.main(typed(demo, "--data.paths", "texts/3.jsonl", "--data.bad_records", "refuse"))


def test_it_is_made_for_a_tokenizer_and_is_a_source_of_its_own(demo, texts, tmp_path):
    data.main(typed(demo))
    ours = Data(paths=("made",), bad_records="skip")
    with pytest.raises(UserError, match=r"--data\.paths: made was tokenized with another tokenizer, chat template, "):
        load_or_tokenize(Data(paths=("made",)), demo, tmp_path / "cache", report())
    other = shutil.copytree(demo, tmp_path / "other")
    (other / "chat_template.jinja").write_text("another")
    with pytest.raises(UserError, match="was tokenized with another tokenizer"):
        load_or_tokenize(ours, other, tmp_path / "cache", report())
    with pytest.raises(UserError, match="made is already tokenized and cannot share a source: give each path a weight"):
        load_or_tokenize(Data(paths=("made", "texts"), bad_records="skip"), demo, tmp_path / "cache", report())
    whole = Path("made/tokens.bin").read_bytes()
    Path("made/tokens.bin").write_bytes(b"\xff" + whole[1:])
    with pytest.raises(UserError, match=r"made/tokens\.bin is damaged; run `llama405b data tokenize` again"):
        load_or_tokenize(ours, demo, tmp_path / "cache", report())
    os.truncate("made/tokens.bin", 400)
    with pytest.raises(UserError, match=r"--data\.paths: made is incomplete; run `llama405b data tokenize` again"):
        load_or_tokenize(ours, demo, tmp_path / "cache", report())


def test_it_continues_after_a_kill_and_leaves_no_process(demo, texts):
    code = (
        "import sys\nfrom llama405b.data import tokens\nfrom llama405b_tools.verbs import data\n"
        "tokens.PART_BYTES = 5000\n"
        "if __name__ == '__main__':\n    data.main(sys.argv[1:])\n"
    )
    (texts.parent / "run.py").write_text(code)
    command = [sys.executable, "run.py", *typed(demo)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools", "TOKENIZE_TEST": str(texts)}
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    parts = texts.parent / "made" / "parts"
    patience = Patience()
    while len(list(parts.glob("*.bin"))) < 2:
        assert patience.lasts()
        assert first.poll() is None
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.bin")}
    mark = f"TOKENIZE_TEST={texts}".encode()
    wait_for(lambda: not any(mark in environment for environment in _environments()), says=lambda: "workers outlive it")
    assert kept == {path.name: path.stat().st_mtime_ns for path in parts.glob("*.bin") if path.name in kept}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    expected = load_or_tokenize(Data(paths=("texts",), bad_records="skip"), demo, texts.parent / "cache", report())
    assert (texts.parent / "made" / TOKENS).stat().st_size == 4 * expected.n_tokens


def _environments():
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield (process / "environ").read_bytes()


def test_bad_input(demo, texts):
    with pytest.raises(UserError, match=r"bad\.jsonl:1: not .*; correct it, or leave such records out"):
        data.main(typed(demo, "--data.bad_records", "refuse"))
    with pytest.raises(UserError, match="the following arguments are required: --out"):
        data.main(["tokenize", "--model.path", str(demo), "--data.paths", "texts"])
    with pytest.raises(UserError, match=r"data\.weights: the training run mixes sources; tokenize each by itself"):
        data.main(typed(demo, "--data.paths", "texts/0.jsonl,texts/1.jsonl", "--data.weights", "1,2"))
    with pytest.raises(UserError, match="--workers: 0 is too small; use 1 or more"):
        data.main(typed(demo, "--workers", "0"))


def test_texts_of_which_every_record_is_left_out_are_refused(demo, texts):
    (texts / "odd").mkdir()
    (texts / "odd" / "a.jsonl").write_text('{"q": "x", "a": "y"}\n' * 500)
    with pytest.raises(
        UserError, match=r"leaves nothing of 500 records; first .*a\.jsonl:1: not .* 'q', 'a'; say which"
    ):
        data.main(typed(demo, "--data.paths", "texts/odd", "--workers", "1"))
    assert not (texts.parent / "made" / TOKENIZED).exists()


def test_a_model_that_is_not_here_or_has_too_few_positions_is_said(demo, texts, capsys):
    with pytest.raises(UserError, match=r"o/m: no such directory; run `llama405b download o/m`, which writes models/m"):
        data.main(typed("o/m"))
    (texts / "odd").mkdir()
    with contextlib.suppress(UserError):  # there is no text
        data.main(typed(demo, "--data.seq_len", "2048", "--data.paths", "texts/odd"))
    said = "--data.seq_len: 2048 exceeds the model's limit of 1024 positions; lower it for a run; the tokens do not depend on it\n"
    assert capsys.readouterr().out.startswith(said)
