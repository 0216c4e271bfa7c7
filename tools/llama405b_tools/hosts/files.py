"""The hosts file, and beside it what ``setup`` noted of each host."""

import dataclasses
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.contract.files import read_json
from llama405b.contract.trust import refuse_others_writing
from llama405b_tools.hosts.inventory import Host, parse
from llama405b_tools.hosts.typed import front_door


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a hosts file.

    Raises:
        UserError: It cannot be read, or a line of it is wrong.
    """
    try:
        refuse_others_writing(path)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read ({reason}); name a hosts file, one host a line") from None
    return tuple(_as_set_up(host, _read_setup(path).get(host.name)) for host in parse(text, str(path)))


def setup_path(hosts_file: Path) -> Path:
    """Where ``setup`` notes which python and directory it made on each host; what the hosts file says comes first."""
    return hosts_file.with_name(f"{hosts_file.name}.setup.json")


def _read_setup(hosts_file: Path) -> dict[str, dict[str, str]]:
    path = setup_path(hosts_file)
    if not path.is_file():
        return {}
    refuse_others_writing(path)
    found = read_json(path)
    keys = {"python", "workdir", "prefix"}
    whole = found is not None and all(
        isinstance(use, dict) and set(use) == keys and all(isinstance(value, str) for value in use.values())
        for use in found.values()
    )
    if not whole or found is None:
        raise UserError(f"{path}: not what setup wrote; delete it, and run `{front_door()} setup` again")
    return found


def _as_set_up(host: Host, use: dict[str, str] | None) -> Host:
    if not use:
        return host
    python, workdir = host.python or use["python"], host.workdir or use["workdir"]
    return dataclasses.replace(host, python=python, workdir=workdir, prefix=use["prefix"])
