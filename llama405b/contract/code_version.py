"""Which code this is: its version, and a digest of both packages, the same for a checkout, a wheel and an editable install.

Imports the standard library alone: doctor runs it where nothing else may be installed.
"""

import functools
import hashlib
from pathlib import Path

from llama405b import __version__

SUFFIXES = (".py", ".toml", ".json", ".html")  # what decides what is done; compiled files and editors' copies do not


@functools.cache
def code_version() -> str:
    """Return what tells this code from any other, as a local version: ``0.2.0+1a2b3c4d5e6f``."""
    return f"{__version__}+{digest_of(Path(__file__).resolve().parents[2])}"


def digest_of(root: Path) -> str:
    """Return the digest of the code below a checkout, or a directory of installed packages.

    Raises:
        OSError: A file cannot be read.
    """
    tools = root / "tools/llama405b_tools"
    packages = (root / "llama405b", tools if tools.is_dir() else root / "llama405b_tools")
    files = {f"{each.name}/{path.relative_to(each).as_posix()}": path for each in packages for path in each.rglob("*")}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        is_editors = "/." in name or path.is_symlink()  # as Emacs's locks are, which lead nowhere
        if name.endswith(SUFFIXES) and path.is_file() and not is_editors:
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]
