"""Tab completion: the shell asks the program itself, which asks argcomplete with the parser of the verb that is typed.

Turned on with ``eval "$(register-python-argcomplete llama405b cluster-top)"``.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import argcomplete
from argcomplete.lexers import split_line

from llama405b.contract import config
from llama405b.contract.command import OneLineParser
from llama405b.contract.schema import TYPES

WITH_SETTINGS = ("llama405b launch", "llama405b train", "llama405b doctor")
RUNS, PRESETS = "--run", "--preset"


def complete(verbs: Iterable[str], args: Sequence[str], run_verb: Callable[[str, list[str]], object]) -> None:
    """Answer the shell, and exit.

    ``args``: the verb, if the program's name implies one; ``run_verb``: calls a verb, whose parser does the rest.
    """
    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if not args and len(words) > 1:
        args = words[1:]
        os.environ["_ARGCOMPLETE"] = "2"  # argcomplete is to begin after the verb
    if not args:
        parser = OneLineParser(prog="llama405b", add_help=False)
        parser.add_argument("verb", choices=list(verbs))
        argcomplete.autocomplete(parser)
    if args[0] in verbs:
        OneLineParser.before_parsing = _answer
        run_verb(args[0], list(args[1:2]))


def _among(words: Sequence[str]) -> Callable[..., Sequence[str]]:
    """Return a completer, as argcomplete calls it."""
    return lambda **_: words


def _answer(parser: OneLineParser) -> None:
    OneLineParser.before_parsing = None  # argcomplete parses, too
    if parser.prog in WITH_SETTINGS:
        for key in TYPES:
            parser.add_argument(f"--{key}")
    choices = {RUNS: [path.name for path in Path("runs").glob("*")], PRESETS: config.preset_names()}
    for action in parser.actions:
        for flag in choices.keys() & action.option_strings:
            action.completer = _among(choices[flag])  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")
