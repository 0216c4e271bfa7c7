"""Write a run's checkpoint as a model that transformers, vLLM and others load.

SOURCE is a run in this directory, or a checkpoint (…/step-<8 digits>) that any number of ranks saved. Needs no GPU, and memory
for one tensor. Every block that is read is verified. An interrupted export is resumed by the same command.

With HOSTS, for checkpoints on the hosts' own disks: the weights of the run are brought together on the first host (from copies,
if a host is lost), and the model is written there, into OUT.

SOURCE may also be a directory with an older model's pytorch_model*.bin: it is converted, in its own dtype.
"""

import functools
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import GOOD
from llama405b.settings.command import OneLineParser
from llama405b.spec.plan import check_run_name
from llama405b_tools.deliver.push import collect
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run.backends import call_on
from llama405b_tools.verbs.arguments import hosts_of

TRAINERS_OWN = "llama405b.commands.export"  # what writes the model: it needs torch


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b export", description=__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="name of a run, or directory of a checkpoint, or of .bin or .pt files")
    add("out", metavar="OUT", help="directory to write the model into")
    add(
        "hosts",
        metavar="HOSTS",
        nargs="?",
        type=Path,
        help="hosts file: bring a run's weights together on its first host, and export there",
    )
    add("--step", type=int, help="which of the run's checkpoints [the newest]")
    add("--dtype", choices=("bf16", "fp32"), help="dtype of the weights [bf16; of .bin and .pt files their own]")
    add("--one-file", action="store_true", help="write one model.safetensors instead of files of 5 GB")
    add(
        "--model",
        type=Path,
        help="directory with config.json and tokenizer, if the checkpoint has none; of an adapter, the model's",
    )
    add(
        "--adapter",
        action="store_true",
        help="write a run's adapter alone, in peft's format, instead of merging it into the weights",
    )
    add("--verify", action="store_true", help="read back what was written, and compare its SHA-256")
    add("--try", dest="try_", metavar="PROMPT", default="", help="generate a few tokens with the exported model")
    add(
        "--push-to-hub",
        metavar="REPO",
        default="",
        help="upload it to the Hugging Face Hub as owner/name, private if new",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb; without HOSTS, here."""
    args = _parser().parse(argv)
    if args.hosts is None:
        return int(importlib.import_module(TRAINERS_OWN).main(args))
    check_run_name(args.source)
    hosts = hosts_of(args.hosts)
    options = []
    for flag, value in (
        ("--dtype", args.dtype),
        ("--model", args.model),
        ("--try", args.try_),
        ("--push-to-hub", args.push_to_hub),
    ):
        options += [flag, str(value)] if value else []
    options += ["--one-file"] * args.one_file + ["--adapter"] * args.adapter + ["--verify"] * args.verify
    with Fleet(hosts) as fleet:
        collected = collect(fleet, args.source, args.step)
        host = collected.host
        try:
            words = ["export", collected.path, args.out, *options]
            call_on(fleet, host, words, functools.partial(print, flush=True))
        except KeyboardInterrupt:
            print(f"interrupted: the export on {host} ends, too; run the same command to resume", file=sys.stderr)
            raise
        fleet.connection(host).run(f"rm -rf {shlex.quote(collected.path)}", "", 600.0)
    return GOOD
