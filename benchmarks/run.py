"""Measure our own code beside a named baseline, in the same run.

Those of the operator's side (fleet, logs, top) report seconds of wall time and of this machine's CPU (getrusage). Hosts may be
aliases of a few machines.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama405b.contract.errors import EXIT_OK, UserError
from llama405b.settings.parser import OneLineParser
from llama405b_tools.hosts.fleet import read_hosts
from llama405b_tools.verbs.arguments import add_hosts

MODULES = {  # of those here; imported when asked for, as the ranks that some start import this file, too
    "load": "load", "optimizer": "update", "overlap": "update", "checkpoint": "checkpoint", "step": "step",
}  # fmt: skip
MODULES_OF_HOSTS = {"copies": "copies", "fleet": "fleet", "logs": "logs", "top": "top", "plan": "predicted"}
LEAST_S = 5.0  # a few refreshes of cluster-top
RANGES = {
    "gb": (0.01, 10_000), "ranks": (1, 1024), "repeat": (1, 100), "steps": (1, 10_000), "pairs": (1, 10_000),
    "saves": (1, 10_000), "unit_ms": (0.01, 10_000), "elements": (1 << 16, 1 << 36), "seconds": (LEAST_S, 86_400),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit code."""
    try:
        args = parser().parse(sys.argv[1:] if argv is None else argv)
        check_ranges(args)
        return here(args) if args.what in MODULES else on_hosts(args)
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code


def check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense.

    Raises:
        UserError: One is out of range.
    """
    for flag, (low, high) in RANGES.items():
        if flag in args and not low <= getattr(args, flag) <= high:
            named = f"--{flag.replace('_', '-')}: {getattr(args, flag):g}"
            raise UserError(f"{args.what}: {named} is out of range; use {low:g} to {high:g}")


def here(args: argparse.Namespace) -> int:
    """Measure on this machine, and print the report."""
    report, text = _measured(args)
    print(json.dumps(report) if args.json else text)
    return EXIT_OK


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    module: Any = importlib.import_module(f"benchmarks.{MODULES[args.what]}")
    match args.what:
        case "optimizer":
            return module.bench_optimizer(args.elements, args.pairs)
        case "overlap":
            return module.bench_overlap(args.unit_ms / 1000, args.steps, args.trace)
        case "checkpoint":
            return module.bench_checkpoint(args.gb, args.saves, args.dir)
        case "step":
            return module.bench_step(args.pairs)
    return module.bench_load(args.gb, args.ranks, args.numerics, args.dir, args.repeat, cold=args.cold)


def on_hosts(args: argparse.Namespace) -> int:
    """Measure the operator's side; returns the exit code."""
    module: Any = importlib.import_module(f"benchmarks.{MODULES_OF_HOSTS[args.what]}")
    if args.what == "copies":
        return module.copies(args.gb, args.mbit, args.repeat, args.dir)
    hosts = read_hosts(args.hosts)
    match args.what:
        case "logs":
            return module.logs(hosts, args.hosts, args.lines, args.repeat)
        case "plan":
            return module.predicted(hosts, args.hosts, args.repeat)
        case "top":
            return module.top(hosts, args.hosts, args.seconds, args.repeat)
    return module.fleet(hosts, args.hosts, args.repeat, launches=not args.no_launch)


def parser() -> OneLineParser:
    """Return the parser."""
    parser = OneLineParser(prog="benchmarks/run.py", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=OneLineParser)
    load = what.add_parser("load", help="streaming load against from_pretrained + set_model_state_dict")
    load.add_argument("--gb", type=float, default=1.1, help="size of the checkpoint to write, in GB [1.1]")
    load.add_argument("--ranks", type=int, default=2, help="ranks on this machine, with gloo [2]")
    load.add_argument(
        "--numerics", choices=("fp32-master", "pure-bf16"), default="fp32-master", help="dtype to keep [fp32-master]"
    )
    load.add_argument("--repeat", type=int, default=3, help="measurements of each way, in rotating order [3]")
    load.add_argument("--cold", action="store_true", help="drop the files from the page cache before each")
    load.add_argument("--dir", type=Path, help="where to write the checkpoint and keep it [a temporary directory]")
    optimizer = what.add_parser("optimizer", help="the CPU's AdamW against a memory triad")
    optimizer.add_argument("--elements", type=int, default=1 << 26, help="FP32 elements to update [67108864]")
    overlap = what.add_parser("overlap", help="updates hidden under the forward, with a stand-in for the device")
    overlap.add_argument("--unit-ms", type=float, default=10.0, help="time of a unit's forward, in ms [10]")
    overlap.add_argument("--steps", type=int, default=4, help="steps to time, after one warmup step [4]")
    overlap.add_argument("--trace", type=Path, metavar="FILE", help="write what ran when, for chrome://tracing")
    checkpoint = what.add_parser("checkpoint", help="saves beside training, saves in turn, and plain writes")
    checkpoint.add_argument("--gb", type=float, default=1.0, help="size of the state, in GB [1]")
    checkpoint.add_argument("--saves", type=int, default=30, help="saves of each kind, in turns [30]")
    checkpoint.add_argument("--dir", type=Path, help="where to write [a temporary directory]")
    step = what.add_parser("step", help="our step against a loop written by hand, in CPU seconds")
    for each in (optimizer, step):
        each.add_argument("--pairs", type=int, default=20, help="measurements of each, in turns [20]")
    for each in (load, optimizer, overlap, checkpoint, step):
        each.add_argument("--json", action="store_true", help="print JSON, for scripts")
    copies = what.add_parser("copies", help="copying a checkpoint, verified, against plain sockets and files")
    copies.add_argument("--gb", type=float, default=1.0, help="how much [1]")
    copies.add_argument("--mbit", type=int, default=0, help="as root: the link's speed in Mbit/s [not limited]")
    copies.add_argument("--dir", type=Path, help="a directory on the disk to measure [the temporary one]")
    fleet = what.add_parser("fleet", help="status and a whole launch against pdsh, clush and bare paramiko")
    fleet.add_argument("--no-launch", action="store_true", help="measure only the fan-outs and status")
    logs = what.add_parser("logs", help="logs against `ssh … tail`")
    logs.add_argument("--lines", type=int, default=200_000, help="log lines to write on each host [200000]")
    top = what.add_parser("top", help="cluster-top, here and on a host, against `ssh … nvidia-smi`")
    top.add_argument("--seconds", type=float, default=60.0, help="seconds to measure [60]")
    plan = what.add_parser("plan", help="what a calibrated plan predicts for the demo, beside what its runs take")
    for each in (fleet, logs, top, plan):
        add_hosts(each)
    for each in (copies, fleet, logs, top, plan):
        each.add_argument("--repeat", type=int, default=3, help="number of tries; the fastest counts [3]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
