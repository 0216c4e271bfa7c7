"""plan --calibrate: the planned run's own steps, measured on two nodes of this machine, kept and used."""

import json
import re

import pytest

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
    found = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--verbose", timeout=200)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "on 2 x 1 cpu; fp32, offload none, micro-batch 4 of 64 tokens, 512 tokens a step" in lines[0]
    assert lines[1].startswith("rank memory  0.")
    [made] = [i for i, line in enumerate(lines) if line.startswith("measured     on these hosts on 20")]
    assert lines[made].endswith("step and memory, with 1 and 2 layers")
    assert re.search(
        r"a layer 0\.\d+ s; GB/s: AdamW .* copies .*, all-gather .*, reduce-scatter .*, writing ", lines[made + 1]
    )
    assert list((work / "runs").glob("*/checkpoints/step-*")) == []
    assert list((work / "runs").glob("*/checkpoints/.rates-*")) == []
    kept = json.loads((work / "hosts.calibration.json").read_text())
    assert [kept[name]["layers"] for name in ("few", "more")] == [1, 2]
    assert kept["few"]["forward_s"] > 0
    assert kept["more"]["peak_bytes"] > 100 << 20
    assert all(rate > 0 for rate in kept["alone"].values())
    brief = cli(work, "plan", "hosts", *SMALL).stdout.splitlines()
    assert re.match(r"fits: .* parameters on 2 x 1 cpu \(2 ranks\); [\d,.]+ GiB of each rank to spare", brief[0])
    assert brief[-1].endswith("step and memory, with 1 and 2 layers")
    again = json.loads(cli(work, "plan", "hosts", *SMALL, "--json").stdout)
    assert again["calibrated"] is True
    assert all(again["time"][name] > 0 for name in ("forward_s", "step_s"))
    smaller = cli(work, "plan", "hosts", *SMALL, "--training.micro_batch_size", "2", "--search", "--json")
    other = json.loads(smaller.stdout)
    assert (other["evidence"], other["time"]["data_s"]) == ("rates", 0)
    assert (other["time_range"]["low"], other["time_range"]["high"]) == (0.85, 1.15)
    assert other["time"]["communication_s"] > again["time"]["communication_s"]  # twice as often
    assert {each["settings"]["offload"] for each in other["search"]} == {"none"}
    longer = cli(work, "plan", "hosts", *SMALL, "--data.seq_len", "32")
    assert (longer.returncode, "plan HOSTS --calibrate" in longer.stderr) == (2, True)  # measured was another sequence
    described = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--nic", "10Gb/s")
    assert (described.returncode, "--nic: --calibrate measures the hosts as they are" in described.stderr) == (2, True)
    refused = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--parallel.offload", "all")
    assert (refused.returncode, "only --parallel.offload none can be measured" in refused.stderr) == (2, True)
    for recompute, why in (
        ("operators:1", "measures only runs with identical layers"),
        ("auto", "would choose something else"),
    ):
        unlike = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--model.activation_checkpointing", recompute)
        assert (unlike.returncode, why in unlike.stderr) == (2, True), unlike.stderr
    launched = ["--run", "scored", "--follow", *SMALL, "--training.max_steps", "8", "--checkpoint.every", "4"]
    scored = cli(work, "launch", *launched, "--data.paths", "stdlib")
    assert scored.returncode == 0, scored.stdout + scored.stderr
    expected = json.loads((work / "runs/scored/plan.json").read_text())["expected"]
    assert expected["step_s"] == pytest.approx(again["time"]["step_s"])
    said = cli(work, "report", "--run", "scored").stdout
    assert re.search(r"^prediction a step [\d.]+s, predicted [\d.]+s \([\d.]+\); ", said, re.MULTILINE)
    for name in ("the first step", "until training began", "a save", "peak memory"):
        assert re.search(rf"^ +{name} .*, predicted .* \([\d.]+\)$", said, re.MULTILINE), said
    assert "CHANGED" not in said
    lost = cli(work, "plan", "hosts", *SMALL, "--calibrate", "--data.paths", "nosuch")
    assert (lost.returncode, "nosuch" in lost.stderr) == (2, True)
