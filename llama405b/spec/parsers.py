"""The command lines of what needs torch or the Hub, parsed before that is imported: their --help needs neither."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from llama405b.settings.command import OneLineParser
from llama405b.settings.schema import TRACKERS
from llama405b.spec import probes

CORES = os.cpu_count() or 1
SETTINGS = """

SETTINGS are those of `llama405b train`, as for a run: --config my.toml, --data.paths corpus, …"""
DATA = """What a training run would learn, without a GPU and without weights."""
SHOW = """Print the first sequences of training as the model will read them, and the counts.

What is learnt is green (without color: between ⟦ and ⟧), the rest is only read, and ━ begins a document."""
TOKENIZE = """Turn the texts into tokens once, for any number of runs: name DIR in data.paths.

It can be interrupted, and continues."""
DOWNLOAD = """Download a model or a dataset from the Hugging Face Hub, only what training needs, and verify it.

Run it on the host that needs it (the first one, for a dataset); only that host needs HF_TOKEN. An interrupted download is
resumed. Every file's size is checked, and its SHA-256 if the Hub has one."""
DEMO = """Write a small Llama checkpoint in Hugging Face format, for experiments."""
EXPORT = """Write a run's checkpoint as a model that transformers, vLLM and others load.

SOURCE is a run in this directory, or a checkpoint (…/step-<8 digits>) that any number of ranks saved. Needs no GPU, and memory
for one tensor. Every block that is read is verified. An interrupted export is resumed by the same command.

With HOSTS, for checkpoints on the hosts' own disks: the weights of the run are brought together on the first host (from copies,
if a host is lost), and the model is written there, into OUT.

SOURCE may also be a directory with an older model's pytorch_model*.bin: it is converted, in its own dtype."""
TRACK = """Send what a run's trackers have not been sent, on the host of its rank 0; a run that trains does so by itself.

Steps that were taken again after a resume keep their first values there."""
BENCH = """Test the machines that will train, from a first collective to whole steps of the 405B shape.

On one GPU of the first host, one host, two hosts, and all; without HOSTS, on this machine's first GPU. Each test is a line, with
the cause and what to do if it fails. `bench knobs [HOSTS]` measures what the recipe leaves open, each alone and all together: the
embedding as a unit, forward prefetch, all-gathers without a limit, offload; then what trades memory for speed: the loss in parts,
activation checkpointing, layer inputs on the host, fused and compiled layers, numerics (`--tests knobs-2`). A table
of seconds and memory for each half, beside the plan's."""


def _parser(verb: str, description: str) -> OneLineParser:
    return OneLineParser(prog=f"llama405b {verb}", description=description)


def data_parser() -> OneLineParser:
    """Return the parser of ``data``; what it does not know are settings."""
    parser = _parser("data", DATA)
    whats = parser.add_subparsers(dest="what", required=True, metavar="show | tokenize")
    show = whats.add_parser("show", help="print sequences", description=SHOW + SETTINGS)
    show.add_argument("--sequences", type=int, default=2, metavar="N", help="how many to print [2]")
    tokenize = whats.add_parser("tokenize", help="turn texts into tokens", description=TOKENIZE + SETTINGS)
    tokenize.add_argument("--out", type=Path, metavar="DIR", required=True, help="the directory for the tokens")
    tokenize.add_argument("--workers", type=int, default=CORES, metavar="N", help="processes [one per core]")
    return parser


def download_parser() -> OneLineParser:
    """Return the parser of ``download``."""
    parser = _parser("download", DOWNLOAD)
    add = parser.add_argument
    add("name", metavar="NAME", help="owner/name, like meta-llama/Llama-3.1-405B")
    add("--dataset", action="store_true", help="NAME is a dataset, not a model")
    files = "of a dataset, these files alone, like 'data/train-*' [all text and Parquet]"
    add("--only", metavar="GLOB", help=files)
    add("--to", type=Path, metavar="DIR", help="target directory [models/<name>, or data/<name>]")
    add("--revision", default="main", help="a branch, tag or commit [main]")
    add("--skip-weights", action="store_true", help="download only the configuration and tokenizer")
    return parser


def demo_parser() -> OneLineParser:
    """Return the parser of ``demo``."""
    parser = _parser("demo", DEMO)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory to create")
    parser.add_argument("--tied", action="store_true", help="tie the head to the embedding, as Llama 3.2 1B does")
    return parser


def bench_parser() -> OneLineParser:
    """Return the parser of ``bench``."""
    parser = _parser("bench", BENCH)
    parser.add_argument("hosts", nargs="?", type=Path, metavar="HOSTS", help="hosts file [this machine alone]")
    probes.add_options(parser)
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="set a variable of the ranks")
    parser.add_argument(
        "--setup-line", default="", metavar="LINE", help="shell line to run first, such as module load cuda"
    )
    return parser


def export_parser() -> OneLineParser:
    """Return the parser of ``export``."""
    parser = _parser("export", EXPORT)
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


def track_parser() -> OneLineParser:
    """Return the parser of ``track``."""
    parser = _parser("track", TRACK)
    parser.add_argument("run", metavar="RUN", help="name of a run in this directory")
    parser.add_argument("--only", choices=TRACKERS, help="send to this one of them")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="also send W&B what export has written there, as an artifact"
    )
    parser.add_argument(
        "--again", action="store_true", help="send everything again, as another run there: of a tracker that lost it"
    )
    parser.add_argument("--until-closed", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser


PARSERS: dict[str, Callable[[], OneLineParser]] = {
    "data": data_parser,
    "download": download_parser,
    "demo": demo_parser,
    "bench": bench_parser,
    "export": export_parser,
    "track": track_parser,
}
