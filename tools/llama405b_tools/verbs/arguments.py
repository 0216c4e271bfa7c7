"""Command-line arguments that several verbs share."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama405b.settings.parser import OneLineParser
from llama405b_tools.hosts.fleet import DEFAULT_HOSTS_FILE, read_hosts
from llama405b_tools.hosts.inventory import Host, parse_hosts


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the HOSTS argument."""
    parser.add_argument(
        "hosts", nargs="?", type=Path, default=DEFAULT_HOSTS_FILE, metavar="HOSTS", help="hosts file [hosts]"
    )


def resolve_hosts(hosts_source: Path | Sequence[str] | None) -> tuple[Host, ...]:
    """Return the hosts of a hosts file or of a list of names; () for None.

    Verbs about a run use ``Backend.hosts`` instead: the hosts of its job or its plan.
    """
    if hosts_source is None:
        return ()
    if isinstance(hosts_source, Path):
        return read_hosts(hosts_source)
    if len(hosts_source) == 1 and (Path(hosts_source[0]).exists() or "/" in hosts_source[0]):
        return read_hosts(Path(hosts_source[0]))
    return parse_hosts("\n".join(hosts_source), "HOSTS")


def verb_parser(verb: str, description: str | None, words: Mapping[str, Any] | None = None) -> OneLineParser:
    """Return a parser with the arguments that all verbs about a run share; ``words``: arguments before HOSTS."""
    parser = OneLineParser(prog=f"llama405b {verb}", description=description)
    for name, options in (words or {}).items():
        parser.add_argument(name, **options)
    add_hosts(parser)
    parser.add_argument(
        "--run",
        help="name of the run [the only live run, else the newest; cluster-top picks the newest of several live runs]",
    )
    return parser
