"""A run's tmux server: its name, a host's session on it, and its socket, which tmux leaves behind. Standard library."""

import contextlib
import os
import re
import socket
import subprocess
import time
from pathlib import Path

PREFIX = "llama405b-"
END_WITHIN_S = 10.0  # for tmux to end a session, or to list those of a run


def tmux_socket(run: str) -> str:
    """The name of the run's own tmux server."""
    return f"{PREFIX}{run}"


def tmux_session(host: str) -> str:
    """The name of a host's session; tmux allows no '.' or ':' in it."""
    return re.sub(r"[.:]", "_", host)


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


def remove_own_socket(run: str) -> None:
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
