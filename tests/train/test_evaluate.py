"""The loss on held-out data: the same for any number of ranks and any batch, and where it is told."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from conftest import ROOT
from llama405b.data.batches import Batches
from llama405b.data.encode import FIRST, NOT_LEARNT
from llama405b.data.sources import Mixture, Source
from ranks_rig import run_ranks

SEQ = 16
CASES = [(1, 0), (3, 0), (4, 5), (20, 0)]  # sequences at a time, and at most


def _batches():
    draw = np.random.default_rng(4)
    tokens_N = draw.integers(0, 131, 11 * SEQ + 1).astype(np.uint32)
    tokens_N[draw.random(len(tokens_N)) < 0.3] |= NOT_LEARNT
    tokens_N[::7] |= FIRST
    return Batches(Mixture.of([Source(tokens_N, SEQ)], 0))


def _evaluate(me, directory):
    from llama405b.evaluate import evaluate
    from update_rig import build, take

    module, updater = build(me, directory, overlap=True)
    found = [evaluate(module, _batches(), me, micro, most) for micro, most in CASES]
    for step in range(2):  # the next one waits for an update that is hidden under its forward
        take(me, module, updater, step)
        found.append(evaluate(module, _batches(), me, 2))
    loss = take(me, module, updater, 2)[0]
    updater.drain()
    return [(each.loss, each.n_targets, each.n_sequences) for each in found], loss


def _plainly(directory, n_sequences):
    model, batches = LlamaForCausalLM.from_pretrained(directory), _batches()
    nats, n_targets = 0.0, 0
    for sequence in [i * 11 // n_sequences for i in range(n_sequences)]:
        batch = batches.in_order([sequence])
        with torch.no_grad():
            logits = model(input_ids=batch.ids_BS, position_ids=batch.positions_BS, use_cache=False).logits
        nats += float(F.cross_entropy(logits[0], batch.targets_BS[0], ignore_index=-100, reduction="sum"))
        n_targets += int((batch.targets_BS != -100).sum())
    return nats / n_targets, n_targets, n_sequences


def test_it_does_not_depend_on_ranks_or_batches(tiny):
    trained = []
    for world in (1, 2, 3):
        for found, loss in run_ranks(world, _evaluate, tiny):
            for (_, most), (value, *counts) in zip(CASES, found, strict=False):
                expected, *wanted = _plainly(tiny, most or 11)
                assert value == pytest.approx(expected, rel=1e-6)
                assert counts == wanted
            trained.append([value for value, *_ in found[len(CASES) :]] + [loss])
    assert all(each == pytest.approx(trained[0], rel=1e-5) for each in trained)
    assert trained[0][0] != trained[0][1]


def _gathered_in_a_step(me, directory, evaluates):
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_torch

    from llama405b.evaluate import evaluate
    from update_rig import build, take

    module, updater = build(me, directory, overlap=True)
    take(me, module, updater, 0)
    if evaluates:
        evaluate(module, _batches(), me, 2)
    gather, found = of_torch.foreach_all_gather, []

    def note(parameters, *args):
        found.append(parameters[-1]._param_fqn)
        return gather(parameters, *args)

    of_torch.foreach_all_gather = note
    take(me, module, updater, 1)
    updater.drain()
    return found


def test_the_step_after_an_evaluation_gathers_nothing_for_nobody(tiny):
    usual, _ = run_ranks(2, _gathered_in_a_step, tiny, False)
    after, _ = run_ranks(2, _gathered_in_a_step, tiny, True)
    assert usual.count("lm_head.weight") == 1
    assert after == [name for name in usual if name != "lm_head.weight"]  # the evaluation left it gathered


def _train(work, demo, *settings, world=1):
    flags = {
        "model.path": demo, "data.paths": "corpus", "data.seq_len": 32, "training.global_batch_size": 4, "training.max_steps": 5,
        "parallel.device": "cpu", "parallel.numerics": "fp32", "checkpoint.every": 0,
    }  # fmt: skip
    typed = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"}
    command = ["-m", "llama405b_tools.cli", "train"]
    if world > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "llama405b.train"]
    command = [sys.executable, *command, "--run-dir", "runs/r", *typed, *settings]
    return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("how", [("--evaluation.fraction", "0.1"), ("--evaluation.paths", "held.txt")])
def test_a_run_tells_it(demo, corpus, tmp_path, how):
    (tmp_path / "corpus").symlink_to(corpus)
    (tmp_path / "held.txt").write_text("".join(file.read_text() for file in sorted(corpus.rglob("*.py")))[:9000])
    done = _train(tmp_path, demo, "--evaluation.every", "2", *how)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("evaluation after step ")]
    assert [line.split()[3] for line in lines] == ["2:", "4:", "5:"]
    metrics = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    found = [each.get("evaluation_loss") for each in metrics]
    assert [value is not None for value in found] == [False, True, False, True, True]
    assert f"loss {found[1]:.4f}, perplexity" in lines[0]
    assert found[4] < found[1]


def test_several_ranks_keep_the_best_beside_the_newest_and_know_it_after_a_resume(demo, corpus, tmp_path):
    (tmp_path / "corpus").symlink_to(corpus)
    settings = {
        "evaluation.every": 1, "evaluation.fraction": 0.1, "checkpoint.every": 4, "checkpoint.keep_best": "true",
        "optimizer.lr": 1.0, "optimizer.warmup": 40, "training.max_steps": 12,
    }  # fmt: skip
    typed = [word for key, value in settings.items() for word in (f"--{key}", str(value))]

    def losses_of(steps):
        done = _train(tmp_path, demo, *typed, "--training.max_steps", str(steps), "--resume", "auto", world=2)
        assert done.returncode == 0, done.stderr
        metrics = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
        kept = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "runs/r/checkpoints").glob("step-*"))
        return {each["step"]: each["evaluation_loss"] for each in metrics}, kept

    for steps in (12, 16):
        losses, kept = losses_of(steps)
        best = min(losses, key=losses.get)
        assert best < 8  # the learning rate has grown beyond what is good
        assert kept == [best, steps - 4, steps]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--checkpoint.keep_best", "true"], "nothing would be evaluated, or nothing saved; set evaluation.every"),
        (["--evaluation.every", "2"], "no data to evaluate on; set evaluation.paths or evaluation.fraction"),
        (["--evaluation.paths", "a"], "evaluation.every is 0, so evaluation.paths would not be used"),
        (["--evaluation.every", "2", "--evaluation.fraction", "0.6"], "fraction is 0.6; use at most 0.5"),
    ],
)
def test_bad_input(demo, tmp_path, settings, words):
    done = _train(tmp_path, demo, *settings)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
