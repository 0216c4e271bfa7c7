"""What is known before weights are loaded is said then; and where nothing is left to do, that."""

import json
import shutil
import types

import pytest

from llama405b.settings.schema import Evaluation
from llama405b.spec.models import end_ids
from llama405b.training.evaluate import Prompts
from ops_rig import settings, train


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
    said = "no step is left to take: 4 are done, of 4; to go on, raise training.max_steps or .epochs"
    assert said in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("told", "ids"),
    [(None, set()), (2, {2}), ([2, 300], {2, 300}), ([1, None, "</s>", [4], 5.0, True], {1}), ("</s>", set())],
)
def test_a_sample_ends_where_the_tokenizer_or_generate_would(demo, tmp_path, told, ids):
    files = tmp_path / "files"
    shutil.copytree(demo, files)
    (files / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    context = types.SimpleNamespace(me=types.SimpleNamespace(axes=types.SimpleNamespace(tp=1, cp=1, pp=1)))
    prompts = Prompts(Evaluation(prompts=("def",)), files, 64, context)
    assert prompts.ends == end_ids(prompts.tokenizer.eos_token_id) | ids
