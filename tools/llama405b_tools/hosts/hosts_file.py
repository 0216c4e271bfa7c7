"""The hosts file, and what ``setup`` recorded about each host."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import write_json
from llama405b.contract.phrases import reason_of
from llama405b.contract.trust import refuse_others_writing
from llama405b_tools.hosts.fleet import is_local
from llama405b_tools.hosts.inventory import Host, parse_hosts
from llama405b_tools.hosts.printed_commands import program_name

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
        if not path.is_file():  # the later commands read it again, and opening a FIFO waits for its writer
            raise UserError(f"{path}: is a directory, FIFO or device; name a file with one host per line")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UserError(
            f"{path}: cannot be read ({why}); name a hosts file, with one host per line, or go to the directory that has it"
        ) from None
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{path}: is too large for a hosts file; name a file with one host per line")
    uses = read_uses()
    return tuple(_use_of(host, uses).on(host) for host in parse_hosts(text, str(path)))


def state_directory() -> Path:
    """Return where this machine keeps what outlives a command."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "llama405b"


def setup_path() -> Path:
    """Return where ``setup`` records what it made on each host, whichever hosts file named it."""
    return state_directory() / "setup.json"


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
WORKDIR = "~/llama405b"  # where setup puts the project on a host whose line does not say
Uses = Mapping[str, Sequence[Use]]  # by host and user, one per directory; the last one made comes last


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    hosts: Mapping[str, tuple[Use, ...]]


def _key(host: Host) -> str:
    """A host as its line addresses it, with the user; this machine has one name."""
    name = host.name
    if host.loopback:
        name = "localhost"
    return f"{host.user}@{name}:{host.port or 22}"


def _use_of(host: Host, uses: Uses) -> Use:
    """What setup made on a host: in the line's directory, or if it has none, in the usual one, else in any other."""
    by_workdir = {use.workdir: use for use in uses.get(_key(host), ())}
    if host.workdir or is_local(host):
        return by_workdir.get(host.workdir or str(Path.cwd()), NOT_SET_UP)
    return by_workdir.get(WORKDIR) or next(reversed(by_workdir.values()), NOT_SET_UP)


def read_uses() -> Uses:
    """Read what ``setup`` recorded."""
    path = setup_path()
    if not path.is_file():
        return {}
    refuse_others_writing(path)
    try:
        return reader.loads(_Record, path.read_text(encoding="utf-8"), path.name).hosts
    except (OSError, ValueError):
        raise UserError(f"{path}: not written by setup; delete it, and run `{program_name()} setup` again") from None


def write_uses(made: Iterable[tuple[Host, Use]]) -> None:
    """Add what ``setup`` made to its earlier records.

    Raises:
        RunError: The file cannot be written.
    """
    uses = {key: list(found) for key, found in read_uses().items()}
    for host, use in made:
        earlier = [each for each in uses.get(_key(host), ()) if each.workdir != use.workdir]
        uses[_key(host)] = [*earlier, use]
    try:
        write_json(setup_path(), _Record({key: tuple(found) for key, found in uses.items()}))
    except OSError as error:
        raise RunError(
            f"{setup_path()}: cannot be written ({reason_of(error)}); make it writable, and run setup again"
        ) from None
