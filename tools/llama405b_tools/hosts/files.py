"""The hosts file, and what ``setup`` recorded about each host."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.phrases import reason_of
from llama405b.contract.trust import refuse_others_writing
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.hosts.typed import front_door

MAX_CHARACTERS = 4 << 20


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hosts file.

    Raises:
        UserError: It cannot be read, or a line is invalid.
    """
    if not str(path).isprintable():
        raise UserError(f"{str(path)!r}: the name of a hosts file cannot contain control characters; rename it")
    try:
        refuse_others_writing(path)
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UserError(f"{path}: cannot be read ({why}); name a hosts file, with one host per line") from None
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{path}: is too large for a hosts file; name a file with one host per line")
    uses = read_uses(path)
    return tuple(uses.get(host.name, NOT_SET_UP).on(host) for host in parse_hosts(text, str(path)))


def setup_path(hosts_file: Path) -> Path:
    """Return where ``setup`` records each host's python and directory; the hosts file takes precedence."""
    return hosts_file.with_name(f"{hosts_file.name}.setup.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What ``setup`` made on a host, for all later verbs."""

    python: str
    workdir: str
    prefix: str  # a shell line that runs before everything else

    def on(self, host: Host) -> Host:
        """Apply this to a host, except where its line says otherwise."""
        python, workdir = host.python or self.python, host.workdir or self.workdir
        return dataclasses.replace(host, python=python, workdir=workdir, prefix=self.prefix)


NOT_SET_UP = Use("", "", "")


@dataclasses.dataclass(frozen=True, slots=True)
class _Uses:
    hosts: Mapping[str, Use]


def read_uses(hosts_file: Path) -> dict[str, Use]:
    """Read what ``setup`` recorded, by host.

    Raises:
        UserError: Others can write the file, or setup did not write it.
    """
    path = setup_path(hosts_file)
    if not path.is_file():
        return {}
    refuse_others_writing(path)
    try:
        return dict(reader.loads(_Uses, f'{{"hosts": {path.read_text(encoding="utf-8")}}}', path.name).hosts)
    except (OSError, ValueError):
        raise UserError(f"{path}: not written by setup; delete it, and run `{front_door()} setup` again") from None


def write_uses(hosts_file: Path, uses: Mapping[str, Use]) -> None:
    """Add what ``setup`` made to its earlier records.

    Raises:
        OSError: The directory cannot be written.
    """
    everything = read_uses(hosts_file) | dict(uses)
    write_json(setup_path(hosts_file), {name: dataclasses.asdict(use) for name, use in everything.items()})
