"""Print what cluster-top says of each of the tests' situations, after how many seconds: the table of docs/measurements/situations.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests/rigs")]

from situations import SITUATIONS, Situation, play, said  # noqa: E402


def row(situation: Situation) -> str:
    """Return a line of the table: what happens, each verdict with its seconds and its words, and what it was before."""
    pictures = play(situation)
    told = []
    for (verdict, _, _), found_s in zip(situation.says, said(situation, pictures), strict=True):
        why = next((pic.why for t, pic in pictures if t == found_s), "")
        told.append("never" if found_s is None else f"{verdict} {max(0.0, found_s):.0f} s: {why}".rstrip(": "))
    return f"| {situation.name} | {'<br>'.join(told)} | {situation.before} |"


if __name__ == "__main__":
    print("| what happens | what it says, after | the first edition |\n|---|---|---|")
    for each in SITUATIONS:
        print(row(each), flush=True)
