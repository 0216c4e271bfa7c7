"""``llama405b demo DIR``: write a small Llama checkpoint, as Hugging Face ships one, to try things on."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from llama405b.commands.make_demo import make_demo
from llama405b.contract.command import OneLineParser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(
        prog="llama405b demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new directory")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding, as Llama 3.2 1B does")
    args = parser.parse_args(argv)
    make_demo(args.directory, tied=args.tied)
    print(f"{args.directory}: a Llama of 3 million parameters and its tokenizer; train it with")
    print(f"  llama405b launch --preset demo --model.path {args.directory}")
    return 0
