"""FP8: torchao emulates it on CPUs. Losses beside those in BF16, the same checkpoints, resumed; refused where it is not to be had."""

import json
import os
import shutil
import sys

import pytest
import torch

from conftest import ROOT
from llama405b.model import llama
from ranks_rig import run_program

TORCHAO = ROOT / ".venv/torchao"  # apart, since transformers imports it wherever it is installed
FLAGS = (
    "--preset", "demo", "--training.max_steps", 6, "--training.micro_batch_size", 2, "--training.global_batch_size", 4,
    "--data.seq_len", 64, "--data.max_bytes", 300_000, "--optimizer.lr", "3e-3", "--optimizer.warmup", 0,
    "--evaluation.every", 0, "--checkpoint.every", 3, "--parallel.device", "cpu",
)  # fmt: skip


def trainer():
    """Be the trainer on one of the ranks, with torchao."""
    from llama405b.train import run_and_exit

    sys.path.append(str(TORCHAO))
    run_and_exit()


def _train(model, run, numerics, *flags, program="test_fp8:trainer"):
    argv = [*FLAGS, "--model.path", model, "--run-dir", run, "--parallel.numerics", numerics, *flags]
    return run_program(program, *argv, cwd=run.parent, world=2, timeout_s=200)


def _losses(run):
    return [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]


def _tensors(run):
    return json.loads((run / "checkpoints/step-00000006/index.json").read_text())["tensors"]


def test_it_learns_as_bf16_does_and_saves_the_same(demo, tmp_path):
    if not TORCHAO.exists():
        why = f"NOT RUN: pip install --no-deps --target {TORCHAO} torchao"
        pytest.fail(why) if os.environ.get("LLAMA405B_NOTHING_SKIPPED") else pytest.skip(why)
    runs = {numerics: tmp_path / numerics for numerics in ("fp8", "fp32-master")}
    for numerics, run in runs.items():
        done = _train(demo, run, numerics)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("14 linear layers compute in FP8; slower than BF16 unless" in done.stdout) == (numerics == "fp8")
    losses, usual = map(_losses, runs.values())
    assert losses == pytest.approx(usual, rel=2e-2)
    assert losses != usual
    assert losses[-1] < losses[0]
    assert _tensors(runs["fp8"]) == _tensors(runs["fp32-master"])

    saved = runs["fp8"] / "checkpoints"
    shutil.rmtree(saved / "step-00000006")
    done = _train(demo, tmp_path / "resumed", "fp8", "--checkpoint.dir", saved, "--resume", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _losses(tmp_path / "resumed") == losses[3:]


def test_without_torchao_it_is_refused(demo, tmp_path):
    done = _train(demo, tmp_path / "run", "fp8", program="llama405b.train:run_and_exit")
    assert done.returncode == 2
    said = "--parallel.numerics fp8: the package torchao is not installed; run `pip install torchao` on the hosts, or use fp32-master"
    assert said in done.stdout + done.stderr


def test_a_gpu_that_has_none_is_refused(monkeypatch):
    monkeypatch.setattr(llama.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    for capability, why in (
        ((8, 0), "it needs a compute capability of 8.9, but NVIDIA A100-SXM4-80GB has 8.0; use newer GPUs"),
        ((9, 0), ""),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert llama.fp8_unsupported_reason(torch.device("cuda")) == why
