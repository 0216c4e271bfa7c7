"""Run directories written by version 0.1 can still be read."""

import tarfile

import pytest

from conftest import ROOT

HOSTS = "node-a address=localhost slots=1\nnode-b address=localhost slots=1\n"


@pytest.fixture(scope="module")
def old_runs(tmp_path_factory):
    work = tmp_path_factory.mktemp("old")
    (work / "hosts").write_text(HOSTS)
    with tarfile.open(ROOT / "tests/data/written-by-0.1/runs.tar.gz") as archive:
        archive.extractall(work, filter="data")
    return work


@pytest.mark.parametrize(
    ("run", "code", "words"),
    [
        ("good", 0, ["finished", "step 6, loss", "step-00000006"]),
        ("broken", 1, ["node-b  exited 1", "step 30, loss 5.8867", "rank 1 was killed by SIGKILL"]),
        ("guarded", 0, ["guard", "stopped", "step 43", "step-00000043"]),
    ],
)
def test_status_logs_and_the_screen_read_them(old_runs, cli, run, code, words):
    status = cli(old_runs, "status", "--run", run)
    assert status.returncode == code, status.stderr
    assert [word for word in words if word not in status.stdout] == [], status.stdout
    logs = cli(old_runs, "logs", "--run", run)
    assert "step 3/" in logs.stdout, logs.stderr
    assert logs.stderr == ""
    top = cli(old_runs, "top", "--once", "--run", run)
    assert run in top.stdout, top.stderr


def test_the_first_error_of_a_run_that_failed(old_runs, cli):
    found = cli(old_runs, "logs", "--first-error", "--run", "broken")
    assert found.returncode == 1, found.stderr
    assert "killed by SIGKILL" in found.stdout
