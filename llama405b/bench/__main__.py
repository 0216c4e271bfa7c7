"""Run probes as one of torchrun's ranks; rank 0 prints each result as soon as its probe ends."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llama405b.bench.program import Options, run_probes_here
from llama405b.contract import reader
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.tuning import Trials
from llama405b.spec.probes import Probe, ProbeResult, encode_result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="llama405b.bench", description=__doc__)
    parser.add_argument("--probes", required=True, help="names of the probes, separated by commas")
    parser.add_argument("--time-limit", type=float, required=True, help="seconds")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--bind", choices=("auto", "off"), default="off")
    parser.add_argument(
        "--load", type=lambda text: reader.loads(PredictedRun, text, "--load"), help="the planned run, for `rates`"
    )
    parser.add_argument("--directory", type=Path, help="directory that `rates` writes to")
    parser.add_argument(
        "--trials", type=lambda text: reader.loads(Trials, text, "--trials"), help="what `trials` may try"
    )
    parser.add_argument("--run-dir", type=Path, default=Path(), help="the run's directory, for `trials`")
    args = parser.parse_args(argv)
    options = Options(args.device, args.bind == "auto", args.load, args.directory, args.trials, args.run_dir)
    return run_probes_here([Probe(name) for name in args.probes.split(",")], args.time_limit, _print_result, options)


def _print_result(result: ProbeResult) -> None:
    print(*encode_result(result), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
