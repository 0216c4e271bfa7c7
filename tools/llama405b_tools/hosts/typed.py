"""Parts of the commands that are printed for a person to type."""

import contextlib
import shlex
import shutil
import sys
from pathlib import Path


def front_door() -> str:
    """The program's name as this terminal finds it, for commands that are printed to be typed."""
    if shutil.which("llama405b"):
        return "llama405b"
    beside = Path(sys.executable).parent / "llama405b"
    if not beside.exists():
        return f"{sys.executable} -m llama405b_tools.cli"
    with contextlib.suppress(ValueError):  # it is not below here
        beside = beside.relative_to(Path.cwd())
    return str(beside)


def hosts_argument(hosts_file: Path) -> str:
    """What a printed command needs, to find the hosts again."""
    return "" if hosts_file == Path("hosts") else f" {shlex.quote(str(hosts_file))}"
