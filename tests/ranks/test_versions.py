"""A run's directory that the version before wrote: its checkpoints are resumed from and exported, and its numbers go on."""

import json
import tarfile

import pytest
from safetensors.torch import load_file

from conftest import ROOT
from llama405b_tools.verbs import export
from ranks_rig import run_program

FORMAT_2 = ROOT / "tests/data/checkpoints/format-2.tar.xz"  # 2 ranks took 6 steps; the checkpoint is of step 2


@pytest.fixture
def directory(tmp_path):
    with tarfile.open(FORMAT_2) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def _losses(run):
    return {row["step"]: row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.parametrize("world", [2, 1])
def test_a_run_goes_on_from_its_checkpoint_of_the_version_before(directory, world):
    run = directory / "runs/r"
    before = _losses(run)
    argv = ("--config", "config.toml", "--run-dir", "runs/r", "--resume", "auto", "--model.fused", "false")
    done = run_program("llama405b.train:run_and_exit", *argv, cwd=directory, world=world)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from runs/r/checkpoints/step-00000002" in done.stdout
    assert _losses(run) == pytest.approx(before, rel=1e-6 if world == 2 else 1e-3)
    newest = run / "checkpoints/step-00000006"
    assert json.loads((newest / "manifest.json").read_text().splitlines()[0])["format"] == 3
    assert {path.suffix for path in newest.iterdir() if path.is_file()} == {".json", ".toml", ".safetensors"}


def test_it_is_exported(directory):
    step, out = directory / "runs/r/checkpoints/step-00000002", directory / "out"
    assert export.main([str(step), str(out), "--model", str(directory / "model")]) == 0
    shapes = {name: tensor.shape for name, tensor in load_file(out / "model.safetensors").items()}
    assert shapes == {name: tensor.shape for name, tensor in load_file(directory / "model/model.safetensors").items()}
