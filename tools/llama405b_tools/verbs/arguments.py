"""Command-line arguments that several verbs share, and Tab completion.

To complete, the shell runs the program, which calls argcomplete with the parser of the verb being typed. Enable it with
``eval "$(register-python-argcomplete llama405b cluster-top)"``.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama405b.settings import config
from llama405b.settings.command import OneLineParser
from llama405b.settings.schema import SETTING_TYPES
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


PROGS_WITH_SETTINGS = ("llama405b launch", "llama405b train", "llama405b doctor")
RUN_FLAG, PRESET_FLAG = "--run", "--preset"


def complete(verbs: Iterable[str], args: Sequence[str], run_verb: Callable[[str, list[str]], object]) -> None:
    """Print completions for the shell, and exit.

    ``args``: the verb, if the program's name implies one; ``run_verb``: calls a verb, whose parser completes the rest.
    """
    import argcomplete
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if not args and len(words) > 1:
        args = words[1:]
        os.environ["_ARGCOMPLETE"] = "2"  # the number of leading words that argcomplete skips: program and verb
    if not args:
        parser = OneLineParser(prog="llama405b", add_help=False)
        parser.add_argument("verb", choices=list(verbs))
        argcomplete.autocomplete(parser)
    if args[0] in verbs:
        OneLineParser.before_parsing = _autocomplete
        run_verb(args[0], list(args[1:2]))


def _fixed_completer(words: Sequence[str]) -> Callable[..., Sequence[str]]:
    """Return an argcomplete completer that offers these words."""
    return lambda **_: words


def _autocomplete(parser: OneLineParser) -> None:
    import argcomplete

    OneLineParser.before_parsing = None  # argcomplete parses too, which would call this again
    if parser.prog in PROGS_WITH_SETTINGS:
        for key in SETTING_TYPES:
            parser.add_argument(f"--{key}")
    choices = {RUN_FLAG: [path.name for path in Path("runs").glob("*")], PRESET_FLAG: config.preset_names()}
    for action in parser.actions:
        for flag in choices.keys() & action.option_strings:
            action.completer = _fixed_completer(choices[flag])  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")
