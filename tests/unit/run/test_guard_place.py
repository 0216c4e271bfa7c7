"""A launch with a guard from a directory where the guard can keep nothing."""

import contextlib
import errno
import subprocess
from pathlib import Path

import pytest
from fakes import FakeFleet

from llama405b.contract.errors import RunError, UserError
from llama405b_tools.verbs import launch

ARGV = ["--run", "r", "--", "-m", "mine"]


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with FakeFleet(("a", "b")) as found:
        monkeypatch.setattr(launch, "resolve_hosts", lambda _: tuple(found.hosts.values()))
        monkeypatch.setattr(launch, "Fleet", lambda _: contextlib.nullcontext(found))
        yield found


def test_a_directory_that_cannot_be_written_is_refused_before_the_start(fleet):
    Path("runs").touch()
    with pytest.raises(
        UserError, match=r"--restart: .*/runs/r: .*/runs is not a directory; launch from another directory"
    ):
        launch.main(["--restart", "1", *ARGV])
    assert fleet.fakes["a"].plan is None


def test_a_launch_that_needs_no_directory_is_not_refused_for_it(fleet):
    Path("runs").touch()
    assert launch.main(ARGV) == 0
    assert fleet.fakes["a"].alive


def test_a_run_whose_guard_cannot_start_is_said_to_be_up_and_how_to_guard_it(fleet, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/r/guard.log")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(RunError) as failed:
        launch.main(["--restart", "1", *ARGV])
    again = "launch --restart 1 --run r --resume auto -- -m mine`"
    assert str(failed.value).startswith(
        "the run started, but its guard did not: runs/r/guard.log: No space left on device; to guard the run, use `"
    )
    assert str(failed.value).endswith(again)
    assert "r: 2 hosts, 2 ranks" in capsys.readouterr().out
    assert fleet.fakes["a"].alive
