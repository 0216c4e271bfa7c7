"""plan --calibrate: the planned run's own steps, measured on two nodes of this machine, kept and used."""

import json

import pytest

pytestmark = pytest.mark.slow
SMALL = (
    "--preset",
    "demo",
    "--model.path",
    "m",
    "--data.seq_len",
    "64",
    "--parallel.wrap",
    "LlamaDecoderLayer,Embedding",
)


def test_a_calibrated_plan_is_kept_and_used(work, cli, demo):
    (work / "m").symlink_to(demo)
    bare = cli(work, "plan", "hosts", *SMALL)
    assert bare.returncode == 2
    assert bare.stderr.endswith(
        "no data sheet tells how fast a CPU trains; measure it on the hosts: plan HOSTS --calibrate\n"
    )
    found = cli(work, "plan", "hosts", *SMALL, "--calibrate", timeout=200)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "on 2 x 1 cpu; fp32, offload none, micro-batch 4 of 64 tokens, 512 tokens a step" in lines[0]
    assert lines[1].startswith("rank memory  0.")
    assert lines[-1].startswith("measured     step and memory, on these hosts on 20")
    assert list((work / "runs").glob("*/checkpoints/step-*")) == []
    kept = json.loads((work / "hosts.calibration.json").read_text())
    assert [kept[name]["layers"] for name in ("few", "more")] == [1, 2]
    assert kept["few"]["forward_s"] > 0
    assert kept["more"]["peak_bytes"] > 100 << 20
    again = cli(work, "plan", "hosts", *SMALL, "--json")
    assert json.loads(again.stdout)["calibrated"] is True
    steps = {name: value for name, value in json.loads(again.stdout)["time"].items() if name in ("forward_s", "step_s")}
    assert all(value > 0 for value in steps.values())
    other = cli(work, "plan", "hosts", *SMALL, "--training.micro_batch_size", "2")
    assert other.returncode == 2  # measured was another run
    refused = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--parallel.offload", "full")
    assert (refused.returncode, "measures --parallel.offload none alone" in refused.stderr) == (2, True)
    lost = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--data.paths", "nosuch")
    assert (lost.returncode, "nosuch" in lost.stderr) == (2, True)
