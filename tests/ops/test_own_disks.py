"""A run on real hosts that share nothing, not even a user: its checkpoints are on their own disks."""

import re

import pytest

from ops_rig import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.hosts]
DEMO = ["--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64"]
SAVING = ["--training.max_steps", 16, "--checkpoint.every", 4, "--checkpoint.place", "node"]


def _losses(done):
    return [line.split()[3] for line in done.stdout.splitlines() if line.startswith("step ")][-4:]


def test_a_killed_run_resumes_from_the_hosts_own_disks_in_another_order(hosts, operator):
    flags = ["--follow", *DEMO, *SAVING]
    whole = operator("launch", "--run", "whole", *flags)
    assert whole.returncode == 0, whole.stderr
    assert "checkpoints: each host keeps its part, 3 directories in all; if a host is lost, so are they" in whole.stdout
    kept = [
        hosts.exec(i, "find", f"{hosts.workdir(i)}/runs/whole/checkpoints/step-00000016", "-name", "*.distcp").stdout
        for i in (1, 2, 3)
    ]
    assert [{name[2] for name in re.findall(r"__\d_\d", found)} for found in kept] == [{"0"}, {"1"}, {"2"}]

    assert operator("launch", "--run", "r", *DEMO, *SAVING).returncode == 0
    there = f"{hosts.workdir(3)}/runs/r/checkpoints/step-00000004"
    wait_for(lambda: hosts.exec(3, "test", "-d", there, check=False).returncode == 0)
    hosts.exec(2, "pkill", "-9", "-f", "llama405b.train", check=False)
    wait_for(lambda: operator("status", "--run", "r").returncode == 1)

    hosts.hosts_file(operator.path / "hosts", indices=[3, 1, 2])
    again = operator("launch", "--run", "r", "--resume", "auto", *flags)
    assert again.returncode == 0, again.stderr
    assert "resumed from runs/r/checkpoints/step-0000000" in again.stdout
    assert _losses(again) == _losses(whole)
    hosts.exec(1, "test", "!", "-e", f"{hosts.workdir(1)}/runs/r/checkpoints/step-00000004.r.tmp-read")
