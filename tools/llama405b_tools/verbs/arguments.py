"""What several verbs take on their command line."""

from pathlib import Path

from llama405b.contract.command import OneLineParser


def verb_parser(verb: str, description: str | None) -> OneLineParser:
    """The arguments that status, stop, logs and attach share."""
    parser = OneLineParser(prog=f"llama405b {verb}", description=description, allow_abbrev=False)
    parser.add_argument(
        "hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]"
    )
    parser.add_argument("--run", help="the run's name [the only live one, else the newest]")
    return parser
