"""The command line of ``export``, which the trainer's package and the operator's tools both parse."""

import argparse
from pathlib import Path

from llama405b.contract.command import OneLineParser


def export_parser(description: str | None) -> OneLineParser:
    """Return the parser."""
    how = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="llama405b export", description=description, formatter_class=how, allow_abbrev=False)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="name of a run, or directory of a checkpoint or of .bin files")
    add("out", metavar="OUT", help="directory to write the model into")
    add(
        "hosts",
        metavar="HOSTS",
        nargs="?",
        type=Path,
        help="hosts file: bring a run's weights together on its first host, and export there",
    )
    add("--step", type=int, help="which of the run's checkpoints [the newest]")
    add("--dtype", choices=("bf16", "fp32"), help="dtype of the weights [bf16; of .bin files their own]")
    add("--one-file", action="store_true", help="write one model.safetensors instead of files of 5 GB")
    add("--model", type=Path, help="directory with config.json and tokenizer, if the checkpoint has none")
    add("--try", dest="try_", metavar="PROMPT", default="", help="generate a few tokens with the exported model")
    add(
        "--push-to-hub",
        metavar="REPO",
        default="",
        help="upload it to the Hugging Face Hub as owner/name, private if new",
    )
    return parser
