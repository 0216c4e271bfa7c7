"""Show or tokenize the data of a training run. Needs no GPU and no weights."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.settings import command
from llama405b.settings.parser import OneLineParser

TRAINER_MODULE = "llama405b.commands.data"  # reads the data; imported late, as it needs torch
CORES = os.cpu_count() or 1
SETTINGS = """

SETTINGS are those of `llama405b train`: --config my.toml, --data.paths corpus, …"""
SHOW = """Print the first training sequences as the model will read them, with token counts.

Tokens that are trained on are green (without color: between ⟦ and ⟧); the others are context. ━ starts a document."""
TOKENIZE = """Tokenize the texts once for any number of runs; then set data.paths to DIR.

An interrupted command continues where it stopped."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; options that its parser does not know are settings."""
    args, settings = _parser().parse_known_args(argv)
    config = command.parse(settings).config
    for flag, minimum in (("sequences", 0), ("workers", 1)):
        if getattr(args, flag, minimum) < minimum:
            raise UserError(f"--{flag}: {getattr(args, flag)} is too small; use {minimum} or more")
    return int(importlib.import_module(TRAINER_MODULE).main(args, config))


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b data", description=__doc__)
    subparsers = parser.add_subparsers(dest="what", required=True, metavar="show | tokenize")
    show = subparsers.add_parser("show", help="print sequences", description=SHOW + SETTINGS)
    show.add_argument("--sequences", type=int, default=3, metavar="N", help="how many to print [3]")
    tokenize = subparsers.add_parser("tokenize", help="tokenize texts", description=TOKENIZE + SETTINGS)
    tokenize.add_argument("--out", type=Path, metavar="DIR", required=True, help="directory to write the tokens to")
    tokenize.add_argument("--workers", type=int, default=CORES, metavar="N", help="processes [one per core]")
    return parser
