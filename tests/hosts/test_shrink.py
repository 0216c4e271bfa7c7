"""A run on real hosts loses one for a while: it goes on without, and takes the host back, to the losses of one rank alone."""

import json

import pytest

from ops_rig import train, wait_for

HOST_USERS = ("root",)
SETTINGS = [
    "--preset", "demo", "--data.max_bytes", "400000", "--data.seq_len", "64", "--training.max_steps", "30",
    "--evaluation.every", "0", "--evaluation.fraction", "0",
]  # fmt: skip


def losses(text):
    return {row["step"]: (row["loss"], row["attempt"]) for row in map(json.loads, text.splitlines()) if "loss" in row}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_it_shrinks_and_grows_again(hosts, operator, n):
    settings = [*SETTINGS, "--training.global_batch_size", 4 * n]
    train(operator.path, "whole", *settings, "--checkpoint.every", 0)
    hosts.hosts_file(operator.path / "hosts", indices=range(1, n + 1))
    checkpoints = hosts.shared / f"c{n}"
    flags = ["--restart", 3, "--shrink", n - 1, "--shrink-after", "3s", "--timeouts.step", 20]
    saving = ["--checkpoint.dir", checkpoints, "--checkpoint.every", 4]
    started = operator("launch", "--run", "s", *settings, *saving, *flags)
    assert started.returncode == 0, started.stderr
    log = operator.path / "runs/s/guard.log"
    wait_for(lambda: any(checkpoints.glob("step-*/manifest.json")))
    hosts.crash(n)
    try:
        wait_for(lambda: f"running again without node-{n}" in log.read_text())
        told = operator("status", "--run", "s", timeout=200)
        assert f"without node-{n}" in told.stdout
    finally:
        hosts.boot(n)
        hosts._wait()
    wait_for(lambda: f"node-{n}: back; the attempt saves and ends" in log.read_text())
    wait_for(lambda: "ended: the run finished successfully" in log.read_text())
    assert f"running again after a restart requested by its guard (node-{n} is back)" in log.read_text()
    expected = losses((operator.path / "runs/whole/metrics.jsonl").read_text())
    found = losses(hosts.exec(1, "cat", f"{hosts.workdir(1)}/runs/s/metrics.jsonl").stdout)
    assert found.keys() == expected.keys(), "no step is missing, or taken twice"
    assert {attempt for _, attempt in found.values()} == {1, 2, 3}
    for step, (loss, _) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=2e-3), step
