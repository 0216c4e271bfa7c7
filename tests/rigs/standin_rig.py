"""The trainer on the stand-in for a GPU, or on the CPU beside it; each rank notes at its end what was counted and found.

See tests/standin/device/README.md for what of that is real. The program leaves as the trainer does, without the
interpreter's shutdown, so the stand-in's own report at exit never comes: ``train`` reads the counters instead.
"""

import ctypes
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ranks_rig import ROOT, fork_server, run_program

FOUND = ("touched", "changed", "race")
FLAGS = (
    "--preset", "demo", "--model.attention", "eager", "--training.max_steps", "4", "--training.micro_batch_size", "2",
    "--data.seq_len", "64", "--evaluation.every", "2", "--evaluation.fraction", "0.2", "--evaluation.max_sequences", "4",
    "--checkpoint.every", "2", "--parallel.numa", "off",  # with as many threads as the CPU's run has: they decide the last bits
    "--model.fused", "false",  # a CPU has no backward of CUDA's kernel for norms
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """What became of a run."""

    run: Path
    losses: list[tuple]  # loss, norm of the gradient and evaluation loss of each step
    counts: list[dict]  # of each rank: calls and bytes by counter, at its end
    steps: list[list[dict]]  # of each rank: the same, of each step alone
    output: str
    on_device: list[bool]  # of each rank: whether it started CUDA

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
        # A context on another rank's GPU takes half a gigabyte there.
        assert max(each["context"][0] for each in counts) <= 1, done.stdout + done.stderr
        return Trained(run, losses, counts, steps, done.stdout + done.stderr, [note["on_device"] for note in notes])

    def losses_of_cpu(self, numerics, accumulation, world, *flags):
        """What the same steps give on the CPU, whatever is offloaded; computed once."""
        key = numerics, accumulation, world, flags
        if key not in self.of_cpu:
            of = (*flags, "--parallel.numerics", numerics)
            self.of_cpu[key] = self.train(*of, device="cpu", accumulation=accumulation, world=world).losses
        return self.of_cpu[key]

    def climb(self, probes, world):
        """Run tests of ``bench`` on so many ranks; returns what each notes, see ``climber``."""
        notes = self.directory / f"climb-{next(self.numbers)}"
        notes.mkdir()
        environment = {"STANDIN_NOTES": str(notes)}
        done = run_program("standin_rig:climber", *probes, cwd=notes, world=world, env=environment, timeout_s=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(path.read_text()) for path in sorted(notes.iterdir()) if path.suffix == ".json"]

    def try_out(self, candidates, compared_layers, world):
        """Try settings of the model with `tune`'s program; returns what each gave, by label."""
        from llama405b.contract import reader
        from llama405b.predict.tuning import Trial, Trials
        from llama405b.spec.probes import decode_results

        cwd = self.directory / f"trials-{next(self.numbers)}"
        cwd.mkdir()
        given = {
            "--model.weights": "random",
            "--checkpoint.every": 0,
            "--evaluation.every": 0,
            "--training.global_batch_size": 4,
            "--parallel.numerics": "fp32-master",
        }
        pairs = (
            dict(zip(FLAGS[::2], FLAGS[1::2], strict=True))
            | given
            | dict(zip(*[iter(map(str, self.data))] * 2, strict=True))
        )
        flags = [
            f"{name}={value}"
            for name, value in (pairs | {"--training.max_steps": 100}).items()
            if name != "--evaluation.fraction"
        ]
        trials = Trials(tuple(flags), tuple(candidates), 2, compared_layers)
        done = run_program("standin_rig:tuner", reader.dumps(trials), cwd=cwd, world=world, timeout_s=300)
        assert done.returncode == 0, done.stdout + done.stderr
        results = decode_results(done.stdout.splitlines())
        return {result.trial: reader.loads(Trial, result.outcome, "it") for result in results if result.outcome}


def _write_documents(directory):
    texts = (" ".join(text.split()) for text in (ROOT / "LICENSE").read_text().split("\n\n") * 4)
    path = directory / "paragraphs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def trainer():
    """Be the trainer on one rank, and note what was counted."""
    import torch

    from llama405b import train as program
    from llama405b.training.loop import Trainer

    steps, one_step = [], Trainer.run_step

    def counted(self, step):
        before = counts()
        metrics = one_step(self, step)
        steps.append({kind: [n - before[kind][0], size - before[kind][1]] for kind, (n, size) in counts().items()})
        return metrics

    Trainer.run_step = counted
    try:
        return program.main(sys.argv[1:])
    finally:
        _note({"counts": counts(), "steps": steps, "on_device": torch.cuda.is_initialized()})


def _note(what):
    path = Path(os.environ["STANDIN_NOTES"], f"counted-{os.environ.get('RANK', 0)}.json")
    path.write_text(json.dumps(what))


def trainer_with_small_stages():
    """The trainer, whose stages for loading have 64 KiB."""
    from llama405b.distributed import host_memory

    host_memory.STAGE_BYTES = 1 << 16
    return trainer()


def deterministic_trainer():
    """The trainer, with torch's deterministic algorithms, which also fill with NaN whatever memory is allocated."""
    import torch

    torch.use_deterministic_algorithms(True)
    return trainer()


def profiled_trainer():
    """The trainer, of whose third step a profile is requested in the second."""
    from llama405b.contract.files import write_json
    from llama405b.contract.records import RequestKind, RunRequest
    from llama405b.training import requests
    from llama405b.training.loop import Trainer

    one_step = Trainer.run_step

    def requesting(self, step):
        if step == 2 and self.context.rank.is_rank0:
            self.context.run.requests.mkdir(exist_ok=True)
            write_json(self.context.run.requests / "p.json", RunRequest("p", RequestKind.PROFILE, "me", time.time()))
        return one_step(self, step)

    Trainer.run_step, requests.POLL_INTERVAL_S = requesting, 0.0
    return trainer()


def climber():
    """Run tests of ``bench`` on one rank, with the shapes and sizes that they have on a CPU."""
    import torch

    from llama405b.bench import host, program, steps
    from llama405b.spec.probes import FULL_RUN_PROBES, Probe

    def on_cpu(me):
        return dataclasses.replace(me, device=torch.device("cpu"))

    steps.HIDING, steps.EXACT = (dataclasses.replace(each, layers=2) for each in (steps.HIDING, steps.EXACT))
    steps.EXACT_STEPS = 4
    config, tokens, copied = steps.Workload.config, steps.Workload.tokens, host.n_copied_bytes
    steps.Workload.config = lambda what, me: config(what, on_cpu(me))
    steps.Workload.tokens = lambda what, me, step, number: tokens(what, on_cpu(me), step, number).to(me.device)
    host.n_copied_bytes = lambda me: copied(on_cpu(me))
    program.PROBE_FUNCTIONS[Probe.COLLECTIVES] = functools.partial(host.measure_collectives, sizes=(1 << 16, 1 << 20))
    options = program.Options("cuda")
    if all(Probe(name) in FULL_RUN_PROBES for name in sys.argv[1:]):  # in forks, which must find the device untouched
        os.environ["STANDIN_CHECK"] = "2"  # a finding ends the run: nobody counts them there
        me = None
    else:
        me = options.join()
    results = [program._run_probe(Probe(name), me, 1, options, 600.0) for name in sys.argv[1:]]
    faults = {result.probe: result.fault for result in results if result.fault}
    figures = {result.probe: len(result.figures) for result in results}
    found = {kind: counts()[kind][0] for kind in FOUND}
    _note({"faults": faults, "figures": figures, "allocator": results[-1].allocator, "found": found})


def tuner():
    """Try settings on one rank."""
    from llama405b.bench import program, trials
    from llama405b.contract import reader
    from llama405b.predict.tuning import Trials

    trials.ENOUGH_S = 0.1
    trials.run_trials(program.Options("cuda").join(), reader.loads(Trials, sys.argv[1], "the trials"), Path("r"), 600.0)


def in_fork(target, *args):
    """Call a function in a fresh process, which has torch and may use the device; returns its result."""
    with ProcessPoolExecutor(1, mp_context=fork_server()) as pool:
        return pool.submit(target, *args).result(timeout=60)


def counts():
    """Calls and bytes by the name of the stand-in's counter; see device/kinds.h."""
    import host_kernels

    runtime = ctypes.CDLL(host_kernels.LIBRARY)
    runtime.standin_count.restype = ctypes.c_char_p
    n, size, found = ctypes.c_long(), ctypes.c_long(), {}
    while name := runtime.standin_count(len(found), ctypes.byref(n), ctypes.byref(size)):
        found[name.decode()] = [n.value, size.value]
    return found
