"""The example configurations run as they are, but for the model, the lengths and the device."""

import json

import pytest

from conftest import ROOT
from ranks_rig import run_program

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.toml"))
TALKS = ["chat.toml", "demo-chat.toml", "two-boxes.toml"]
LONG = {"alpaca.toml": 128}  # tokens of a prompt


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name, demo, tmp_path):
    small = {
        "model.path": demo, "data.seq_len": LONG.get(name, 32), "training.global_batch_size": 2, "training.micro_batch_size": 1,
        "training.max_steps": 2, "parallel.device": "cpu", "parallel.numerics": "fp32", "evaluation.every": 1,
        "evaluation.fraction": 0.1, "evaluation.max_sequences": 4, "checkpoint.dir": tmp_path / "checkpoints", "checkpoint.every": 0,
    }  # fmt: skip
    if name in TALKS:  # the demo's tokenizer has no template
        small["data.chat_template"] = "examples/chat.jinja"
    typed = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    done = run_program(
        "llama405b.train:run_and_exit",
        "--run-dir",
        tmp_path / "runs/r",
        "--config",
        f"examples/{name}",
        *typed,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics] == [0, 1, 2]
    assert all(each["evaluation_loss"] > 0 for each in metrics)
    if name in TALKS:
        assert "12 documents, 12 of them conversations" in done.stdout
