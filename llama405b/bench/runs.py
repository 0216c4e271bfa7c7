"""Probes that need a process of their own: whole runs, versions of software.

Runs of the training program itself, on the demo's model: what a run uses, compared with a run that does without it.

Each is a fork of this process, which has imported torch; where that has touched a GPU, a fresh one. One rank: sharding is not shown.

A call in a process of its own, which ends with this one: pinned memory, and what CUDA reads at its start, last as long as a process.

What a probe ran with: versions, GPUs, and how the allocator fared. Reads no environment.
"""

import contextlib
import ctypes
import importlib.metadata
import math
import multiprocessing as mp
import os
import platform
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch

from llama405b.contract import reader
from llama405b.contract.paths import RunDir
from llama405b.contract.records import METRICS_LINE, Metrics
from llama405b.contract.software import end_with, own_argv
from llama405b.data.demo_model import make_demo
from llama405b.spec.probes import Figure, Software

TRAINER = "llama405b.train"
STEPS, SAVED = 4, 2
TOLERANCE = 1e-3  # relative: GPUs may add in a different order
BF16_TOLERANCE = 1e-2  # another kernel, or another way to shard, rounds elsewhere
BASE = {
    "preset": "demo",
    "training.max_steps": STEPS,
    "training.micro_batch_size": 2,
    "data.max_bytes": 300_000,
    "evaluation.fraction": 0.05,
    "evaluation.every": "0",
    "evaluation.max_sequences": 2,
    "checkpoint.every": 0,
    "parallel.numerics": "fp32-master",
    "model.attention": "sdpa",
}
Losses = Mapping[int, float]  # by step


class Runs:
    """Runs in one directory, of one model and one cache of tokens."""

    def __init__(self, directory: Path, device: str) -> None:
        self.directory, self.device = directory, device
        make_demo(directory / "model")

    def train(self, name: str, resume: str = "no", **settings: object) -> Losses:
        """Train; returns the losses. ``settings``: with ``__`` for the dot."""
        run = self.directory / name
        own = {key.replace("__", "."): value for key, value in settings.items()}
        paths = {"model.path": self.directory / "model"}
        flags = [f"--{key}={value}" for key, value in (BASE | paths | {"parallel.device": self.device} | own).items()]
        log = self.directory / f"{name}.log"
        code = _run([TRAINER, "--run-dir", str(run), "--resume", resume, *flags], log)
        if code:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"the run with {' '.join(map(str, own.items()))} ended with exit code {code}: {last}")
        rows = RunDir(run).metrics.read_text().splitlines()
        metrics = [reader.loads(METRICS_LINE, row, "metrics") for row in rows]
        return {each.step: each.loss for each in metrics if isinstance(each, Metrics)}


def _run(argv: Sequence[str], log: Path) -> int:
    """Run a module, the first of ``argv``, as the main program, in a fork if CUDA lets it; returns its exit code."""
    parent = os.getpid()
    if torch.cuda.is_initialized():  # by an import, such as torchao's
        return os.spawnv(os.P_WAIT, sys.executable, [*own_argv(__name__), str(parent), str(log), *argv])
    pid = os.fork()
    if not pid:
        _be(argv, log, parent)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be(argv: Sequence[str], log: Path, parent: int) -> NoReturn:
    """Be that program."""
    try:
        end_with(parent)  # which is killed when the probe's time is over
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = list(argv)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)  # it leaves by itself
    except BaseException:  # noqa: BLE001 - this is a fork: nothing of it may go on
        traceback.print_exc()
    os._exit(1)


def agree(losses: Mapping[str, Losses], tolerance: float) -> list[Figure]:
    """Compare the losses of runs with the first one's, where both took a step."""
    (first, expected), *others = losses.items()
    worst = 0.0
    for name, found in others:
        if max(found, default=0) != max(expected, default=0):
            ends = max(found, default=0), max(expected, default=0)
            raise RuntimeError(f"{name} ended after step {ends[0]}, {first} after {ends[1]}")
        for step, loss in found.items():
            worst = max(worst, error := abs(loss - expected[step]) / abs(expected[step]))
            if not error <= tolerance or not math.isfinite(loss):
                raise RuntimeError(
                    f"step {step} has loss {loss:.6f} with {name}, but {expected[step]:.6f} with {first}"
                )
    return [Figure("runs that agree", len(losses), ""), Figure("relative difference", worst, "")]


def accumulation(runs: Runs) -> list[Figure]:
    """Two micro-batches, in each place of the states."""
    places = ("none", "optimizer", "all")
    losses = {place: runs.train(place, parallel__offload=place, training__global_batch_size=4) for place in places}
    return agree(losses, TOLERANCE)


def resume(runs: Runs) -> list[Figure]:
    """A save beside training, and a resume from it, where the states are on the GPU: they are copied to pinned memory."""
    whole = runs.train("saved", checkpoint__every=SAVED, checkpoint__keep=STEPS)
    checkpoint = runs.directory / "saved" / "checkpoints" / f"step-{SAVED:08d}"
    return agree({"no stop": whole, "a resume": runs.train("resumed", str(checkpoint))}, TOLERANCE)


def packed(runs: Runs) -> list[Figure]:
    """Documents that share sequences and do not see each other: by a mask, and by the kernel that is chosen here."""
    paths = short_documents(runs.directory / "short.jsonl")
    losses = {
        name: runs.train(f"packed-{name}", model__attention=name, data__paths=paths)
        for name in ("eager", "sdpa", "auto")
    }
    return agree(losses, BF16_TOLERANCE)


def short_documents(path: Path) -> Path:
    """Write documents of which several share a sequence."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]
    lines = [f'{{"text": "{" ".join(words[i % 7 :] * (1 + i % 9))}"}}' for i in range(400)]
    path.write_text("\n".join(lines))
    return path


def rank0(runs: Runs) -> list[Figure]:
    """Weights that rank 0 reads and sends, instead of each rank its own part."""
    return agree({load: runs.train(load, model__load=load) for load in ("local", "rank0")}, TOLERANCE)


def fsdp1(runs: Runs) -> list[Figure]:
    """FSDP1 beside FSDP2."""
    return agree({fsdp: runs.train(fsdp, parallel__strategy=fsdp) for fsdp in ("fsdp2", "fsdp1")}, BF16_TOLERANCE)


def evaluation(runs: Runs) -> list[Figure]:
    """Evaluations between steps, which must not change them."""
    return agree({f"one every {n}": runs.train(f"evaluated-{n}", evaluation__every=n) for n in (STEPS, 1)}, TOLERANCE)


def in_a_directory(probe: Callable[[Runs], list[Figure]], device: str) -> list[Figure]:
    """Run a probe in a directory that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="llama405b-bench-") as directory:
        return probe(Runs(Path(directory), device))


PR_SET_PDEATHSIG = 1
Args = TypeVarTuple("Args")
T = TypeVar("T")


@contextlib.contextmanager
def own_process(act: Callable[..., Any], *args: Any) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Call ``act`` in a fresh process, which is ended with the block; yields it, and where its result arrives."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(theirs, act, args))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()


def in_own_process(limit_s: float | None, act: Callable[[*Args], T], *args: *Args) -> T:
    """Return what ``act`` returns in a process of its own; ``limit_s``: of the call, None: any time."""
    with own_process(act, *args) as (child, results):
        if not results.poll(limit_s):
            raise RuntimeError(f"no result after {limit_s:.0f} s")
        try:
            result: T = results.recv()
        except EOFError:
            child.join()
            raise RuntimeError(f"its process ended with exit code {child.exitcode}") from None
        return result


def _in_child(results: Connection, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    parent = mp.parent_process()
    if parent and not parent.is_alive():  # which may have died before that
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store is for one group
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    results.send(act(*args))


DRIVER = Path("/proc/driver/nvidia/version")
PEAKS = ("allocated_bytes", "reserved_bytes")
COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
GIB = 2**30


def uses_gpu(device: str) -> bool:
    """Whether what is asked to run on ``device``, auto or cpu, does on a GPU."""
    return device != "cpu" and torch.cuda.is_available()


def software() -> Software:
    """Return the versions of what runs here, and its GPUs."""
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if cuda else 0)]
    return Software(
        node=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        transformers=importlib.metadata.version("transformers"),
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        driver=driver_version(),
        gpus=tuple(f"{each.name}, {each.total_memory / GIB:.1f} GiB" for each in devices),
    )


def driver_version(path: Path = DRIVER) -> str:
    """Return the version of NVIDIA's kernel module, "" if there is none; it has two forms, that of open modules and the older one."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", first)
    return version[1] if version else ""


def allocator_stats(*, on_gpu: bool) -> dict[str, int]:
    """Return torch's statistics of this rank's GPU and of the memory that it pinned, in bytes and calls."""
    if not on_gpu:
        return {}
    of_device, of_host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    stats = {f"{name}_peak": of_device[f"{name}.all.peak"] for name in PEAKS} | {
        name: of_device[name] for name in COUNTS
    }
    return stats | {"pinned_bytes_peak": of_host["allocated_bytes.peak"], "num_host_alloc": of_host["num_host_alloc"]}


if __name__ == "__main__":
    [_parent, _log, *_argv] = sys.argv[1:]
    _be(_argv, Path(_log), int(_parent))
