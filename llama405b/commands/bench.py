"""``llama405b bench``: measure against a named baseline in the same run, and print ratios.

``bench fleet``, ``bench logs``, ``bench top``, ``bench copies`` and ``bench plan`` measure the operator's side; see their --help.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama405b.commands.bench_checkpoint import bench_checkpoint
from llama405b.commands.bench_load import bench_load
from llama405b.commands.bench_step import bench_step
from llama405b.commands.bench_update import bench_optimizer, bench_overlap
from llama405b.commands.ladder.program import climb_here
from llama405b.contract import rungs
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError

RANGES = {
    "gb": (0.01, 10_000), "ranks": (1, 1024), "repeat": (1, 100), "steps": (1, 10_000), "pairs": (1, 10_000),
    "saves": (1, 10_000), "unit_ms": (0.01, 10_000), "elements": (1 << 16, 1 << 36),
}  # fmt: skip
LADDER = "From the first collective to whole steps on this machine's first GPU; each rung is a line, with cause and remedy if it fails."


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="llama405b bench", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=OneLineParser)
    load = what.add_parser("load", help="streaming load against from_pretrained + set_model_state_dict", description="")
    load.add_argument("--gb", type=float, default=1.1, help="size of the checkpoint to write, in GB [1.1]")
    load.add_argument("--ranks", type=int, default=2, help="ranks on this machine, with gloo [2]")
    load.add_argument(
        "--numerics", choices=("fp32-master", "pure-bf16"), default="fp32-master", help="dtype to keep [fp32-master]"
    )
    load.add_argument("--repeat", type=int, default=3, help="measurements of each way, in rotating order [3]")
    load.add_argument("--cold", action="store_true", help="drop the files from the page cache before each")
    load.add_argument("--dir", type=Path, help="where to write the checkpoint and keep it [a temporary directory]")
    gpu = what.add_parser(
        "gpu", help="a ladder for a new machine; `bench gpu HOSTS` climbs it on hosts", description=LADDER
    )
    gpu.add_argument("hosts", nargs="?", metavar="HOSTS", help="climb on hosts instead; write it right after gpu")
    rungs.add_options(gpu)
    optimizer = what.add_parser("optimizer", help="the CPU's AdamW against a memory triad", description="")
    optimizer.add_argument("--elements", type=int, default=1 << 26, help="FP32 elements to update [67108864]")
    overlap = what.add_parser(
        "overlap", help="updates hidden under the forward, with a stand-in for the device", description=""
    )
    overlap.add_argument("--unit-ms", type=float, default=10.0, help="time of a unit's forward, in ms [10]")
    overlap.add_argument("--steps", type=int, default=4, help="steps to time, after one warmup step [4]")
    overlap.add_argument("--trace", type=Path, metavar="FILE", help="write what ran when, for chrome://tracing")
    checkpoint = what.add_parser(
        "checkpoint",
        help="saves beside training against saves in turn, and plain writes to the same disk",
        description="",
    )
    checkpoint.add_argument("--gb", type=float, default=1.0, help="size of the state, in GB [1]")
    checkpoint.add_argument("--saves", type=int, default=30, help="saves of each kind, in turns [30]")
    checkpoint.add_argument("--dir", type=Path, help="where to write [a temporary directory]")
    step = what.add_parser("step", help="our step against a loop written by hand, in CPU seconds", description="")
    for verb in (optimizer, step):
        verb.add_argument("--pairs", type=int, default=20, help="measurements of each, in turns [20]")
    for verb in (load, optimizer, overlap, checkpoint, step):
        verb.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse(argv)
    if args.what == "gpu":
        return _climb(args)
    report, text = _measured(args)
    print(json.dumps(report) if args.json else text)
    return 0


def _climb(args: argparse.Namespace) -> int:
    """Climb the ladder on this machine's first GPU."""
    if args.hosts:
        raise UserError(f"bench gpu: {args.hosts} is not the first argument; write: llama405b bench gpu {args.hosts} …")
    log, wanted = rungs.Log(args.out), rungs.chosen(args.rungs)

    def say(result: rungs.RungResult) -> None:
        log.add(result)
        print(rungs.line_of(result), flush=True)

    code = climb_here(wanted, args.within, say)
    print(log.block(time.strftime("%Y-%m-%d")))
    return code


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run the benchmark; returns its report, and the same for people.

    Raises:
        UserError: A number is out of range.
    """
    for flag, (low, high) in RANGES.items():
        if flag in args and not low <= getattr(args, flag) <= high:
            named = f"--{flag.replace('_', '-')}: {getattr(args, flag):g}"
            raise UserError(f"bench {args.what}: {named} is out of range; use {low:g} to {high:g}")
    match args.what:
        case "optimizer":
            return bench_optimizer(args.elements, args.pairs)
        case "overlap":
            return bench_overlap(args.unit_ms / 1000, args.steps, args.trace)
        case "checkpoint":
            return bench_checkpoint(args.gb, args.saves, args.dir)
        case "step":
            return bench_step(args.pairs)
    return bench_load(args.gb, args.ranks, args.numerics, args.dir, args.repeat, cold=args.cold)
