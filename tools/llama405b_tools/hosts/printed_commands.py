"""Parts of commands that are printed for the user to type."""

import contextlib
import shlex
import shutil
import sys
from pathlib import Path

from llama405b.contract.phrases import given
from llama405b_tools.hosts.inventory import Host


def program_name() -> str:
    """Return the program's name as this terminal finds it, for commands to type."""
    if shutil.which("llama405b"):
        return "llama405b"
    beside = Path(sys.executable).parent / "llama405b"
    if not beside.exists():
        return f"{sys.executable} -m llama405b_tools.cli"
    with contextlib.suppress(ValueError):  # it is not below the current directory
        beside = beside.relative_to(Path.cwd())
    return str(beside)


def command_to_type(verb: str, hosts_file: Path | None, run: str = "") -> str:
    """Return a command that can be typed here: the program, the hosts file (None: a Slurm job has none) and the run."""
    hosts = hosts_argument(hosts_file) if hosts_file else ""
    return f"{program_name()} {verb}{hosts}{given(' --run {}', run)}"


def file_of(host: Host) -> Path | None:
    """Return the hosts file that a host is from; None for the node of a Slurm job."""
    file = host.where.rpartition(":")[0]
    return Path(file) if file else None


def hosts_argument(hosts_file: Path) -> str:
    """Return the argument with which a printed command finds the hosts file."""
    return "" if hosts_file == Path("hosts") else f" {shlex.quote(str(hosts_file))}"
