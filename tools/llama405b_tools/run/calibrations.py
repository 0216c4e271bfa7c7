"""Where what was measured on the hosts of a hosts file is kept: beside it."""

from pathlib import Path

from llama405b.capacity.calibration import Calibration
from llama405b.contract import reader
from llama405b.contract.files import write_atomic


def keep(hosts_file: Path, found: Calibration) -> None:
    """Keep it beside the hosts file."""
    write_atomic(_file_of(hosts_file), reader.dumps(found) + "\n")


def kept(hosts_file: Path) -> Calibration | None:
    """Return what was kept there; None: nothing, or of another version."""
    try:
        return reader.loads(Calibration, _file_of(hosts_file).read_text(encoding="utf-8"), "a calibration")
    except (OSError, UnicodeDecodeError, reader.MalformedError):
        return None


def _file_of(hosts_file: Path) -> Path:
    return hosts_file.with_name(f"{hosts_file.name}.calibration.json")
