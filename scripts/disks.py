"""Try runs with each of their places on each odd disk of tests/rigs/odd_disk.py, and write what became of them as docs/disks.md.

    .venv/bin/python scripts/disks.py FILE           the cells that FILE (JSON Lines) lacks, half a minute each; needs root and FUSE
    .venv/bin/python scripts/disks.py FILE --page    write the page of what is there

It goes on at the next cell if it is run again.
"""

import datetime
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "rigs"), str(ROOT), str(ROOT / "tools")]
from disk_cells import CELLS, LATER, USES, Cell  # noqa: E402
from odd_disk import ODDS, REAL  # noqa: E402

WORKS, REFUSED, SAID = "works", "refused", "said"
PAGE = """# Disks that refuse a call

What a run does where one of its places is on a disk that refuses a call or says what is not so, tried by `scripts/disks.py`
({date}): two ranks on CPUs are launched, save, are killed, resume (with checkpoints on hosts' own disks also on a host whose
disk was emptied), and export. The disk is a filesystem in user space that passes all else on; the last rows are real ones.

- **works**: all of it did, and without a difference.
- **refused**: `launch`, or `export`, named directory, call and remedy, and started nothing.
- **said**: training went on, and each save that could not be made, or whose after_save command failed, was said and counted;
  where one could, it resumed from that. An export said what it could not write, and goes on by the same command.

| the disk | {uses} |
|---|{lines}|
{rows}

{odds}
"""


def main(results: Path, *, page: bool) -> int:
    """Try what lacks, or write the page; returns 1 where a cell is none of the three."""
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if page:
        (ROOT / "docs" / "disks.md").write_text(page_of(done))
        return 0
    known = {(each["use"], each["odd"]) for each in done}
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        demo, corpus = made(Path(scratch))
        for number, (use, odd) in enumerate(CELLS):
            if (use, odd) in known:
                continue
            place = Path(scratch) / str(number)
            place.mkdir()
            result = judged(use, odd, Cell(use, odd, place, demo, corpus).run())
            failed += result["outcome"] not in (WORKS, REFUSED, SAID)
            print(use, "|", odd, "|", result["outcome"], "|", result["words"], flush=True)
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return int(failed > 0)


def made(scratch: Path) -> tuple[Path, Path]:
    """A model and a text to train on."""
    from llama405b.data.demo_model import make_demo

    make_demo(scratch / "demo", layers=2, hidden=192)
    (scratch / "corpus").mkdir()
    (scratch / "corpus" / "a.py").write_text(Path(os.__file__).read_text())
    return scratch / "demo", scratch / "corpus"


def judged(use: str, odd: str, outcomes: Sequence) -> dict[str, str]:
    """What a cell came to."""
    last, log = outcomes[-1], "".join(each.log for each in outcomes)
    said = [each.words for each in outcomes if "not saved" in each.words or "cannot be" in each.words]
    unsent = use == "after_save" and re.search("checkpoint.after_save failed for .*", last.log)
    outcome = f"FAILED at {last.phase}"
    if "Traceback" in log:
        outcome = f"TRACEBACK at {last.phase}"
    elif last.phase in ("launch", "export") and (last.code == 2 or "Nothing was started" in log):
        outcome = REFUSED
    elif last.phase == "export" and "run the same command to resume" in last.words:
        outcome, said = SAID, [last.words]
    elif unsent:
        return {"use": use, "odd": odd, "outcome": SAID, "words": unsent[0]}
    elif (last.phase == "launch" and said) or (not last.code and said):
        outcome = SAID
    elif not last.code:
        outcome = WORKS
    return {"use": use, "odd": odd, "outcome": outcome, "words": last.words if outcome != SAID else said[-1]}


def page_of(done: Sequence[dict[str, str]]) -> str:
    """The page."""
    found = {(each["use"], each["odd"]): each["outcome"] for each in done}
    rows = [
        f"| {odd} | {' | '.join(found.get((use, odd), 'never run') for use in USES)} |"
        for odd in (*ODDS, *LATER, *REAL)
    ]
    odds = "\n".join(f"- {name}: {what}" for name, what in (ODDS | REAL).items())
    date = datetime.datetime.now(datetime.UTC).date()
    uses = " | ".join(USES)
    return PAGE.format(date=date, uses=uses, lines="---|" * (len(USES) - 1) + "---", rows="\n".join(rows), odds=odds)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), page="--page" in sys.argv))
