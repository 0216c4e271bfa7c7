"""What is known before weights are loaded is said then; and where nothing is left to do, that."""

import io
import json
import re
import shutil
import sys
import types
from fractions import Fraction
from pathlib import Path

import pytest

from llama405b.contract.files import UNLIMITED, read_records
from llama405b.contract.records import QUOTE_PREFIX, SequencePreview
from llama405b.settings.schema import Data, Evaluation
from llama405b.spec.models import parse_end_ids
from llama405b.training.evaluate import Prompts
from llama405b_tools.verbs import data
from ops_rig import settings, train
from ranks_rig import run_program


def test_a_prompt_that_is_too_long_is_refused_before_weights_are_loaded(demo, corpus, tmp_path):
    evaluates = [
        "--evaluation.every",
        2,
        "--evaluation.fraction",
        0.05,
        "--evaluation.prompts",
        "def f(x): return x " * 20,
    ]
    done = train(tmp_path, "long", *settings(demo, corpus), *evaluates, code=2)
    assert "--evaluation.prompts: 'def f(x): return x def f(x): return x de' is " in done.stderr
    heartbeat = json.loads((tmp_path / "runs/long/heartbeat/rank-0.json").read_text())
    assert heartbeat["cause"]["phase"] == "data"  # not load


def test_a_resume_that_has_nothing_to_do_says_so(demo, corpus, tmp_path):
    train(tmp_path, "whole", *settings(demo, corpus, steps=4))
    done = train(tmp_path, "whole", *settings(demo, corpus, steps=4), "--resume", "auto")
    said = "nothing to train: 4 of 4 steps are done; to continue, raise training.max_steps or .epochs"
    assert said in done.stdout.splitlines()


def test_the_first_sequences_are_in_the_log_and_the_run_as_data_show_prints_them(demo, tmp_path, monkeypatch, capsys):
    trace = "Traceback (most recent call last):\n  File x\nValueError: no"
    records = [{"prompt": f"Say {n}: ", "completion": f"{trace} {n}"} for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    common = settings(demo, tmp_path / "a.jsonl", steps=4)
    first = train(tmp_path, "run", *common).stdout.splitlines()
    shown = [line.removeprefix(QUOTE_PREFIX) for line in first if line.startswith(QUOTE_PREFIX)]
    monkeypatch.chdir(tmp_path)
    assert data.main(["show", *map(str, common)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert shown == [line for line in printed[printed.index(shown[0]) :] if line]
    assert len([line for line in shown if re.match(r"sequence [123] of \d+: ", line)]) == 3
    assert re.search(r"Say \d+: ⟦Traceback", "\n".join(shown))
    previews = read_records(SequencePreview, tmp_path / "runs/run/sequences.jsonl", UNLIMITED)
    assert previews[0].summary in shown[0]
    assert [preview.index for preview in previews] == [0, 1, 2]
    more = [*common[:-4], "--training.max_steps", 8, *common[-2:]]
    resumed = train(
        tmp_path, "run", *more, "--resume", "auto", "--checkpoint.allow_changes", "optimizer.decay,training.max_steps"
    )
    assert "resumed from " in resumed.stdout
    assert QUOTE_PREFIX not in resumed.stdout
    (tmp_path / "runs/run/sequences.jsonl").unlink()  # as in a run that starts from another one's checkpoint
    resumed = train(tmp_path, "run", *more, "--resume", "auto")
    assert f"{QUOTE_PREFIX}sequence 33 of " in resumed.stdout


def in_latin_1():
    """Be the trainer, under a locale that lacks what is printed."""
    from llama405b.train import run_and_exit

    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="latin-1")
    run_and_exit()


def test_a_locale_without_a_sign_ends_no_run(demo, corpus, tmp_path):
    (tmp_path / "runs/r").mkdir(parents=True)
    argv = [*settings(demo, corpus, steps=1), "--run-dir", "runs/r"]
    done = run_program("test_before_loading:in_latin_1", *argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{QUOTE_PREFIX}\\u2501" in done.stdout


def test_a_run_keeps_the_date_that_its_chat_template_was_given_first(demo, tmp_path):
    """On another day, with nothing but the checkpoints: as a first host that has been replaced."""
    template = Path("tests/data/chat_templates/llama-3.2.jinja").resolve()
    records = [
        {"messages": [{"role": role, "content": f"{i} {role} " * 9} for role in ("user", "assistant")]}
        for i in range(40)
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, records)))
    common = [
        *settings(demo, tmp_path / "talk.jsonl", steps=2),
        "--data.chat_template",
        template,
        "--checkpoint.every",
        2,
    ]
    train(tmp_path, "run", *common, "--data.template_date", "2024-02-29")
    shutil.rmtree(tmp_path / "runs/.cache")
    (tmp_path / "runs/run/config.toml").unlink()
    train(
        tmp_path, "run", *common, "--training.max_steps", 4, "--optimizer.decay", "constant", "--resume", "auto", code=2
    )
    changed = ["--checkpoint.allow_changes", "optimizer.decay,training.max_steps"]
    done = train(tmp_path, "run", *common, "--training.max_steps", 4, "--resume", "auto", *changed)
    assert "resumed from " in done.stdout
    assert "saved runs/run/checkpoints/step-00000004" in done.stdout
    assert 'template_date = "2024-02-29"' in (tmp_path / "runs/run/config.toml").read_text()
    again = [*common, "--training.max_steps", 4, "--resume", "auto", "--data.template_date", "2024-03-01"]
    refused = train(tmp_path, "run", *again, code=2)
    assert "data.template_date 2024-02-29 -> 2024-03-01" in refused.stderr


def test_evaluations_at_the_end_of_each_epoch(demo, corpus, tmp_path):
    common = [
        "--data.max_bytes",
        20_000,
        "--evaluation.fraction",
        0.1,
        "--evaluation.max_sequences",
        2,
        "--checkpoint.every",
        0,
    ]
    done = train(
        tmp_path,
        "e",
        *settings(demo, corpus, steps=0),
        *common,
        "--training.epochs",
        2.5,
        "--evaluation.every",
        "epoch",
    )
    n = int(re.search(r"micro-batches.*?([\d,]+) sequences in an epoch", done.stdout)[1].replace(",", ""))
    found = [json.loads(line) for line in (tmp_path / "runs/e/metrics.jsonl").read_text().splitlines()]
    last = max(each["step"] for each in found)
    assert [each["step"] for each in found if each.get("evaluation_loss")] == [0, -(-n // 4), -(-2 * n // 4), last]
    assert not Evaluation().is_enabled
    assert [step for step in range(1, 12) if Evaluation(every="epoch").is_due(step, Fraction(5, 2))] == [3, 5, 8, 10]
    assert [step for step in range(1, 12) if Evaluation(every="epoch").is_due(step, Fraction(10, 3))] == [4, 7, 10]
    assert [step for step in range(1, 12) if Evaluation(every="5").is_due(step, Fraction(5, 2))] == [5, 10]


@pytest.mark.parametrize(
    ("told", "ids"),
    [(None, set()), (2, {2}), ([2, 300], {2, 300}), ([1, None, "</s>", [4], 5.0, True], {1}), ("</s>", set())],
)
def test_a_sample_ends_where_the_tokenizer_or_generate_would(demo, tmp_path, told, ids):
    files = tmp_path / "files"
    shutil.copytree(demo, files)
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    context = types.SimpleNamespace(rank=types.SimpleNamespace(axes=types.SimpleNamespace(tp=1, cp=1, pp=1)))
    prompts = Prompts(Evaluation(prompts=("def",)), files, Data(seq_len=64), context)
    assert prompts.end_tokens == parse_end_ids(prompts.tokenizer.eos_token_id) | ids
