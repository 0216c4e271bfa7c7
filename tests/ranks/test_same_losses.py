"""Recipes that are trained both ways: by transformers' Trainer, and here from what import makes of them."""

import json
import os
import random
import subprocess
import sys

import pytest

from conftest import ROOT
from llama405b_tools.verbs import recipes
from ops_rig import metrics, train

PEFT = ROOT / ".venv/peft"  # accelerate, which Trainer needs, is beside it
BY_TRAINER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

[arguments], path, data = HfArgumentParser(TrainingArguments).parse_yaml_file(sys.argv[1], allow_extra_keys=True), sys.argv[2], sys.argv[3]
tokenizer = AutoTokenizer.from_pretrained(path)
rows = []
for line in open(data):
    record = json.loads(line)
    if "text" in record:
        ids = tokenizer(record["text"])["input_ids"] + [tokenizer.eos_token_id]
        labels = list(ids)
    else:
        prompt = tokenizer(record["prompt"])["input_ids"]
        answer = tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids, labels = prompt + answer, [-100] * len(prompt) + answer
    rows.append({"input_ids": ids, "labels": labels})


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    pad = lambda values, fill: values + [fill] * (longest - len(values))
    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
    }


model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
trainer.train()
print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
"""
COMMON = """
dtype: float32
use_cpu: true
max_length: 64
lr_scheduler_type: constant
logging_steps: 1
logging_first_step: true
report_to: none
save_strategy: "no"
output_dir: out
"""
# The whole file is a step, so that its order does not matter.
RECIPES = {
    "texts": "learning_rate: 1.0e-4\nnum_train_epochs: 6\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 1\n",
    "prompts": "learning_rate: 3.0e-4\nmax_steps: 5\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nmax_grad_norm: 0.5\n",
    "decay": (
        "learning_rate: 5.0e-4\nnum_train_epochs: 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nweight_decay: 0.3\n"
        "adam_beta1: 0.8\nadam_beta2: 0.95\nadam_epsilon: 1.0e-6\ngradient_checkpointing: true\n"
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_losses_are_those_of_transformers(demo, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(name)
    words = ["one", "two", "three", "def", "return", "x", "+", "="]
    with (tmp_path / "d.jsonl").open("w") as file:
        for _ in range(8):  # sequences of one document each, as two of them do not fit
            text = " ".join(draw.choices(words, k=40))
            record = {"text": text} if name != "prompts" else {"prompt": text[:60], "completion": text[60:]}
            file.write(json.dumps(record) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {demo}\ntrain_file: d.jsonl\n{COMMON}{RECIPES[name]}")
    (tmp_path / "by_trainer.py").write_text(BY_TRAINER)
    environment = {**os.environ, "PYTHONPATH": str(PEFT), "OMP_NUM_THREADS": "1", "WANDB_DISABLED": "true"}
    words = [sys.executable, "by_trainer.py", "recipe.yaml", str(demo), "d.jsonl"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])

    assert recipes.main(["recipe.yaml", "-o", "ours.toml", "--gpus", "1"]) == 0
    train(tmp_path, "r", "--config", "ours.toml", "--data.documents", "whole", "--checkpoint.every", 0)
    ours = [each["loss"] for each in metrics(tmp_path, "r").values()]
    assert len(ours) == len(theirs) >= 4
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert ours[-1] < ours[0] - 0.01
