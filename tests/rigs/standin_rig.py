"""The trainer on the stand-in for a GPU, or on the CPU beside it; each rank notes at its end what was counted and found.

See tests/standin/device/README.md for what of that is real. The program leaves as the trainer does, without the
interpreter's shutdown, so the stand-in's own report at exit never comes: ``train`` reads the counters instead.
"""

import ctypes
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

from conftest import ROOT
from ranks_rig import run_program

FOUND = ("touched", "changed", "race")
FLAGS = (
    "--preset", "demo", "--model.attention", "eager", "--training.max_steps", "4", "--training.micro_batch_size", "2",
    "--data.seq_len", "64", "--evaluation.every", "2", "--evaluation.fraction", "0.2", "--evaluation.max_sequences", "4",
    "--checkpoint.every", "2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """What became of a run."""

    run: Path
    losses: list[tuple]  # loss, norm of the gradient and evaluation loss of each step
    counts: list[dict]  # of each rank: calls and bytes by counter, at its end
    steps: list[list[dict]]  # of each rank: the same, of each step alone
    output: str

    @property
    def found(self):
        """What the checks of all ranks found, by kind."""
        return {kind: sum(counts[kind][0] for counts in self.counts) for kind in FOUND}


NOTHING = dict.fromkeys(FOUND, 0)


class Standin:
    """Trains a model on the stand-in and on the CPU, on short texts of which several share a sequence."""

    def __init__(self, model, directory):
        self.directory, self.numbers = directory, itertools.count()
        self.data = ("--model.path", model, "--data.paths", _write_documents(directory))
        self.of_cpu = {}

    def train(self, *flags, device="cuda", accumulation=1, world=1, program="standin_rig:trainer"):
        """Train for four steps."""
        run = self.directory / f"run-{next(self.numbers)}"
        run.mkdir()
        batch = ("--training.global_batch_size", 2 * accumulation * world)
        argv = [*FLAGS, *self.data, *batch, "--parallel.device", device, "--run-dir", run, *flags]
        environment = {"STANDIN_NOTES": str(run)}
        done = run_program(program, *argv, cwd=run, world=world, env=environment, timeout_s=200)
        assert done.returncode == 0, done.stdout + done.stderr
        notes = [json.loads(path.read_text()) for path in sorted(run.glob("counted-*.json"))]
        rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
        losses = [(row["loss"], row["grad_norm"], row.get("evaluation_loss")) for row in rows]
        counts, steps = ([note[key] for note in notes] for key in ("counts", "steps"))
        return Trained(run, losses, counts, steps, done.stdout + done.stderr)

    def losses_of_cpu(self, numerics, accumulation, world):
        """What the same steps give on the CPU, whatever is offloaded; computed once."""
        key = numerics, accumulation, world
        if key not in self.of_cpu:
            flags = ("--parallel.numerics", numerics)
            self.of_cpu[key] = self.train(*flags, device="cpu", accumulation=accumulation, world=world).losses
        return self.of_cpu[key]


def _write_documents(directory):
    texts = (" ".join(text.split()) for text in (ROOT / "LICENSE").read_text().split("\n\n") * 4)
    path = directory / "paragraphs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def trainer():
    """Be the trainer on one rank, and note what was counted."""
    from llama405b import train as program
    from llama405b.training.loop import Trainer

    steps, one_step = [], Trainer.one_step

    def counted(self, step):
        before = counts()
        metrics = one_step(self, step)
        steps.append({kind: [n - before[kind][0], size - before[kind][1]] for kind, (n, size) in counts().items()})
        return metrics

    Trainer.one_step = counted
    try:
        return program.main(sys.argv[1:])
    finally:
        note = {"counts": counts(), "steps": steps}
        Path(os.environ["STANDIN_NOTES"], f"counted-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(note))


def counts():
    """Calls and bytes by the name of the stand-in's counter; see cudart.cpp."""
    import host_kernels

    runtime = ctypes.CDLL(host_kernels.LIBRARY)
    runtime.standin_count.restype = ctypes.c_char_p
    n, size, found = ctypes.c_long(), ctypes.c_long(), {}
    while name := runtime.standin_count(len(found), ctypes.byref(n), ctypes.byref(size)):
        found[name.decode()] = [n.value, size.value]
    return found
