"""Parts of commands that are printed for the user to type."""

import contextlib
import shlex
import shutil
import sys
from pathlib import Path

from llama405b_tools.hosts.inventory import Host


def front_door() -> str:
    """Return the program's name as this terminal finds it, for commands to type."""
    if shutil.which("llama405b"):
        return "llama405b"
    beside = Path(sys.executable).parent / "llama405b"
    if not beside.exists():
        return f"{sys.executable} -m llama405b_tools.cli"
    with contextlib.suppress(ValueError):  # it is not below the current directory
        beside = beside.relative_to(Path.cwd())
    return str(beside)


def setup_command(host: Host) -> str:
    """Return the command that sets up the hosts of a host's file."""
    return f"{front_door()} setup{hosts_argument(Path(host.where.rpartition(':')[0]))}"


def hosts_argument(hosts_file: Path) -> str:
    """Return the argument with which a printed command finds the hosts file."""
    return "" if hosts_file == Path("hosts") else f" {shlex.quote(str(hosts_file))}"
