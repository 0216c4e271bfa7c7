"""A run on four real hosts loses one for a while: it goes on with three, and takes the fourth back, to the losses of an undisturbed run."""

import re

import pytest

from ops_rig import wait_for

N_HOSTS = 4
HOST_USERS = ("root",)
SETTINGS = [
    "--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64",
    "--training.max_steps", "150", "--checkpoint.every", "5", "--evaluation.every", "0", "--evaluation.fraction", "0",
]  # fmt: skip


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+ +loss (\S+)", text, re.MULTILINE)}


def test_it_shrinks_and_grows_again(hosts, operator):
    checkpoints = hosts.shared / "c"
    whole = operator(
        "launch", "--run", "whole", *SETTINGS, "--checkpoint.dir", hosts.shared / "w", "--follow", timeout=200
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    expected = losses(whole.stdout)
    flags = ["--restart", "3", "--shrink", "2", "--shrink-after", "3s", "--timeouts.step", "20"]
    assert operator("launch", "--run", "s", *SETTINGS, "--checkpoint.dir", checkpoints, *flags).returncode == 0
    log = operator.path / "runs/s/guard.log"
    wait_for(lambda: any(checkpoints.glob("step-*/manifest.json")))
    hosts.crash(4)
    try:
        wait_for(lambda: "running again without node-4" in log.read_text())
        told = operator("status", "--run", "s", timeout=200)
        assert "without node-4" in told.stdout
    finally:
        hosts.boot(4)
        hosts._wait()
    wait_for(lambda: "node-4: back; the attempt saves and ends" in log.read_text())
    wait_for(lambda: "ended: the run finished successfully" in log.read_text())
    assert re.search(r"running again after a restart that its guard \(node-4 is back\) asked for", log.read_text())
    found = losses(operator("logs", "--run", "s", timeout=200).stdout)
    assert {150, 149} <= found.keys()
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], abs=2e-3), step
