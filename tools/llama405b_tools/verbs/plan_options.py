"""The command line of ``plan``: its options, what is refused, and the changes of --what-if."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from llama405b.capacity.hardware import USUAL, Gpu, gpu_named, read_gpus
from llama405b.capacity.machines import Described
from llama405b.contract import command, config
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError

MEASURED = ("gpu", "nic", "disk")  # what a calibration tells
WHOLE_NUMBER = re.compile("[1-9][0-9]{0,4}")
MOST, LARGEST = 99_999, 1e18


def plan_parser(description: str | None) -> OneLineParser:
    """Return the verb's parser."""
    parser = OneLineParser(
        prog="llama405b plan",
        description=description,
        epilog="Settings as for launch, such as --data.seq_len 8192, follow.",
    )
    add = parser.add_argument
    add("hosts", nargs="?", type=Path, metavar="HOSTS", help="hosts file: ask its hosts for what is not said here")
    add("--preset", default="", help="preset of the planned run")
    command.add_config(add, "TOML file with the settings of the planned run; may be repeated")
    add("--nodes", type=int, help="number of hosts [1]")
    add("--slots", type=int, help="GPUs of each [8; gb200: 4]")
    add("--gpu", default="", help=f"kind of GPU [{USUAL}]: {', '.join(read_gpus())}")
    add("--hardware", type=Path, help="a file with more kinds, in the form of llama405b/capacity/hardware.toml")
    add("--ram", default="", help="memory of each host, like 2000GiB [not checked]")
    add(
        "--nic",
        default="",
        help="all network links of a host, one direction [400Gb/s for each GPU that such hosts have]",
    )
    add("--disk", default="", help="disk bandwidth of each host, for weights and checkpoints [5GB/s]")
    add("--tokens", type=float, default=0.0, help="predict time and cost for so many, like 1e9")
    add(
        "--price", type=float, default=0.0, help="of a GPU for an hour: predict what a day and a step cost, or --tokens"
    )
    add("--measured", type=float, default=0.0, help="a claimed step time, in seconds, to check against the prediction")
    _add_answers(add)
    return parser


def _add_answers(add: Callable[..., object]) -> None:
    """Add what else can be asked, and how it is answered."""
    add(
        "--what-if",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="compare other machines, like nodes=12,16 gpu=h200, with the nearest global batch that divides among them",
    )
    add(
        "--search",
        action="store_true",
        help="try offload, moments, FSDP units, micro-batches and meshes; of the fastest that fit, the one with most room first",
    )
    add(
        "--write",
        type=Path,
        help="with --search: write the first one's settings, if it fits, to a new TOML file for --config",
    )
    add(
        "--calibrate",
        action="store_true",
        help="measure on HOSTS what steps of this run take, with few of its layers, and what their parts attain; kept and used later",
    )
    add("--json", action="store_true", help="print the numbers as JSON")


def check_options(args: argparse.Namespace, settings: Sequence[str]) -> None:
    """Refuse what cannot be."""
    _check_numbers(args)
    if args.calibrate:
        _check_calibrate(args)
    if args.write and not args.search:
        raise UserError("--write: writes what --search finds; add --search")
    if args.write and os.path.lexists(args.write):
        raise UserError(f"--write: {args.write} exists; name another file")
    if not (args.preset or args.config or _is_set("model.path", args, settings)):
        raise UserError("plan: which model? add --preset, --model.path, or --config; see `llama405b plan --help`")


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be."""
    for name in ("nodes", "slots"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= MOST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use 1 to {MOST}")
    for name in ("tokens", "price", "measured"):
        if not 0 <= getattr(args, name) <= LARGEST:
            raise UserError(f"--{name}: {getattr(args, name)} is out of range; use a number from 0 to {LARGEST:g}")


def _check_calibrate(args: argparse.Namespace) -> None:
    """Refuse to measure other machines than those of a hosts file, or what cannot be kept."""
    if not args.hosts:
        raise UserError("--calibrate: measures on hosts; name a hosts file")
    other = next((f"--{name}" for name in ("nodes", "slots", "ram") if getattr(args, name)), described_otherwise(args))
    if other:
        raise UserError(f"{other}: --calibrate measures the hosts as they are; remove one of them")
    if not os.access(args.hosts.absolute().parent, os.W_OK):
        raise UserError(
            f"--calibrate: {args.hosts.absolute().parent} cannot be written, and what it finds is kept there"
        )


def described_otherwise(args: argparse.Namespace) -> str:
    """Return what on the command line describes other machines than were measured; '' if nothing."""
    options = [f"--{name}" for name in MEASURED if getattr(args, name)]
    words = [f"--what-if {name}={value}" for name, value in _changes(args.what_if) if name in MEASURED]
    return next(iter([*options, *words]), "")


def no_data(args: argparse.Namespace, settings: Sequence[str]) -> list[str]:
    """Return what names some data where none is named: a plan needs none."""
    return [] if _is_set("data.paths", args, settings) else ["--data.paths=stdlib"]


def _is_set(key: str, args: argparse.Namespace, settings: Sequence[str]) -> bool:
    """Whether a setting is named."""
    named = key in (config.read_preset(args.preset) | config.read_files(args.config))
    return named or any(word.partition("=")[0] == f"--{key}" for word in settings)


def said_of_machines(args: argparse.Namespace) -> Described:
    """Return what the command line says of machines."""
    return Described(args.nodes or 0, args.slots or 0, args.gpu, args.ram, args.nic, args.disk)


def alternatives(args: argparse.Namespace, gpus: dict[str, Gpu]) -> dict[str, argparse.Namespace]:
    """Return the command line with each change of --what-if, by its words: ``nodes=12,16`` are two."""
    found = {}
    for name, value in _changes(args.what_if):
        word = f"{name}={value}"
        if name == "gpu":
            word = f"gpu={gpu_named(value, gpus).name}"
        number = name in ("nodes", "slots") and WHOLE_NUMBER.fullmatch(value)
        if not number and name not in ("gpu", "ram", "nic", "disk"):
            raise UserError(
                f"--what-if: {word!r} is none of nodes=N, slots=N, gpu=KIND, ram=2000GiB, nic=3200Gb/s, disk=5GB/s; correct it"
            )
        found[word] = argparse.Namespace(**vars(args) | {name: int(value) if number else value})
        _check_numbers(found[word])
    return found


def _changes(words: Sequence[str]) -> list[tuple[str, str]]:
    """``nodes=12,16`` as two."""
    return [(name, value) for name, _, values in (word.partition("=") for word in words) for value in values.split(",")]
