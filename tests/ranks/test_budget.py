"""A run that may take so many GPU-hours warns, saves and stops before they are spent, over all of its attempts."""

import json
import types

import pytest

from ranks_rig import run_program

FLAGS = (
    "--preset", "demo", "--training.micro_batch_size", 2, "--training.global_batch_size", 4, "--data.seq_len", 64, "--data.max_bytes",
    300_000, "--optimizer.warmup", 0, "--evaluation.every", 0, "--checkpoint.every", 10_000, "--parallel.device", "cpu",
    "--training.max_steps", 100_000, "--checkpoint.allow_changes", "all",
)  # fmt: skip
SECONDS, WORLD = 180.0, 2
STEP_S, SAVE_S = 10.0, 2.0  # so the last 28 s are for what is still to be done


def trainer():
    """Be the trainer on one of the ranks, by a clock of its own: each step takes ten seconds, and nothing else takes any time."""
    from llama405b.train import run_and_exit
    from llama405b.training import guards, setup

    steps = []
    guards.time = types.SimpleNamespace(monotonic=lambda: STEP_S * len(steps))

    class Budget(guards.Budget):
        def __init__(self, gpu_hours, context, _):
            super().__init__(gpu_hours, context, 0.0)

        def after_step(self, *_):
            steps.append(1)
            return super().after_step(STEP_S, SAVE_S)

    setup.Budget = Budget
    run_and_exit()


def _train(model, run, seconds, *flags):
    hours = seconds * WORLD / 3600
    argv = [*FLAGS, "--model.path", model, "--run-dir", run, "--training.gpu_hours", hours, *flags]
    done = run_program("test_budget:trainer", *argv, cwd=run.parent, world=WORLD, timeout_s=200)
    spent = json.loads((run / "spent.json").read_text())["gpu_hours"] * 3600 / WORLD
    return done, spent


def _step(run):
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def test_it_is_saved_before_its_hours_are_spent_over_all_attempts(demo, tmp_path):
    run = tmp_path / "run"
    done, spent = _train(demo, run, SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 0.1 GPU-hours are spent (--training.gpu_hours)" in done.stdout
    assert f"stopped after step {_step(run)}, as 0.089 of 0.1 GPU-hours are spent" in done.stdout
    assert (_step(run), spent) == (16, pytest.approx(160.0))
    assert (run / f"checkpoints/step-{_step(run):08}/manifest.json").exists()

    done, spent = _train(demo, run, 2 * SECONDS, "--resume", "auto")  # the second counts what the first took
    assert done.returncode == 0, done.stdout + done.stderr
    assert (_step(run), spent) == (34, pytest.approx(340.0))

    done, _ = _train(demo, run, SECONDS, "--resume", "auto")
    assert done.returncode == 2
    assert "are spent; raise it to continue, or remove it" in done.stderr
