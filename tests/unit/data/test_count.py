"""What a plan is told of a corpus: the tokens that its run would read, as the trainer makes them."""

import json

import pytest

from llama405b.commands import data
from llama405b_tools.verbs import predict

SIZES = ["--data.seq_len", "128", "--training.global_batch_size", "4", "--training.epochs", "3"]


@pytest.fixture
def planned(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"text": f"{'word ' * (5 + i % 9)} {i} of a text that is here to be counted"}) for i in range(4000)
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))

    def ask(*words):
        assert (
            predict.main(
                ["--model.path", str(demo), "--data.paths", "c.jsonl", *SIZES, "--gpus", "1", "--json", *words]
            )
            == 0
        )
        return json.loads(capsys.readouterr().out.splitlines()[-1])["inputs"]

    return ask


def test_a_plan_counts_the_tokens_of_its_run(planned, capsys, demo):
    tokens = planned()["tokens"]
    batches = tokens // (4 * 128)
    assert tokens == batches * 4 * 128
    assert planned("--training.max_steps", "7")["tokens"] == 7 * 4 * 128
    assert planned("--tokens", "1.5M")["tokens"] == 1.5e6
    assert planned("--evaluation.every", "5", "--evaluation.fraction", "0.5")["tokens"] == pytest.approx(
        tokens / 2, rel=0.01
    )
    predict.main(["--model.path", str(demo), "--data.paths", "c.jsonl", *SIZES, "--gpus", "1", "--verbose"])
    said = capsys.readouterr().out
    assert f"data         {tokens:,} tokens with padding, 3 epochs of c.jsonl, counted\n" in said
    assert f"{tokens:,} tokens: " in said


def test_beyond_a_gib_the_rest_is_taken_to_be_as_the_first(planned, monkeypatch):
    tokens = planned()["tokens"]
    monkeypatch.setattr(data, "SAMPLE_BYTES", 100_000)
    assert planned()["tokens"] == pytest.approx(tokens, rel=0.03)
    assert planned("--data.max_bytes", "50000")["tokens"] < tokens / 4


def test_what_is_not_here_is_not_counted(planned, capsys, tmp_path):
    (tmp_path / "c.jsonl").unlink()
    assert planned()["tokens"] is None
    predict.main(["--preset", "llama3.1-8b", "--data.paths", "c.jsonl", "--gpus", "8"])
    assert "data         not counted here (models/Llama-3.1-8B: no such directory; " in capsys.readouterr().out
