"""A run's numbers arrive in W&B's own files and TensorBoard's, each step once over a resume; a tracker that is dead costs no step."""

import json
import os
import shutil
import sys
import time
import types
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.commands import track
from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, UserError
from llama405b_tools.verbs import export
from ranks_rig import run_program

TRACKERS = ROOT / ".venv/trackers"  # apart, as they bring much
FLAGS = (
    "--preset", "demo", "--training.micro_batch_size", 2, "--training.global_batch_size", 4, "--data.seq_len", 64, "--data.max_bytes",
    300_000, "--optimizer.warmup", 0, "--evaluation.every", 2, "--checkpoint.every", 2, "--parallel.device", "cpu",
    "--checkpoint.allow_changes", "all", "--evaluation.prompts", '["import os"]', "--evaluation.prompt_tokens", 2,
)  # fmt: skip
OFFLINE = ("--tracking.to", "wandb,tensorboard", "--tracking.offline")


@pytest.fixture(autouse=True)
def _packages(monkeypatch):
    if not TRACKERS.exists():
        why = f"NOT RUN: pip install --target {TRACKERS} wandb tensorboard"
        pytest.fail(why) if os.environ.get("LLAMA405B_NOTHING_SKIPPED") else pytest.skip(why)
    monkeypatch.setattr(sys, "path", [*sys.path, str(TRACKERS)])
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # or the next test's processes would join what it leaves running
        os.environ.pop("WANDB_SERVICE", None)


def trainer():
    """Be the trainer on one of the ranks, with the trackers' packages; where W&B is dead, its time is over when the others have ended."""
    from llama405b.tracking import uploads
    from llama405b.train import run_and_exit
    from llama405b.training import setup

    sys.path.append(str(TRACKERS))
    closing = []

    def monotonic():
        [trackers] = closing
        alone = [*trackers.pids.values()] == ["wandb"] and trackers.run.sent("wandb").exists()
        return uploads.CLOSE_TIMEOUT_S if alone and "WANDB_BASE_URL" in os.environ else 0.0

    class Trackers(uploads.TrackerProcesses):
        def close(self):
            closing.append(self)
            uploads.time = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
            super().close()

    setup.TrackerProcesses = Trackers
    run_and_exit()


def trainer_without():
    """Be the trainer without them."""
    from llama405b.train import run_and_exit

    sys.path.remove(str(TRACKERS))
    run_and_exit()


def _train(model, run, steps, *flags, env=None):
    argv = [*FLAGS, "--model.path", model, "--run-dir", run, "--training.max_steps", steps, *flags]
    done = run_program("test_tracking:trainer", *argv, cwd=run.parent, world=2, timeout_s=200, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _losses(run):
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _records(path):
    """W&B's records in a file of theirs: LevelDB's log format, of blocks of 32 KiB, after seven bytes of their own."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def _of_wandb(run):
    """What W&B was told: by step, and the runs' ids."""
    rows, ids = [], set()
    for path in sorted(run.glob("tracking/wandb/offline-run-*/*.wandb")):
        for record in _records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                )
    return rows, ids


def _of_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tracking/tensorboard"))
    found.Reload()
    tags = found.Tags()
    texts = {
        name: [each.step for each in found.Tensors(name)] for name in tags["tensors"] if name.startswith("prompts")
    }
    return texts | {name: [(each.step, each.value) for each in found.Scalars(name)] for name in tags["scalars"]}


def test_a_resume_goes_on_and_what_is_done_again_keeps_its_first_values(demo, tmp_path, monkeypatch):
    run = tmp_path / "run"
    _train(demo, run, 4, *OFFLINE)
    before = _losses(run)
    said = _train(demo, run, 6, *OFFLINE, "--resume", "2")
    for name in ("wandb", "tensorboard"):
        assert (
            f"tracking {name}: it keeps steps 3-4 as they are and gets only later ones; `llama405b track --run run --ag"
            in said
        )
    after = _losses(run)
    expected = after | before
    assert after[4] != before[4]  # the schedule is longer

    curves = _of_tensorboard(run)
    assert [step for step, _ in curves["loss"]] == [1, 2, 3, 4, 5, 6]
    assert dict(curves["loss"]) == pytest.approx(expected)
    assert [step for step, _ in curves["evaluation_loss"]] == [0, 2, 4, 6]
    assert {*curves} >= {"lr", "tokens_per_s", "grad_norm", "events/saved", "events/resumed"}

    rows, ids = _of_wandb(run)
    assert len(ids) == 1
    assert {int(row["_step"]): row["loss"] for row in rows if "loss" in row} == pytest.approx(expected)
    assert sum("loss" in row for row in rows) == 6
    assert any("events/resumed" in row for row in rows)
    sampled = [int(row["_step"]) for row in rows if any("prompts/1" in key for key in row)]
    assert sampled == curves["prompts/1/text_summary"] == [0, 2, 4, 6]

    monkeypatch.chdir(tmp_path)
    assert export.main(["run", "out"]) == EXIT_OK
    with pytest.raises(UserError, match="run/model was not written by `llama405b export`"):
        track.main(["--run", "run", "--model", "run/model"])
    assert track.main(["--run", "run", "--model", "out"]) == EXIT_OK
    children = Path("/proc/self/task").glob("*/children")
    ours = [pid for each in children for pid in each.read_text().split()]
    assert "wandb-core\n" not in [Path(f"/proc/{pid}/comm").read_text() for pid in ours]  # so all is in its files
    logged = [record.artifact for path in run.glob("tracking/wandb/offline-run-*/*.wandb") for record in _records(path)
        if record.WhichOneof("record_type") == "artifact" and record.artifact.type == "model"]  # fmt: skip
    assert [each.name for each in logged] == ["run-model"]
    assert {entry.path for entry in logged[0].manifest.contents} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }


def test_a_tracker_that_is_dead_costs_no_step_and_is_sent_all_later(demo, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    said = _train(demo, run, 3, "--tracking.to", "wandb,tensorboard", env=nobody)
    assert "tracking wandb: not all was sent within 30 s; `llama405b track --run run` sends the rest" in said
    assert [*_losses(run)] == [1, 2, 3]
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [each for each in commands if str(run).encode() in each and b"commands.track" in each]
    assert json.loads((run / "tracking/wandb.json").read_text())["step"] == -1

    assert [step for step, _ in _of_tensorboard(run)["loss"]] == [1, 2, 3]  # the other is not held up

    settings = run / "config.toml"
    settings.write_text(settings.read_text().replace("offline = false", "offline = true"))
    monkeypatch.chdir(tmp_path)
    assert track.main(["--run", "run"]) == EXIT_OK
    assert [int(row["_step"]) for row in _of_wandb(run)[0]] == [0, 1, 2, 3]
    assert json.loads((run / "tracking/wandb.json").read_text())["step"] == 3

    shutil.rmtree(run / "tracking/tensorboard")
    (run / "tracking/tensorboard.json").unlink()
    (run / "tracking/tensorboard").write_text("in the way")
    assert track.main(["--run", "run", "--only", "tensorboard"]) == EXIT_FAILED
    told = capfd.readouterr().out
    assert "tracking tensorboard: " in told
    assert "4 steps were not sent; `llama405b track --run run` sends them" in told


def test_a_package_that_is_missing_is_refused_before_training(demo, tmp_path):
    argv = [
        *FLAGS,
        "--model.path",
        demo,
        "--run-dir",
        tmp_path / "run",
        "--training.max_steps",
        1,
        "--tracking.to",
        "tensorboard",
    ]
    done = run_program("test_tracking:trainer_without", *argv, cwd=tmp_path, world=1, timeout_s=100)
    assert done.returncode == 2
    assert (
        "--tracking.to: the package tensorboard is not installed on rank 0's host; run `pip install tensorboard` there"
        in done.stderr
    )
