"""The reference in docs/ is what the schema and the parsers say now, and is complete."""

import argparse
import re

import pytest

from llama405b.settings.schema import SETTING_TYPES
from llama405b_tools import cli
from scripts import reference


@pytest.mark.parametrize("path", reference.PAGES, ids=lambda path: path.stem)
def test_it_is_what_the_program_says(path):
    now = reference.written(path, reference.PAGES[path]())
    assert path.read_text() == now, "run: .venv/bin/python scripts/reference.py"


def test_every_setting_is_there():
    rows = re.findall(r"^(?:\||-) `([\w.]+)`", (reference.DOCS / "settings.md").read_text(), re.MULTILINE)
    assert rows == [*SETTING_TYPES]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_option_of_a_verb_is_there(verb):
    text = (reference.DOCS / "commands.md").read_text().partition(reference.BEGIN)[2]
    parsers = [reference.parser_of(verb)]
    for parser in parsers:
        parsers += reference.subcommands(parser).values()
        assert re.search(rf"^##+ {parser.prog}$", text, re.MULTILINE)
        shown = [
            name for action in parser.actions if action.help != argparse.SUPPRESS for name in action.option_strings
        ]
        assert [each for each in shown if f"`{each}`" not in text and each not in ("-h", "--help")] == []
