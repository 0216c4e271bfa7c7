"""Command-line arguments that several verbs share, and the hosts that they mean."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.command import OneLineParser
from llama405b_tools.hosts.hosts_file import read_hosts
from llama405b_tools.hosts.inventory import Host, parse_hosts

HERE = Path("hosts")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the HOSTS argument."""
    parser.add_argument("hosts", nargs="?", type=Path, default=HERE, metavar="HOSTS", help="hosts file [hosts]")


def hosts_of(named: Path | Sequence[str] | None) -> tuple[Host, ...]:
    """Return the hosts that a verb is about: of a hosts file, or named one by one; () for None.

    What asks about a run takes ``Backend.hosts`` instead: its job's, or those that its plan names.

    Raises:
        UserError: The file cannot be read, or a name is not valid.
    """
    if named is None:
        return ()
    if isinstance(named, Path):
        return read_hosts(named)
    if len(named) == 1 and (Path(named[0]).exists() or "/" in named[0]):
        return read_hosts(Path(named[0]))
    return parse_hosts("\n".join(named), "HOSTS")


def verb_parser(verb: str, description: str | None) -> OneLineParser:
    """Return a parser with the arguments that status, stop, logs and attach share."""
    parser = OneLineParser(prog=f"llama405b {verb}", description=description)
    add_hosts(parser)
    parser.add_argument(
        "--run", help="name of the run [the only live one, else the newest; cluster-top takes the newest of several]"
    )
    return parser
