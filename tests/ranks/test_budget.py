"""A run that may take so many GPU-hours warns, saves and stops before they are spent, over all of its attempts."""

import json
import re

from ranks_rig import run_program

FLAGS = (
    "--preset", "demo", "--training.micro_batch_size", 2, "--training.global_batch_size", 4, "--data.seq_len", 64, "--data.max_bytes",
    300_000, "--optimizer.warmup", 0, "--evaluation.every", 0, "--checkpoint.every", 10_000, "--parallel.device", "cpu",
    "--training.max_steps", 100_000, "--checkpoint.allow_changes", "all",
)  # fmt: skip
SECONDS, WORLD = 9.0, 2


def trainer():
    """Be the trainer on one of the ranks, which has little to do at its end."""
    from llama405b.train import run_and_leave
    from llama405b.training import budget

    budget.ENDING_S = 1.0
    run_and_leave()


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
    assert "of 0.005 GPU-hours are spent (--training.gpu_hours)" in done.stdout
    assert re.search(rf"stopped after step {_step(run)}, as 0\.00\d+ of 0\.005 GPU-hours are spent", done.stdout)
    assert 0.5 * SECONDS < spent <= SECONDS
    assert (run / f"checkpoints/step-{_step(run):08}/manifest.json").exists()

    before = _step(run)
    done, spent = _train(demo, run, 2 * SECONDS, "--resume", "auto")  # the second counts what the first took
    assert done.returncode == 0, done.stdout + done.stderr
    assert _step(run) > before
    assert 1.5 * SECONDS < spent <= 2 * SECONDS

    done, _ = _train(demo, run, SECONDS, "--resume", "auto")
    assert done.returncode == 2
    assert "are spent; raise it to go on, or leave it out" in done.stderr
