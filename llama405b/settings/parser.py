"""The parser of every command: one-sentence errors, and help that fits a terminal. Knows no setting."""

import argparse
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn

from llama405b.contract.errors import UserError, did_you_mean

HELP_WIDTH = 80


class ParagraphFormatter(argparse.HelpFormatter):
    """Wraps paragraphs; keeps lines that begin with a space as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for is_free, group in itertools.groupby(text.strip("\n").splitlines(), lambda line: line[:1].strip() != ""):
            lines = list(group)
            paragraphs += [textwrap.fill(" ".join(lines), width)] if is_free else lines
        return textwrap.indent("\n".join(paragraphs), indent)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser with one-sentence errors and help that fits a terminal."""

    is_intermixing = False
    before_parsing: ClassVar[Callable[["OneLineParser"], None] | None] = None  # tab completion reads the parser here

    # Hidden from mypy: argparse's own annotations apply to these overrides.
    if not TYPE_CHECKING:

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{"formatter_class": ParagraphFormatter, "allow_abbrev": False} | kwargs)

        def parse_known_args(self, args=None, namespace=None):
            """See ``argparse``."""
            if OneLineParser.before_parsing and not self.is_intermixing:
                OneLineParser.before_parsing(self)
            if self.is_intermixing or self._subparsers:
                return super().parse_known_args(args, namespace)
            # Otherwise argparse sets an optional HOSTS to its default at the first positional, and refuses one after an option.
            self.is_intermixing = True
            try:
                return self.parse_known_intermixed_args(args, namespace)  # calls this method
            finally:
                self.is_intermixing = False

    def format_help(self) -> str:
        """Return the help, with backquotes replaced by plain quotes."""
        return super().format_help().replace("`", "'")

    def error(self, message: str) -> NoReturn:
        """Raise the error as a UserError."""
        raise UserError(f"{message}; see `{self.prog} --help`")

    @property
    def options(self) -> list[str]:
        """Every option of the parser."""
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        """Every action of the parser: options and positional arguments."""
        return list(self._actions)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line without settings.

        Raises:
            UserError: Anything in it is wrong.
        """
        parsed, rest = self.parse_known_args(argv)
        for word in rest:
            self.error(f"{word}: unknown option or argument{did_you_mean(word.partition('=')[0], self.options)}")
        return parsed
