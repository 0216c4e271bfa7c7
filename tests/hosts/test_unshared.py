"""Hosts without a directory that all of them see: two on this machine, each with a working directory of its own."""

import json

import pytest

DEMO = ["--preset", "demo", "--training.global_batch_size", 4, "--data.seq_len", 64]
REMEDY = "name a directory that all hosts share in --checkpoint.dir, or use --checkpoint.storage local"


@pytest.fixture
def apart(tmp_path, cli):
    """Type a command where the hosts file is."""
    for name in "ab":
        (tmp_path / name).mkdir()
    lines = [f"node-{name} address=localhost slots=1 workdir={tmp_path}/{name}\n" for name in "ab"]
    (tmp_path / "hosts").write_text("".join(lines))
    yield lambda *args: cli(tmp_path, *args)
    cli(tmp_path, "stop", "--run", "r", "--grace", "0")
    assert sorted(path.name for path in tmp_path.glob("**/.llama405b-*")) == []


def test_a_run_whose_checkpoints_would_have_no_common_directory_is_refused_before_it_starts(apart, tmp_path):
    done = apart("launch", "--run", "r", *DEMO)
    assert done.returncode == 1, done.stdout
    words = "node-b: it does not see what node-a writes in runs/r/checkpoints, the checkpoint directory; "
    assert f"{words}{REMEDY}. Nothing was started" in done.stderr
    assert not list(tmp_path.glob("*/runs"))


def test_doctor_says_that_hosts_share_no_directory_and_that_the_planned_run_would_need_one(apart, tmp_path):
    def found(*settings):
        done = apart("doctor", "--json", *settings)
        said = [each for each in json.loads(done.stdout)["findings"] if each["remedy"] == REMEDY]
        return [(each["level"], each["hosts"], each["what"]) for each in said], done.returncode

    what = f"it does not see what node-a writes in {tmp_path}/a/runs, the checkpoint directory"
    assert found("--preset", "demo") == ([("bad", ["node-b"], what)], 3)
    assert found()[0] == [("note", ["node-b"], what)]
    assert found("--preset", "demo", "--checkpoint.dir", f"{tmp_path}/c")[0] == []
