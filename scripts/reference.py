"""Write the reference: settings, commands, sbatch's options and cluster-top's keys, each into its page in docs/.

In a checkout, with the project installed; a test holds the pages to what this writes:

    .venv/bin/python scripts/reference.py
"""

import argparse
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama405b.settings.command import COMMON_SETTINGS, format_default, value_form
from llama405b.settings.parser import OneLineParser
from llama405b.settings.schema import Config, setting_fields
from llama405b_tools import cli
from llama405b_tools.launch.sbatch import OPTIONS
from llama405b_tools.top.draw.ui import KEYS, PLACES

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- from here on written by scripts/reference.py -->", "<!-- end of what it writes -->"
SETTINGS_ARE_ELSEWHERE = "train"  # its epilog lists them all


class ParserMet(BaseException):  # not an Exception: nothing on the way may handle it
    """Carries the parser of a verb out of the verb, before it parses."""

    def __init__(self, parser: OneLineParser) -> None:
        self.parser = parser


def settings() -> str:
    """Return every setting, section by section."""
    lines = ["", f"The usual ones: {', '.join(f'`{key}`' for key in COMMON_SETTINGS)}."]
    for section, cls in typing.get_type_hints(Config).items():
        lines += ["", f"## {section}", "", _plain((cls.__doc__ or "").partition("\n")[0]), ""]
        lines += ["| setting | value | default | meaning |", "|---|---|---|---|"]
        lines += [_setting(*each) for each in setting_fields() if each[0].startswith(f"{section}.")]
    return "\n".join([*lines, ""])


def _setting(key: str, _: Any, default: Any, text: str) -> str:
    choices = ", ".join(f"`{each}`" for each in value_form(key).split("|"))
    shown = "" if default in ("", ()) else f"`{format_default(default)}`"
    return f"| `{key}` | {choices} | {shown} | {_plain(text)} |"


def commands() -> str:
    """Return every verb, with what it takes."""
    lines = list[str]()
    for verb in cli.VERBS:
        lines += ["", *_command(parser_of(verb), "##", with_epilog=verb != SETTINGS_ARE_ELSEWHERE)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, ""]))


def parser_of(*words: str) -> OneLineParser:
    """Return the parser that a command line meets first."""
    OneLineParser.before_parsing = _carry_out
    try:
        cli.main(words)
    except ParserMet as met:
        return met.parser
    finally:
        OneLineParser.before_parsing = None
    raise LookupError(f"llama405b {' '.join(words)} has no parser of ours")


def _carry_out(parser: OneLineParser) -> None:
    raise ParserMet(parser)


def _command(parser: argparse.ArgumentParser, level: str, with_epilog: bool = True) -> Iterator[str]:
    """Yield a command's section, and then those of its subcommands."""
    yield from (f"{level} {parser.prog}", "", *_paragraphs(parser.description or ""))
    for group in parser._action_groups:
        options = [_option(each) for each in group._group_actions if not _said_elsewhere(each)]
        if options:
            yield from (f"| {group.title} | |", "|---|---|", *options, "")
    if with_epilog:
        yield from _paragraphs(parser.epilog or "")
    for each in subcommands(parser).values():
        yield from _command(each, f"{level}#")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's subcommands, by their names."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return {name: inner for each in nested for name, inner in each.choices.items()}


def _said_elsewhere(action: argparse.Action) -> bool:
    """Whether every command has it, its sections follow, or it is for our own programs."""
    hidden = action.help == argparse.SUPPRESS
    return hidden or "--help" in action.option_strings or isinstance(action, argparse._SubParsersAction)


def _option(action: argparse.Action) -> str:
    if action.choices:
        value = " or ".join(f"`{each}`" for each in action.choices)
    else:
        value = "" if action.nargs == 0 else f"`{action.metavar or action.dest.upper()}`"
    names = ", ".join(f"`{each}`" for each in action.option_strings)
    return f"| {f'{names} {value}'.strip()} | {_plain(action.help or '')} |"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield a help text as Markdown: lines that begin with a space are examples."""
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith(" "):
            yield from ("```", *(line.strip() for line in paragraph.splitlines()), "```", "")
        elif paragraph:
            yield from (_plain(" ".join(paragraph.split()).replace("``", "`")), "")


def _plain(text: str) -> str:
    """Return words in which only `code` means something to Markdown."""
    outside = re.compile(r"(`[^`]*`)")
    return "".join(
        each if each.startswith("`") else re.sub(r"([*|])", r"\\\1", each).replace("<", "&lt;")
        for each in outside.split(text)
    )


def written(path: Path, text: str) -> str:
    """Return a page with its reference written anew; what stands around it is kept."""
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(f"{END}\n")[2]
    return f"{before}{BEGIN}\n{text}{END}\n{after}"


def sbatch_options() -> str:
    """Return sbatch's options: those that are kept, and why others are refused."""
    kept = ", ".join(f"`--{option.name}`" for option in OPTIONS.values() if not option.refusal)
    lines = ["", "| refused | because |", "|---|---|"]
    for why in dict.fromkeys(option.refusal for option in OPTIONS.values() if option.refusal):
        names = ", ".join(f"`--{option.name}`" for option in OPTIONS.values() if option.refusal == why)
        lines.append(f"| {names} | {_plain(why)} |")
    return "\n".join([*lines, "", f"Kept: {kept}.", ""])


def top_keys() -> str:
    """Return cluster-top's keys."""
    lines = list[str]()
    for place in PLACES:
        heading = {"": "key", "log": "key, in the log", "events": "key, in the events"}[place]
        lines += ["", f"| {heading} | action |", "|---|---|"]
        lines += [f"| {_plain(key.shown)} | {_plain(key.does)} |" for key in KEYS if key.where == place]
    return "\n".join([*lines, "", ""])


PAGES = {
    DOCS / "cluster-top.md": top_keys,
    DOCS / "settings.md": settings,
    DOCS / "commands.md": commands,
    DOCS / "slurm.md": sbatch_options,
}

if __name__ == "__main__":
    for page, reference in PAGES.items():
        page.write_text(written(page, reference()))
