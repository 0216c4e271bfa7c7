"""``llama405b bench``: measure against a named baseline in the same run, and print ratios.

``bench fleet``, ``bench logs``, ``bench top``, ``bench copies`` and ``bench plan`` measure the operator's side; see their --help.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from llama405b.commands.bench_checkpoint import bench_checkpoint
from llama405b.commands.bench_load import bench_load
from llama405b.commands.bench_step import bench_step
from llama405b.commands.bench_update import bench_optimizer, bench_overlap
from llama405b.commands.ladder.program import climb_here
from llama405b.contract import rungs
from llama405b.contract.errors import UserError
from llama405b.contract.verb_parsers import bench_parser

RANGES = {
    "gb": (0.01, 10_000), "ranks": (1, 1024), "repeat": (1, 100), "steps": (1, 10_000), "pairs": (1, 10_000),
    "saves": (1, 10_000), "unit_ms": (0.01, 10_000), "elements": (1 << 16, 1 << 36),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = bench_parser().parse(argv)
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
