"""A run on three real hosts loses one for a while: it goes on with two, and takes the third back, to the losses of one host alone."""

import json
import re

import pytest

from ops_rig import wait_for

HOST_USERS = ("root",)
SETTINGS = [
    "--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64",
    "--training.max_steps", "60", "--evaluation.every", "0", "--evaluation.fraction", "0",
]  # fmt: skip


def losses(hosts, run):
    text = hosts.exec(1, "cat", f"{hosts.workdir(1)}/runs/{run}/metrics.jsonl").stdout
    return {row["step"]: (row["loss"], row["attempt"]) for row in map(json.loads, text.splitlines()) if "loss" in row}


@pytest.mark.timeout(900)
def test_it_shrinks_and_grows_again(hosts, operator):
    checkpoints = hosts.shared / "c"
    hosts.hosts_file(operator.path / "one", indices=[1])
    alone = operator("launch", "one", "--run", "whole", *SETTINGS, "--checkpoint.every", 0, "--follow", timeout=500)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    flags = ["--restart", "3", "--shrink", "2", "--shrink-after", "3s", "--timeouts.step", "20"]
    assert (
        operator(
            "launch", "--run", "s", *SETTINGS, "--checkpoint.dir", checkpoints, "--checkpoint.every", 4, *flags
        ).returncode
        == 0
    )
    log = operator.path / "runs/s/guard.log"
    wait_for(lambda: any(checkpoints.glob("step-*/manifest.json")))
    hosts.crash(3)
    try:
        wait_for(lambda: "running again without node-3" in log.read_text())
        told = operator("status", "--run", "s", timeout=200)
        assert "without node-3" in told.stdout
    finally:
        hosts.boot(3)
        hosts._wait()
    wait_for(lambda: "node-3: back; the attempt saves and ends" in log.read_text())
    wait_for(lambda: "ended: the run finished successfully" in log.read_text())
    assert re.search(r"running again after a restart that its guard \(node-3 is back\) asked for", log.read_text())
    expected, found = losses(hosts, "whole"), losses(hosts, "s")
    assert found.keys() == expected.keys(), "no step is missing, or taken twice"
    assert {attempt for _, attempt in found.values()} == {1, 2, 3}
    for step, (loss, _) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=2e-3), step
