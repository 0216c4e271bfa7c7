"""``llama405b demo DIR``: write a small Llama checkpoint in Hugging Face format, for experiments."""

from collections.abc import Sequence

from llama405b.data.demo_model import make_demo
from llama405b.spec.parsers import demo_parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = demo_parser().parse(argv)
    make_demo(args.directory, tied=args.tied)
    print(f"{args.directory}: a Llama with 3 million parameters and its tokenizer; train it with")
    print(f"  llama405b launch --preset demo --model.path {args.directory}")
    return 0
