"""Write a run's checkpoint as a model that transformers, vLLM and others can load.

SOURCE is a run in this directory, or a checkpoint (…/step-<8 digits>) saved by any number of ranks. Needs no GPU, and memory for
one tensor. Every block read is verified. To resume an interrupted export, run the same command.

With HOSTS, for checkpoints on the hosts' own disks: the run's weights are collected on the first host (from replicas if a host
is lost), and the model is written there, to OUT.

SOURCE may also be a directory with an older model's pytorch_model*.bin, which is converted in its own dtype.
"""

import functools
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.errors import EXIT_OK
from llama405b.settings.parser import OneLineParser
from llama405b.spec.plan import check_run_name
from llama405b_tools.deliver.push import collect
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run.backends import run_verb_on
from llama405b_tools.verbs.arguments import resolve_hosts

TRAINER_MODULE = "llama405b.commands.export"  # writes the model; imported late, as it needs torch


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b export", description=__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="name of a run, or directory of a checkpoint, or of .bin or .pt files")
    add("out", metavar="OUT", help="directory to write the model to")
    add(
        "hosts",
        metavar="HOSTS",
        nargs="?",
        type=Path,
        help="hosts file: collect a run's weights on its first host and export there",
    )
    add("--step", type=int, help="step of the checkpoint to export [the newest]")
    add("--dtype", choices=("bf16", "fp32"), help="dtype of the weights [bf16; .bin and .pt files keep theirs]")
    add("--one-file", action="store_true", help="write one model.safetensors instead of files of 5 GB")
    add(
        "--model",
        type=Path,
        help="directory with config.json and tokenizer if the checkpoint has none; for an adapter, its base model",
    )
    add(
        "--adapter",
        action="store_true",
        help="write only the adapter, in PEFT format, instead of merging it into the weights",
    )
    add("--verify", action="store_true", help="read the files back and compare their SHA-256")
    add("--try", dest="try_", metavar="PROMPT", default="", help="generate a few tokens with the exported model")
    add(
        "--push-to-hub",
        metavar="REPO",
        default="",
        help="upload to the Hugging Face Hub as owner/name; a new repository is private",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb on the first of HOSTS; without HOSTS, on this machine."""
    args = _parser().parse(argv)
    if args.hosts is None:
        return int(importlib.import_module(TRAINER_MODULE).main(args))
    check_run_name(args.source)
    hosts = resolve_hosts(args.hosts)
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
            export_argv = ["export", collected.path, args.out, *options]
            run_verb_on(fleet, host, export_argv, functools.partial(print, flush=True))
        except KeyboardInterrupt:
            print(f"interrupted: the export on {host} also stops; run the same command to resume", file=sys.stderr)
            raise
        fleet.connection(host).run(f"rm -rf {shlex.quote(collected.path)}", "", 600.0)
    return EXIT_OK
