"""``llama405b bench``: measure against a named baseline in the same run, and print ratios.

``bench fleet``, ``bench logs`` and ``bench top`` measure the operator's side; see their --help.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from llama405b.commands.bench_layers import bench_layers
from llama405b.commands.bench_load import bench_load
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError


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
    load.add_argument("--dir", type=Path, help="where to write the checkpoint and keep it [a temporary directory]")
    layers = what.add_parser("layers", help="decoder layers of the 405B shape on this GPU", description="")
    layers.add_argument("--layers", type=int, default=2, help="number of decoder layers [2]")
    layers.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence [4096]")
    layers.add_argument("--steps", type=int, default=4, help="steps to time, after one warmup step [4]")
    for verb in (load, layers):
        verb.add_argument("--json", action="store_true", help="print JSON, for scripts")
    args = parser.parse(argv)
    if args.what == "layers":
        report, text = bench_layers(args.layers, args.seq_len, args.steps)
    elif 0.01 <= args.gb <= 10_000 and 1 <= args.ranks <= 1024:
        report, text = bench_load(args.gb, args.ranks, args.numerics, args.dir)
    else:
        raise UserError("bench load: --gb must be 0.01 to 10000 and --ranks 1 to 1024; correct them")
    print(json.dumps(report) if args.json else text)
    return 0
