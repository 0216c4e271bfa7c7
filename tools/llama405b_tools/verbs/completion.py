"""Tab completion: the shell runs the program, which calls argcomplete with the parser of the verb being typed.

Enable it with ``eval "$(register-python-argcomplete llama405b cluster-top)"``.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llama405b.settings import config
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import SETTING_TYPES

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
