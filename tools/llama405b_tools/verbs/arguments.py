"""Command-line arguments that several verbs share."""

import argparse
from pathlib import Path

from llama405b.contract.command import OneLineParser


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the HOSTS argument."""
    here = Path("hosts")
    parser.add_argument("hosts", nargs="?", type=Path, default=here, metavar="HOSTS", help="hosts file [hosts]")


def verb_parser(verb: str, description: str | None) -> OneLineParser:
    """Return a parser with the arguments that status, stop, logs and attach share."""
    parser = OneLineParser(prog=f"llama405b {verb}", description=description)
    add_hosts(parser)
    parser.add_argument("--run", help="name of the run [the only live one, else the newest]")
    return parser
