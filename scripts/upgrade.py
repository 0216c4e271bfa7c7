"""Upgrade a run in its middle from another commit's version to this one, then roll it back; say what each did.

    .venv/bin/python scripts/upgrade.py COMMIT

One run of two ranks with a guard, started by the version of ``COMMIT``; while it trains, the code under it becomes this checkout's, and a
rank is killed: the guard resumes it. Then the old code comes back, and a launch resumes from the last checkpoint that it can read. The
losses of steps that are taken again must be the same. Exit code 1 if not, or if a step of this does not happen. A minute.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRAIN = (
    "--preset demo --model.path models/demo --data.paths corpus.jsonl --data.seq_len 64 --parallel.device cpu "
    "--training.global_batch_size 4 --training.micro_batch_size 2 --training.max_steps 4000 "
    "--checkpoint.every 10 --checkpoint.keep 3"
)
WAIT_S = 120.0


def main(commit: str) -> int:
    """Run all of it; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="l4upgrade-") as scratch:
        work, old = Path(scratch) / "work", Path(scratch) / "old"
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, old], check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=old, check=True)
        work.mkdir()
        (work / "hosts").write_text("localhost slots=2\n")
        (work / "corpus.jsonl").write_text(
            "".join(json.dumps({"text": f"{number} the cat sat on the mat " * 9}) + "\n" for number in range(99))
        )
        run = work / "runs/r"
        switch(work, old)
        call(work, "demo", "models/demo")
        try:
            call(work, "launch", "hosts", "--run", "r", "--env", "OMP_NUM_THREADS=1", "--restart", "3", *TRAIN.split())
            wait_for("checkpoints of the old version", lambda: len(formats(run)) > 1)
            assert {*formats(run).values()} == {2}, formats(run)
            switch(work, ROOT)
            before = losses(run)
            os.kill(json.loads((run / "heartbeat/rank-1.json").read_text())["pid"], signal.SIGKILL)
            wait_for("a checkpoint of this version", lambda: 3 in formats(run).values())
            call(work, "stop", "hosts", "--run", "r", "--grace", "0")
            print(f"upgraded: {taken_again(run, before)}; then {formats(run)}", flush=True)
            before = losses(run)
            switch(work, old)
            last = max(step for step, form in formats(run).items() if form == 2)
            call(
                work, "launch", "hosts", "--run", "r", "--resume", "auto", "--env", "OMP_NUM_THREADS=1", *TRAIN.split()
            )
            first = int(last.removeprefix("step-")) + 1
            wait_for("steps of the old version again", lambda: losses(run).keys() <= {*range(first + 8)})
            wait_for("more of them", lambda: first + 8 in losses(run))
            print(f"rolled back: {said(run, 'skipped')}; {taken_again(run, before)}")
        finally:
            call(work, "stop", "hosts", "--run", "r", "--grace", "0", check=False)
    return 0


def switch(work: Path, version: Path) -> None:
    """Put the packages of a version where the run's processes find them."""
    for name in ("llama405b", "tools"):
        link = work / f".{name}"
        link.symlink_to(version / name)
        link.replace(work / name)


def call(work: Path, *argv: str, check: bool = True) -> None:
    """Call one of our programs, of the version that is there now."""
    env = os.environ | {"PYTHONPATH": f"{work}:{work}/tools"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "llama405b_tools.cli", *argv], cwd=work, env=env, text=True, capture_output=True
    )
    if check and done.returncode:
        raise SystemExit(f"llama405b {' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}")


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    until = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"waited {WAIT_S:.0f} s for {what}")
        time.sleep(0.1)


def formats(run: Path) -> dict[str, int]:
    """Return the form of each complete checkpoint, by its name."""
    found = {}
    for manifest in sorted(run.glob("checkpoints/step-????????/manifest.json")):
        found[manifest.parent.name] = json.loads(manifest.read_text().splitlines()[0])["format"]
    return found


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step, as it was taken last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def taken_again(run: Path, before: dict[int, float]) -> str:
    """Return from where a run was resumed, and how many steps it took again, of which the losses must be the same."""
    resumed, after = said(run, "resumed from"), losses(run)
    steps = [step for step in before.keys() & after.keys() if step > int(resumed.rpartition("-")[2])]
    other = [step for step in steps if abs(before[step] - after[step]) > 1e-6 * abs(before[step])]
    if other or not steps:
        raise SystemExit(f"{resumed}: of steps {steps}, the losses of {other} differ")
    return f"{resumed}; the losses of {len(steps)} steps are the same"


def said(run: Path, words: str) -> str:
    """Return the last line of the run's logs with these words; '': none."""
    lines = [
        line for file in run.rglob("*.log") for line in file.read_text(errors="replace").splitlines() if words in line
    ]
    return lines[-1].strip() if lines else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
