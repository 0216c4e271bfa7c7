"""Sockets that tmux leaves behind, with a real tmux."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from llama405b.contract.paths import RunDir
from llama405b_tools.agent import hostprobe
from llama405b_tools.agent.processes import remove_dead_sockets, remove_own_socket, tmux_socket

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="NOT RUN: needs tmux")


@pytest.fixture
def servers(monkeypatch):
    """Start tmux servers in a directory of their own, whose path is short enough for a socket's."""
    home = Path(f"/tmp/llama405b-test-{os.getpid()}")
    home.mkdir()
    monkeypatch.setenv("TMUX_TMPDIR", str(home))
    monkeypatch.delenv("TMUX", raising=False)
    names = []

    def start(name, session="s"):
        names.append(name)
        new = ["tmux", "-L", name, "-f", "/dev/null", "new-session", "-d", "-s", session, "sleep 60"]
        subprocess.run(new, check=True, timeout=20)
        return home / f"tmux-{os.getuid()}" / name

    yield start
    for name in names:
        subprocess.run(["tmux", "-L", name, "kill-server"], capture_output=True, check=False, timeout=20)
    shutil.rmtree(home)


def test_only_sockets_of_our_servers_that_ended_are_removed(servers):
    dead, live, other = servers("llama405b-dead"), servers("llama405b-live"), servers("mine")
    for name in ("llama405b-dead", "mine"):
        subprocess.run(["tmux", "-L", name, "kill-server"], check=True, timeout=20)
    lock = live.with_name("llama405b-live.lock")
    lock.touch()
    remove_dead_sockets(ending_socket="llama405b-dead", within_s=10)
    assert not dead.exists()
    assert all(path.exists() for path in (live, other, lock))


def test_the_last_session_of_a_run_removes_its_socket(servers, monkeypatch):
    run = RunDir(Path("/w/runs/r"))
    server = tmux_socket(run)
    socket = servers(server)
    servers(server, "another host, the same machine")
    monkeypatch.setenv("TMUX", f"{socket},1,0")
    remove_own_socket(run)
    assert socket.exists()
    subprocess.run(["tmux", "-L", server, "kill-session", "-t", "=s"], check=True, timeout=20)
    remove_own_socket(RunDir(Path("/another/runs/r")))
    assert socket.exists()
    killed = subprocess.run(["tmux", "-L", server, "display", "-p", "#{pid}"], capture_output=True, check=True)
    remove_own_socket(run)
    assert not socket.exists()
    os.kill(int(killed.stdout), 15)


def test_a_run_with_the_longest_name_has_a_socket(servers):
    assert servers(tmux_socket(RunDir(Path("/w/runs") / ("r" * 100)))).exists()


def test_doctor_tells_of_a_directory_that_tmux_refuses(servers):
    own = servers("a").parent
    assert "failed" not in hostprobe.read_tmux_limits()
    own.chmod(0o755)
    refused = subprocess.run(
        ["tmux", "-L", "b", "-f", "/dev/null", "new-session", "-d"], capture_output=True, text=True, check=False
    )
    assert "unsafe permissions" in refused.stderr
    assert hostprobe.read_tmux_limits() == {
        "failed": f"directory {own} has unsafe permissions; on the host, run chmod 700 {own}, or delete it"
    }
    own.chmod(0o700)
