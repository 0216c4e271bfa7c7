"""parallel.strategy 3d and auto without a launch: rank 0 chooses a mesh for all."""

import json
import tomllib

import pytest

from ranks_rig import run_program


def _train(demo, corpus, work, world, *flags):
    argv = (
        "--preset", "demo", "--model.path", demo, "--data.paths", corpus, "--data.seq_len", 32, "--training.global_batch_size", 8,
        "--training.micro_batch_size", 1, "--training.max_steps", 3, "--checkpoint.every", 0, "--evaluation.every", 0,
        "--parallel.device", "cpu", "--run-dir", work / "run",
    )  # fmt: skip
    work.mkdir()
    return run_program("llama405b.train:run_and_exit", *argv, *flags, cwd=work, world=world)


def _of(done, work):
    assert done.returncode == 0, done.stdout + done.stderr
    parallel = tomllib.loads((work / "run/config.toml").read_text())["parallel"]
    losses = [json.loads(row)["loss"] for row in (work / "run/metrics.jsonl").read_text().splitlines()]
    return parallel, losses


def test_3d_and_auto_train_as_one_process_does(demo, corpus, tmp_path):
    _, of_one = _of(_train(demo, corpus, tmp_path / "one", 1), tmp_path / "one")
    parallel, losses = _of(_train(demo, corpus, tmp_path / "3d", 4, "--parallel.strategy", "3d"), tmp_path / "3d")
    assert (parallel["tp"], parallel["pp"]) == (2, 2)
    assert losses == pytest.approx(of_one, rel=1e-5)
    parallel, losses = _of(_train(demo, corpus, tmp_path / "auto", 2, "--parallel.strategy", "auto"), tmp_path / "auto")
    assert parallel["strategy"] == "fsdp2"
    assert losses == pytest.approx(of_one, rel=1e-5)


def test_what_cannot_be_split_so_is_refused_on_all_ranks(demo, corpus, tmp_path):
    done = _train(demo, corpus, tmp_path / "two", 2, "--parallel.strategy", "3d")
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("--parallel.strategy") == 2
