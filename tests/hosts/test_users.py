"""Hosts where the run would belong to different users, who share directories."""

import re

from ops_rig import FAKE_TRAINER

N_HOSTS, HOST_USERS = 2, ("root", "alice")
DEMO = ["--preset", "demo", "--training.global_batch_size", 8, "--data.max_bytes", 400000, "--data.seq_len", 64]


def test_checkpoints_that_two_users_would_write_are_refused_before_the_start(hosts, operator):
    flags = [*DEMO, "--training.max_steps", 2, "--checkpoint.every", 1, "--checkpoint.dir", hosts.shared / "c"]
    refused = operator("launch", "--follow", "--run", "r", *flags)
    assert refused.returncode == 1, refused.stdout
    assert re.search(
        r"node-2: the run would be alice's there \(uid \d+\), but root's on node-1 \(uid 0\)", refused.stderr
    )
    assert f"writes in {hosts.shared}/c; log in as one user everywhere, or save nothing" in refused.stderr
    assert not (hosts.shared / "c").exists()
    saving_nothing = [*flags, "--checkpoint.every", 0, *FAKE_TRAINER]
    done = operator("launch", "--follow", "--run", "s", *saving_nothing)
    assert done.returncode == 0, done.stderr
    hosts.exec(1, "mkdir", "-m", "700", str(hosts.shared / "private"))
    hosts.exec(2, "sed", "-i", f's|"checkpoint_dir": "[^"]*"|"checkpoint_dir": "{hosts.shared}/private"|',
               f"{hosts.workdir(2)}/runs/s/plan.json")  # fmt: skip
    status = operator("status", "--run", "s")
    assert (status.returncode, "UNREACHABLE" in status.stdout) == (0, False), status.stdout


def test_a_directory_of_runs_that_two_users_would_write_is_refused_before_the_start(hosts, operator):
    both = hosts.shared / "both"
    both.mkdir()
    both.chmod(0o1777)
    text = (operator.path / "hosts").read_text().replace("workdir=~/train_dir", f"workdir={both}")
    (operator.path / "hosts").write_text(text)
    flags = [*DEMO, "--training.max_steps", 2, "--checkpoint.every", 0]
    refused = operator("launch", "--follow", "--run", "t", *flags)
    assert refused.returncode == 1, refused.stdout
    assert f"writes in {both}/runs; log in as one user everywhere, or give each a workdir= of its own" in refused.stderr
    assert list(both.iterdir()) == []
