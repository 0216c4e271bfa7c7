"""This program: its version, how Python starts a module of it, and processes that end with the one they work for.

Which code this is: its version, and a digest of both packages, the same for a checkout, a wheel and an editable install.

Imports the standard library alone: doctor runs it where nothing else may be installed.

How Python starts a module of ours, whatever lies in the working directory: a ``random.py`` there shadows no other module.

The working directory, which may hold our packages and the user's own, comes last on ``sys.path``. Our packages are still those of
that directory if it has them, whatever is installed. A program of the user's own is not started so, and inherits nothing of it.

Processes that end with the one they work for, however it ends.
"""

import functools
import hashlib
import os
import select
import sys
import threading
from pathlib import Path

from llama405b import __version__

SUFFIXES = (".py", ".toml", ".json", ".html")  # what decides what is done; compiled files and editors' copies do not


@functools.cache
def code_version() -> str:
    """Return what tells this code from any other, as a local version: ``0.2.0+1a2b3c4d5e6f``."""
    return f"{__version__}+{digest_of(Path(__file__).resolve().parents[2])}"


def digest_of(root: Path) -> str:
    """Return the digest of the code below a checkout, or a directory of installed packages."""
    tools = root / "tools/llama405b_tools"
    packages = (root / "llama405b", tools if tools.is_dir() else root / "llama405b_tools")
    files = {f"{each.name}/{path.relative_to(each).as_posix()}": path for each in packages for path in each.rglob("*")}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        is_editors = "/." in name or path.is_symlink()  # as Emacs's locks are, which lead nowhere
        if name.endswith(SUFFIXES) and path.is_file() and not is_editors:
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


# One line, so that every login shell passes it on. No ``-P``, so that an older Python can say that it is too old.
# What is imported lives on: collecting garbage among it at every 700 objects takes a fifth of a rank's start.
LOADER = (
    "import gc, sys; gc.set_threshold(10_000); sys.path[:] = [place for place in sys.path if place]; import os, runpy; "
    'here = [os.getcwd(), os.path.abspath("tools")]; sys.path[:0] = here; import llama405b, llama405b_tools; '
    'sys.path[:] = sys.path[2:] + here; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)


def own_argv(module: str, python: str = "") -> list[str]:
    """Return the command that starts a module of ours, with this Python or another.

    ``-P`` is for the processes that it starts in turn, to read data.
    """
    return [python or sys.executable, "-P", "-c", LOADER, module]


def end_with(pid: int, _worker: int = 0) -> None:
    """End this process when another ends; call it in a process that this one started, directly or through a server.

    What Python and torch have for this looks at the parent, which for a fork server's children is the server, and they keep it alive.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=lambda: (select.select([process], [], []), os._exit(1)), daemon=True).start()
