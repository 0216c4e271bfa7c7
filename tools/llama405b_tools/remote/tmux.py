"""The tmux servers of a run and its guard: names, sessions, and the sockets that tmux leaves behind. Standard library."""

import contextlib
import hashlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import RunError
from llama405b.contract.paths import RunDir
from llama405b_tools.remote.messages.start import TMUX_WITHIN_S

PREFIX = "llama405b-"
MOST_OF_NAME = 40  # characters of a run's name in that of a socket, whose path has room for about 100
END_WITHIN_S = 10.0  # for tmux to end a session, or to list those of a run


def tmux_socket(run: RunDir) -> str:
    """The name of the tmux server of a run directory on this machine: two directories may hold runs of one name."""
    directory = hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()
    return f"{PREFIX}{run.name[:MOST_OF_NAME]}-{directory[:8]}"


def tmux_session(host: str) -> str:
    """The name of a host's session; tmux allows no '.' or ':' in it."""
    return re.sub(r"[.:]", "_", host)


def guard_socket(run: RunDir) -> str:
    """The name of the tmux server of a guard on a host; no run's own, as no run's name may have a '+'."""
    return f"{tmux_socket(run)}+guard"


def start_session(server: str, session: str, argv: Sequence[str]) -> int:
    """Start a program in a new session of a tmux server; returns the program's pid.

    Raises:
        RunError: tmux could not start it; says why.
    """
    remove_dead_sockets()
    env = {key: value for key, value in os.environ.items() if key not in ("TMUX", "TMUX_PANE")}
    new = ["new-session", "-d", "-P", "-F", "#{pane_pid}", "-s", session, "-x", "200", "-y", "50"]
    line = ["tmux", "-L", server, "-f", "/dev/null", *new, "--", *argv]
    try:
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=TMUX_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"no answer within {TMUX_WITHIN_S:g} s") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode or not done.stdout.strip().isdecimal():
        raise RunError(said or f"exit code {done.returncode}, and no output")
    return int(done.stdout)


def remove_dead_sockets(ending: str = "", within_s: float = 0.5) -> None:
    """Remove the sockets of our servers that have ended; ``ending``: one that may be about to end."""
    directory = Path(os.environ.get("TMUX_TMPDIR") or "/tmp") / f"tmux-{os.getuid()}"
    deadline = time.monotonic() + within_s
    while ending and _answers(directory / ending) and time.monotonic() < deadline:
        time.sleep(0.02)
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_socket() and not _answers(path):
                path.unlink()


def remove_own_socket(run: RunDir) -> None:
    """Remove the socket of the run's server from inside its last session, which is about to end."""
    path = Path(os.environ.get("TMUX", "").partition(",")[0])
    if path.name != tmux_socket(run):
        return
    sessions = ["tmux", "-S", str(path), "list-sessions"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(sessions, capture_output=True, timeout=END_WITHIN_S, check=False)
        if len(found.stdout.splitlines()) == 1:
            path.unlink()


def _answers(path: Path) -> bool:
    """Whether a server listens on a socket."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:  # it cannot be told: it stays
        return True
    return True
