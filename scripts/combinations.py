"""Train every pair of a run's features on real ranks in small, and write the table of refused pairs in docs/parallel.md.

    .venv/bin/python scripts/combinations.py [--triples N] [--runs N] [--write]

A pair is refused by the rules, or trains as plain FSDP does: losses, gradient norms and the change of each parameter (see
tests/rigs/combinations.py for the bounds). ``--triples``: so many random combinations of three to five features, too. ``--runs``: instead,
whole runs of so many such combinations: trained by the programs, resumed half-way on another mesh, exported, and held to each other.
Takes half an hour. Exits with 1 if any differs or fails.
"""

import argparse
import contextlib
import io
import os
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "rigs"), str(ROOT), str(ROOT / "tools")]
import combinations  # noqa: E402

GROUP = 20  # combinations that one set of processes trains
PAGE, BEGIN, END = ROOT / "docs/parallel.md", "<!-- pairs -->\n", "<!-- end of pairs -->\n"


def main() -> int:
    """Train all; return 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triples", type=int, default=0, help="random larger combinations to train, too [0]")
    parser.add_argument("--runs", type=int, default=0, help="whole runs of random combinations, instead [0]")
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    if arguments.runs:
        return whole_runs(arguments.runs)
    refusals = combinations.pair_refusals()
    chosen = [*((name,) for name in combinations.FEATURES), *(names for names, fault in refusals.items() if not fault)]
    chosen += combinations.draw(arguments.triples, random.Random(0))
    with tempfile.TemporaryDirectory() as scratch:
        faults = combinations.check_all(Path(scratch), chosen, GROUP, lambda line: print(line, flush=True))
    print(f"{len(chosen)} trained, {len(faults)} wrong; {len([*filter(None, refusals.values())])} pairs refused")
    if arguments.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + combinations.refusal_table(refusals) + END + rest.partition(END)[2])
    return int(bool(faults))


def whole_runs(count: int) -> int:
    """Train, resume and export random combinations; return 1 if any fails."""
    generator, failed = random.Random(1), 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        combinations.write_demo(root)
        for number, names in enumerate(combinations.draw(count, generator)):
            other = combinations.elsewhere(names, generator)
            fault = combinations.run_fault(root, number, names, other)
            failed += bool(fault)
            print(f"{' + '.join(names)}, then {' + '.join(other)}: {fault or 'good'}", flush=True)
    print(f"{count} runs, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.redirect_stderr(io.StringIO()):
        sys.exit(main())
