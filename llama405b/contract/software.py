"""Identify this code, start its modules, and end worker processes together with their parent.

The code's version includes a digest of both packages, which is the same for a checkout, a wheel and an editable install.

Our modules start with the working directory last on ``sys.path``, so that a ``random.py`` there shadows no other module. Our own packages
are still taken from that directory if it has them, whatever is installed. The user's own programs are not started this way.

Imports only the standard library: doctor runs it where nothing else may be installed.
"""

import functools
import hashlib
import os
import select
import sys
import threading
from pathlib import Path

from llama405b import __version__

CODE_SUFFIXES = (".py", ".toml", ".json", ".html")  # files that affect behaviour; not compiled files or editors' copies


ROOT = Path(__file__).resolve().parents[2]  # a checkout, or a directory of installed packages
SOURCE = "llama405b_tools/source"  # in a wheel: the other files of its source, as tools/wheel_files.py packs them
INSTALLED_SOURCE = ROOT / SOURCE
DOCS = str(INSTALLED_SOURCE / "docs") if INSTALLED_SOURCE.is_dir() else "docs"  # for messages that name a page


@functools.cache
def code_version() -> str:
    """Return the version with a digest of the code: ``0.3.0+1a2b3c4d5e6f``."""
    return f"{__version__}+{code_digest(ROOT)}"


def code_digest(root: Path) -> str:
    """Return the digest of the code below a checkout, or a directory of installed packages."""
    tools = root / "tools/llama405b_tools"
    packages = (root / "llama405b", tools if tools.is_dir() else root / "llama405b_tools")
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path
        for package in packages
        for path in package.rglob("*")
    }
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        is_editor_file = "/." in name or path.is_symlink()  # such as Emacs's lock files, which are dangling links
        if name.startswith(f"{SOURCE}/") or is_editor_file:
            continue
        if name.endswith(CODE_SUFFIXES) and path.is_file():
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


# One line, so that every login shell passes it on. No ``-P``, so that an older Python can report that it is too old.
# Imported objects live on: collecting garbage at every 700 new objects takes a fifth of a rank's start-up time.
LOADER = (
    "import gc, sys; gc.set_threshold(10_000); sys.path[:] = [place for place in sys.path if place]; import os, runpy; "
    'here = [os.getcwd(), os.path.abspath("tools")]; sys.path[:0] = here; import llama405b, llama405b_tools; '
    'sys.path[:] = sys.path[2:] + here; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)


def module_argv(module: str, python: str = "") -> list[str]:
    """Return the command that starts one of our modules, with this Python or another.

    ``-P`` is for the worker processes that the module starts to read data.
    """
    return [python or sys.executable, "-P", "-c", LOADER, module]


def exit_with_process(pid: int, _worker: int = 0) -> None:
    """Exit when another process ends; call it in a worker that was started directly or by a fork server.

    Python's and torch's own means watch the parent, which for a fork server's children is the server that they keep alive.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    # a pidfd becomes readable when its process ends
    threading.Thread(target=lambda: (select.select([process], [], []), os._exit(1)), daemon=True).start()
