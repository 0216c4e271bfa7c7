"""Score the autopsy: causes of a hang, and runs that are healthy or merely slow, each in a real run of four ranks.

PYTHONPATH=tests:tests/rigs .venv/bin/python scripts/autopsies.py [--causes N] [--quiet N] [--seconds S] [--seed N] [--only WORD,…]
Needs root, for cgroups and a disk that is frozen. Prints the tables of docs/measurements/autopsy.md.
"""

import argparse
import collections
import concurrent.futures
import sys
import tempfile
import traceback
from pathlib import Path

from causes import HANGS, QUIET, cases, is_right, stays_quiet, strikes

from llama405b.data.demo_model import make_demo


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--causes", type=int, default=25)
    parser.add_argument("--quiet", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=405)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    only = [word for word in args.only.split(",") if word]
    hangs = [case for case in cases(HANGS, args.causes, args.seed) if not only or case.cause in only]
    quiet = [case for case in cases(QUIET, args.quiet, args.seed) if not only or case.cause in only]
    with tempfile.TemporaryDirectory(prefix="l4-autopsies-") as directory:
        place = Path(directory)
        make_demo(place / "demo", layers=2, hidden=192)
        (place / "corpus").mkdir()
        (place / "corpus/a.py").write_text(Path(collections.__file__).read_text())
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            struck = pool.map(lambda case: tried(strikes, place / "hangs", place, case), hangs)
            n_right = print_hangs(zip(hangs, struck, strict=True))
            watched = pool.map(lambda case: tried(stays_quiet, place / "quiet", place, case, args.seconds), quiet)
            n_false = print_quiet(zip(quiet, watched, strict=True))
    print(f"\nculprit right: {n_right} of {len(hangs)}; false alarms: {n_false} of {len(quiet)}")
    return int(bool(n_false) or n_right < len(hangs) - 1)


def tried(act, directory, place, case, *more):
    try:
        return act(directory, place / "demo", place / "corpus", case, *more)
    except Exception:  # noqa: BLE001 - one case that could not be tried does not end the others; it counts as wrong
        traceback.print_exc()
        return None


def print_hangs(outcomes):
    confusion, n_right = collections.Counter(), 0
    print("| cause | rank, step, phase | right | what was said |\n|---|---|---|---|")
    for case, autopsy in outcomes:
        right = autopsy is not None and is_right(case, autopsy)
        n_right += right
        fault = ((autopsy or {}).get("culprit") or {}).get("fault", "nobody") if autopsy else "not tried"
        confusion[case.cause, fault, right] += 1
        words = (autopsy or {}).get("words", "").replace("|", "/")
        print(
            f"| {case.cause} | {case.rank}, {case.step}, {case.phase} | {'yes' if right else '**no**'} | {words[:150]} |",
            flush=True,
        )
    faults = sorted({fault for _, fault, _ in confusion})
    print("\n| injected \\ named as | " + " | ".join(faults) + " | wrong rank |\n" + "|---" * (len(faults) + 2) + "|")
    for cause in dict.fromkeys(cause for cause, _, _ in confusion):
        row = [
            sum(n for (c, f, right), n in confusion.items() if (c, f) == (cause, fault) and right) for fault in faults
        ]
        wrong = sum(n for (c, _, right), n in confusion.items() if c == cause and not right)
        print(f"| {cause} | " + " | ".join(str(n or "") for n in row) + f" | {wrong or ''} |")
    return n_right


def print_quiet(outcomes):
    n_false = 0
    print("\n| healthy or slow | rank, step, phase | looked | said to hang |\n|---|---|---|---|")
    for case, said in outcomes:
        alarms = [words for verdict, words in said if verdict == "hangs"] if said is not None else ["not tried"]
        n_false += bool(alarms)
        print(
            f"| {case.cause} | {case.rank}, {case.step}, {case.phase} | {len(said or ())} | {alarms[0][:150] if alarms else 'no'} |",
            flush=True,
        )
    return n_false


if __name__ == "__main__":
    sys.exit(main())
