"""Where what was measured on the hosts of a hosts file is kept: beside it."""

from collections.abc import Sequence
from pathlib import Path

from llama405b.capacity.calibration import Calibration
from llama405b.contract import reader
from llama405b.contract.files import write_atomic
from llama405b_tools.hosts.inventory import Host


def keep(hosts_file: Path, found: Calibration) -> None:
    """Keep it beside the hosts file."""
    write_atomic(_file_of(hosts_file), reader.dumps(found) + "\n")


def kept(hosts_file: Path, hosts: Sequence[Host]) -> Calibration | None:
    """Return what was kept there; None: nothing, or of another version, or of other hosts."""
    try:
        found = reader.loads(Calibration, _file_of(hosts_file).read_text(encoding="utf-8"), "a calibration")
    except (OSError, UnicodeDecodeError, reader.MalformedError):
        return None
    return found if {host.name for host in hosts} <= {*found.hosts} else None


def is_kept(hosts_file: Path) -> bool:
    """Whether anything was."""
    return _file_of(hosts_file).exists()


def _file_of(hosts_file: Path) -> Path:
    return hosts_file.with_name(f"{hosts_file.name}.calibration.json")
