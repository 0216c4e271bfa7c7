"""A run on real hosts that share nothing, not even a user: its checkpoints are on their own disks."""

import os
import re
import subprocess
import sys

import pytest

from conftest import ONE_THREAD, ROOT
from ops_rig import train, wait_for

DEMO = ["--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64",
        "--evaluation.every", "0", "--evaluation.fraction", "0"]  # fmt: skip
SAVING = ["--training.max_steps", 24, "--checkpoint.every", 4, "--checkpoint.storage", "local"]


def _losses(text):
    return [line.split()[3] for line in text.splitlines() if line.startswith("step ")][-4:]


def _there(hosts, i, path):
    return hosts.exec(i, "test", "-e", f"{hosts.workdir(i)}/{path}", check=False).returncode == 0


def test_a_killed_run_resumes_from_the_hosts_own_disks_in_another_order(hosts, operator):
    flags = ["--follow", *DEMO, *SAVING]
    hosts.exec(3, "touch", f"{hosts.workdir(3)}/slow")
    sends = "test ! -e slow || sleep 5; test -d $LLAMA405B_CHECKPOINT && echo $LLAMA405B_STEP >>sent-$LLAMA405B_RUN"
    whole = operator("launch", "--run", "whole", *flags, "--after-save", sends)
    assert whole.returncode == 0, whole.stderr
    for i in (1, 2, 3):  # each its own part, the slow one too
        steps = [int(step) for step in hosts.exec(i, "cat", f"{hosts.workdir(i)}/sent-whole").stdout.split()]
        assert steps == sorted(steps)
        assert (len(steps) >= 5, steps[-1]) == (True, 24)
    losses = _losses(whole.stdout)
    told = operator("status", "--run", "whole").stdout
    assert re.search(r"newest checkpoint: /\S+/runs/whole/checkpoints/step-00000024\n", told)
    assert "copied to the next host: step 24" in told
    assert "checkpoints: each host keeps its part, 3 directories in all; the next host keeps a copy" in whole.stdout
    assert re.search(r"next: `\S+ export whole OUT hosts` writes a model that transformers loads", whole.stdout)
    kept = [
        hosts.exec(
            i, "find", f"{hosts.workdir(i)}/runs/whole/checkpoints/step-00000024", "-name", "*.safetensors"
        ).stdout
        for i in (1, 2, 3)
    ]
    assert [{*re.findall(r"weights-(\d)-", found)} for found in kept] == [{"0"}, {"1"}, {"2"}]

    assert (
        operator("launch", "--run", "r", *DEMO, *SAVING, "--parallel.pp", 3).returncode == 0
    )  # resumed on another mesh
    wait_for(lambda: _there(hosts, 3, "runs/r/checkpoints/step-00000004"))
    hosts.exec(2, "pkill", "-9", "-f", "llama405b.train", check=False)
    wait_for(lambda: operator("status", "--run", "r").returncode == 1)

    hosts.hosts_file(operator.path / "hosts", indices=[3, 1, 2])
    again = operator("launch", "--run", "r", "--resume", "auto", *flags)
    assert again.returncode == 0, again.stderr
    assert "resumed from runs/r/checkpoints/step-0000000" in again.stdout
    assert [float(loss) for loss in _losses(again.stdout)] == pytest.approx([float(loss) for loss in losses], abs=2e-4)
    assert "tmp" not in hosts.exec(1, "ls", f"{hosts.workdir(1)}/runs/r/checkpoints").stdout


def _digest(hosts, i, out):
    return hosts.exec(i, "sha256sum", f"{hosts.workdir(i)}/{out}/model.safetensors").stdout.split()[0]


def test_the_model_is_exported_from_the_hosts_own_disks_and_from_copies_if_one_is_lost(hosts, operator):
    """After the run ``whole``, which ended with copies of all parts."""
    hosts.hosts_file(operator.path / "hosts")
    done = operator("export", "whole", "out", "hosts", "--dtype", "fp32", "--try", "def ", "--step", 24)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 24: 4 files from node-2\n" in done.stdout  # the weights alone
    assert "from node-3" not in done.stdout  # whose part is on node-1, too
    assert re.search(r"node-1: exported \S+/for-export/step-00000024 to out: 1 file", done.stdout)
    assert not _there(hosts, 1, "runs/whole/checkpoints/for-export/step-00000024")
    hosts.crash(2)
    try:
        lost = operator("export", "whole", "from-copies", "hosts", "--dtype", "fp32")
        assert lost.returncode == 0, lost.stdout + lost.stderr
        assert "step 24: 4 files from node-3\n" in lost.stdout
        assert _digest(hosts, 1, "from-copies") == _digest(hosts, 1, "out")
    finally:
        hosts.boot(2)
        hosts._wait()


def test_the_guard_brings_back_a_run_whose_host_came_back_blank(hosts, operator):
    """Which has its part from its neighbour."""
    demo = [*DEMO, "--training.global_batch_size", 8]
    whole = train(operator.path, "whole", *demo, "--training.max_steps", 24, "--checkpoint.every", 0, world=2)
    hosts.hosts_file(operator.path / "hosts", indices=(1, 2))
    flags = [*demo, *SAVING]
    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "launch", *ONE_THREAD, "--run", "g", "--restart", "3", "--follow", *map(str, flags)],
        cwd=operator.path, env=os.environ | hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for(lambda: "copied to the next host: step" in operator("status", "--run", "g").stdout)
    hosts.crash(2)
    hosts.boot(2)
    hosts._wait()
    assert not _there(hosts, 2, "runs/g/checkpoints")
    out, _ = follower.communicate(timeout=200)
    assert follower.returncode == 0, out
    assert re.search(r"resumed from runs/g/checkpoints/step-000000\d\d", out), out
    assert "step 24/24" in out
    assert _losses(out) == _losses(whole.stdout)
    assert "copied to the next host: step 24" in operator("status", "--run", "g").stdout
