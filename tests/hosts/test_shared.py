"""A run on real hosts that share a directory, one of which loses power."""

import os
import re
import subprocess
import sys

from conftest import ONE_THREAD, ROOT
from hosts_rig import nothing_stays
from ops_rig import FAKE_TRAINER, wait_for

HOST_USERS = ("root",)
DEMO = ["--preset", "demo", "--training.global_batch_size", "12", "--data.max_bytes", "400000", "--data.seq_len", "64"]


def test_a_run_survives_the_loss_of_a_host_by_its_shared_checkpoints(hosts, tmp_path, cli):
    hosts.hosts_file(tmp_path / "hosts")
    flags = [
        *DEMO,
        *FAKE_TRAINER,
        "--training.max_steps",
        80,
        "--checkpoint.every",
        4,
        "--checkpoint.dir",
        hosts.shared / "c",
    ]

    def launch(*more):
        return cli(tmp_path, "launch", "--follow", *flags, *more, env=hosts.env())

    follower = subprocess.Popen(
        [sys.executable, "-m", "llama405b_tools.cli", "launch", *ONE_THREAD, "--follow", "--run", "r", *map(str, flags)],
        cwd=tmp_path, env=os.environ | hosts.env() | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: (hosts.shared / "c/step-00000008").exists() or (hosts.shared / "c/step-00000004").exists())
    hosts.crash(3)
    out, err = follower.communicate(timeout=90)
    assert follower.returncode == 1, out
    assert "FAILED  node-3: cannot be reached" in err, err
    for i in (1, 2):
        assert nothing_stays(hosts, i)
    hosts.boot(3)
    hosts._wait()
    state = cli(tmp_path, "status", "--run", "r", env=hosts.env()).stdout  # it is back, on an empty disk
    assert re.search(r"^node-3 +files gone", state, re.MULTILINE), state
    said = "node-3: cannot be reached: "  # which is why the run ended, whatever else came of it
    assert said in state.splitlines()[-1]
    assert cli(tmp_path, "logs", "--run", "r", "--first-error", env=hosts.env()).stdout.startswith(f"run r: {said}")
    again = launch("--run", "r", "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert f"resumed from {hosts.shared}/c/step-0000000" in again.stdout
    assert "step 80/80" in again.stdout
