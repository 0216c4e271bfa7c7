"""attach with hosts that cannot be reached: what is said, and the exit code."""

import contextlib
import subprocess
import sys
import types

import pytest
from fakes import running_fleet
from run_rig import plan

from llama405b.contract.errors import UserError
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.verbs import attach


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    """A run on a and b, of which b cannot be reached; no tmux is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a\nb\n")
    monkeypatch.setattr(attach, "build_session", lambda hosts, run: ",".join(host.name for host in hosts))
    with running_fleet(("a", "b"), plan("-m", "mine", attempt=1, created=1.0)) as found:
        found.fakes["b"].faults["status"] = HostError("no answer from b:22 within 10 s")
        monkeypatch.setattr(attach, "Fleet", lambda hosts: contextlib.nullcontext(found))
        yield found


def test_a_window_that_is_missing_is_told_and_the_others_open(fleet, capsys):
    assert attach.main(["--no-attach"]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("attach -t =a\n")
    assert said.err == "- b: no answer from b:22 within 10 s; it has no window\n"


def test_after_the_windows_the_exit_code_tells(fleet, monkeypatch):
    ran = []
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: ran.append(argv) or done)
    monkeypatch.setattr(attach.os, "execvp", lambda _, argv: sys.exit(0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert attach.main([]) == 1
    assert ran[0][-1] == "=a"
    fleet.fakes["b"].faults.clear()
    assert attach.main([]) == 0


@pytest.mark.parametrize("down", ["b", "ab"])
def test_a_host_that_was_asked_for_and_cannot_be_reached_is_not_told_as_one_without_the_run(fleet, down):
    fleet.fakes["a"].alive = "a" not in down
    flags = ["--host", "b"] if down == "b" else []
    with pytest.raises(UserError, match=r"^attach: b: no answer from b:22 within 10 s$") as failed:
        attach.main(["--no-attach", *flags])
    assert failed.value.exit_code == 1
