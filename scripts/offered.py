"""Build and step every kind of run that auto, --search, would help and --what-if can name, on real ranks in small.

    .venv/bin/python scripts/offered.py [--count N]

Over the families and clusters of tests/rigs/offered.py. First each configuration is held to the trainer's own rules; then one of each
kind is built by the trainer's code and takes two steps on CPUs (FP8 is emulated). Takes about an hour. Exits with 1 if any fails.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "rigs"), str(ROOT), str(ROOT / "tools")]
import offered  # noqa: E402

from ranks_rig import run_ranks  # noqa: E402

GROUP = 30  # kinds that one set of processes steps


def main() -> int:
    """Try all; returns 1 if any is refused or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="kinds to step, drawn at random [all]")
    count = parser.parse_args().count
    n_offers, refused, kinds = 0, 0, set()
    for model, world, config, llama in offered.every_offer():
        n_offers += 1
        for fault in offered.faults(config, llama, world):
            refused += 1
            print(f"refused: {model} on {world}: {fault}", flush=True)
        kinds.add(offered.kind_of(model, config))
    print(f"{n_offers} offers, {refused} refused, {len(kinds)} kinds", flush=True)
    chosen = offered.sample(kinds, count, 0) if count else sorted(kinds)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for model in offered.MODELS:
            offered.small_model(model, root / model)
        for world in sorted({kind.world for kind in chosen}):
            group = [kind for kind in chosen if kind.world == world]
            for begin in range(0, len(group), GROUP):
                part = group[begin : begin + GROUP]
                [wrong, *_] = run_ranks(world, offered.step_all, root, part, timeout_s=1200)
                failed += len(wrong)
                for kind, why in wrong.items():
                    print(f"failed: {kind}: {why}", flush=True)
                print(f"{world} ranks: {begin + len(part)} of {len(group)} stepped, {failed} failed", flush=True)
    return int(refused + failed > 0)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.redirect_stderr(io.StringIO()):
        sys.exit(main())
