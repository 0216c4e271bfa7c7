"""Write a small Llama checkpoint in Hugging Face format, for experiments."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from llama405b.settings.parser import OneLineParser

TRAINER_MODULE = "llama405b.data.demo_model"  # imported late, as it needs torch


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b demo", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory to create")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding, as Llama 3.2 1B does")
    args = parser.parse(argv)
    importlib.import_module(TRAINER_MODULE).make_demo(args.directory, tied=args.tied)
    print(f"{args.directory}: a Llama with 3 million parameters and its tokenizer; train it with")
    print(f"  llama405b launch --preset demo --model.path {args.directory}")
    return 0
