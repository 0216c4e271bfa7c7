"""A run whose data has a few documents that are nothing like the rest."""

import json
import random

import pytest

from llama405b.training.journal import read_metrics
from ranks_rig import run_program

ODD = set(range(0, 300, 25))
WORDS = ("one", "two", "three", "four")


def _train(demo, place, choice):
    draw = random.Random(0)
    noise = ["".join(chr(draw.randint(0x4E00, 0x9FFF)) for _ in range(6)) for _ in range(300)]
    lines = [json.dumps({"text": noise[i] if i in ODD else " ".join(draw.choices(WORDS, k=12))}) for i in range(300)]
    (place / "d.jsonl").write_text("\n".join(lines))
    flags = {
        "model.path": demo, "data.paths": "d.jsonl", "data.seq_len": 32, "data.documents": "whole", "training.global_batch_size": 2,
        "training.micro_batch_size": 2, "training.max_steps": 70, "training.on_loss_spike": choice, "checkpoint.every": 0,
        "evaluation.every": 0,
        "evaluation.fraction": 0.0,
    }  # fmt: skip
    words = [f"--{key}={value}" for key, value in flags.items()]
    done = run_program("llama405b.train:run_and_exit", "--preset", "demo", "--run-dir", "x", *words, cwd=place)
    events = [json.loads(line) for line in (place / "x/events/rank-0.jsonl").read_text().splitlines()]
    return done, [event for event in events if event["kind"] == "spike"], read_metrics(place / "x/metrics.jsonl")


@pytest.mark.parametrize("choice", ["skip", "stop"])
def test_a_spike_is_named_with_its_documents(demo, tmp_path, choice):
    done, spikes, metrics = _train(demo, tmp_path, choice)
    named = {int(word.rpartition(" ")[2]) for each in spikes for word in each["detail"].rpartition(": ")[2].split(", ")}
    assert named & {each + 1 for each in ODD}
    first = spikes[0]
    assert f"; the weights are still those of step {first['step'] - 1}; its documents: d.jsonl " in first["detail"]
    assert f"step {first['step']}/70  loss " in done.stdout
    if choice == "stop":
        assert done.returncode == 1
        assert f"step {first['step']}: loss " in done.stderr
        assert metrics[-1].step == first["step"] - 1
    else:
        assert done.returncode == 0, done.stderr
        assert len(metrics) == 70
        assert metrics[-1].loss < 2.5
