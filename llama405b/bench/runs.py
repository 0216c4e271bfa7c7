"""Probes that need processes of their own: training runs of the demo model; software versions.

Each run is a fork of this process, which has already imported torch; if this process has touched a GPU, it is a fresh process. A run
with a setting is compared with a run without it. There is only one rank, so sharding is not tested.

``run_in_own_process`` calls a function in a process that ends with this one: pinned memory, and what CUDA reads at its start, last as long
as a process. ``describe_machine`` returns versions, GPUs and allocator statistics; it reads no environment variables.
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
from llama405b.contract.software import exit_with_process, module_argv
from llama405b.data.demo_model import make_demo
from llama405b.spec.probes import Figure, Software

TRAINER = "llama405b.train"
STEPS, SAVED_STEP = 4, 2
TOLERANCE = 1e-3  # relative: GPUs may add in a different order
BF16_TOLERANCE = 1e-2  # another kernel or sharding rounds differently
BASE_SETTINGS = {
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


class DemoRuns:
    """Training runs of the demo model in one directory, with one token cache."""

    def __init__(self, directory: Path, device: str) -> None:
        self.directory, self.device = directory, device
        make_demo(directory / "model")

    def train(self, name: str, resume: str = "no", **settings: object) -> Losses:
        """Train and return the losses; ``settings`` have ``__`` in place of the dot."""
        run_dir = self.directory / name
        overrides = {key.replace("__", "."): value for key, value in settings.items()}
        paths = {"model.path": self.directory / "model"}
        flags = [
            f"--{key}={value}"
            for key, value in (BASE_SETTINGS | paths | {"parallel.device": self.device} | overrides).items()
        ]
        log = self.directory / f"{name}.log"
        code = _run_module([TRAINER, "--run-dir", str(run_dir), "--resume", resume, *flags], log)
        if code:
            last_line = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(
                f"the run with {' '.join(map(str, overrides.items()))} ended with exit code {code}: {last_line}"
            )
        rows = RunDir(run_dir).metrics.read_text().splitlines()
        metrics = [reader.loads(METRICS_LINE, row, "metrics") for row in rows]
        return {record.step: record.loss for record in metrics if isinstance(record, Metrics)}


def _run_module(argv: Sequence[str], log: Path) -> int:
    """Run the module ``argv[0]`` as the main program, in a fork if CUDA permits; return its exit code."""
    parent = os.getpid()
    if torch.cuda.is_initialized():  # for example by importing torchao; CUDA does not work in a fork then
        return os.spawnv(os.P_WAIT, sys.executable, [*module_argv(__name__), str(parent), str(log), *argv])
    pid = os.fork()
    if not pid:
        _become(argv, log, parent)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(argv: Sequence[str], log: Path, parent: int) -> NoReturn:
    """Turn this process into the main program ``argv``, with its output in ``log``."""
    try:
        exit_with_process(parent)  # the parent is killed at the probe's time limit
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.argv = list(argv)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)  # exits by itself
    except BaseException:  # noqa: BLE001 - a fork must not return into the parent's code
        traceback.print_exc()
    os._exit(1)


def compare_losses(losses: Mapping[str, Losses], tolerance: float) -> list[Figure]:
    """Compare the losses of all runs with the first run's, step by step."""
    (first, expected), *other_runs = losses.items()
    max_error = 0.0
    for name, actual in other_runs:
        if max(actual, default=0) != max(expected, default=0):
            ends = max(actual, default=0), max(expected, default=0)
            raise RuntimeError(f"{name} ended after step {ends[0]}, {first} after {ends[1]}")
        for step, loss in actual.items():
            max_error = max(max_error, error := abs(loss - expected[step]) / abs(expected[step]))
            if not error <= tolerance or not math.isfinite(loss):
                raise RuntimeError(
                    f"step {step} has loss {loss:.6f} with {name}, but {expected[step]:.6f} with {first}"
                )
    return [Figure("runs that agree", len(losses), ""), Figure("relative difference", max_error, "")]


def compare_accumulation(runs: DemoRuns) -> list[Figure]:
    """Train with two micro-batches per step, with each value of offload."""
    offloads = ("none", "optimizer", "all")
    losses = {
        offload: runs.train(offload, parallel__offload=offload, training__global_batch_size=4) for offload in offloads
    }
    return compare_losses(losses, TOLERANCE)


def compare_resume(runs: DemoRuns) -> list[Figure]:
    """Save asynchronously and resume, with states on the GPU, so that saves use pinned memory."""
    uninterrupted = runs.train("saved", checkpoint__every=SAVED_STEP, checkpoint__keep=STEPS)
    checkpoint = runs.directory / "saved" / "checkpoints" / f"step-{SAVED_STEP:08d}"
    return compare_losses({"no stop": uninterrupted, "a resume": runs.train("resumed", str(checkpoint))}, TOLERANCE)


def compare_packed(runs: DemoRuns) -> list[Figure]:
    """Train on packed documents isolated by a mask, and by the kernel that auto chooses here."""
    paths = short_documents(runs.directory / "short.jsonl")
    losses = {
        name: runs.train(f"packed-{name}", model__attention=name, data__paths=paths)
        for name in ("eager", "sdpa", "auto")
    }
    return compare_losses(losses, BF16_TOLERANCE)


def short_documents(path: Path) -> Path:
    """Write documents so short that several share a sequence; return the path."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]
    lines = [f'{{"text": "{" ".join(words[i % 7 :] * (1 + i % 9))}"}}' for i in range(400)]
    path.write_text("\n".join(lines))
    return path


def compare_rank0(runs: DemoRuns) -> list[Figure]:
    """Load weights on every rank by itself, and by rank 0 for all."""
    return compare_losses({load: runs.train(load, model__load=load) for load in ("local", "rank0")}, TOLERANCE)


def compare_fsdp1(runs: DemoRuns) -> list[Figure]:
    """Train with FSDP2 and FSDP1."""
    return compare_losses(
        {strategy: runs.train(strategy, parallel__strategy=strategy) for strategy in ("fsdp2", "fsdp1")}, BF16_TOLERANCE
    )


def compare_evaluation(runs: DemoRuns) -> list[Figure]:
    """Train with and without evaluations between the steps, which must not change the losses."""
    return compare_losses(
        {f"one every {n}": runs.train(f"evaluated-{n}", evaluation__every=n) for n in (STEPS, 1)}, TOLERANCE
    )


def run_in_temporary_directory(probe: Callable[[DemoRuns], list[Figure]], device: str) -> list[Figure]:
    """Run a probe in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="llama405b-bench-") as directory:
        return probe(DemoRuns(Path(directory), device))


PR_SET_PDEATHSIG = 1
Args = TypeVarTuple("Args")
T = TypeVar("T")


@contextlib.contextmanager
def spawned_process(function: Callable[..., Any], *args: Any) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Call ``function`` in a fresh process that is killed with the block; yield it and the connection of its result."""
    # Not a fork: CUDA has to start anew, with the environment variables of that moment.
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(sender, function, args))
    child.start()
    sender.close()
    try:
        yield child, receiver
    finally:
        child.kill()
        child.join()


def run_in_own_process(limit_s: float | None, function: Callable[[*Args], T], *args: *Args) -> T:
    """Return what ``function`` returns in a process of its own; ``limit_s``: time limit of the call, None: no limit."""
    with spawned_process(function, *args) as (child, results):
        if not results.poll(limit_s):
            raise RuntimeError(f"no result after {limit_s:.0f} s")
        try:
            result: T = results.recv()
        except EOFError:
            child.join()
            raise RuntimeError(f"its process ended with exit code {child.exitcode}") from None
        return result


def _run_child(results: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    parent = mp.parent_process()
    if parent and not parent.is_alive():  # the parent may have died before prctl
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store serves one process group only
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    results.send(function(*args))


DRIVER = Path("/proc/driver/nvidia/version")
PEAKS = ("allocated_bytes", "reserved_bytes")
COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
GIB = 2**30


def uses_gpu(device: str) -> bool:
    """Return whether ``device`` (auto or cpu) means a GPU here."""
    return device != "cpu" and torch.cuda.is_available()


def describe_machine() -> Software:
    """Return the versions of the software here, and the GPUs."""
    has_cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if has_cuda else 0)]
    return Software(
        node=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        transformers=importlib.metadata.version("transformers"),
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_cuda else "",
        driver=driver_version(),
        gpus=tuple(f"{device.name}, {device.total_memory / GIB:.1f} GiB" for device in devices),
    )


def driver_version(path: Path = DRIVER) -> str:
    """Return the version of NVIDIA's kernel module, "" if there is none.

    Parses the line of open modules and that of the older ones.
    """
    try:
        first_line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", first_line)
    return version[1] if version else ""


def allocator_stats(*, on_gpu: bool) -> dict[str, int]:
    """Return torch's statistics of this rank's GPU memory and pinned memory, in bytes and calls."""
    if not on_gpu:
        return {}
    device_stats, host_stats = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    stats = {f"{name}_peak": device_stats[f"{name}.all.peak"] for name in PEAKS} | {
        name: device_stats[name] for name in COUNTS
    }
    return stats | {
        "pinned_bytes_peak": host_stats["allocated_bytes.peak"],
        "num_host_alloc": host_stats["num_host_alloc"],
    }


if __name__ == "__main__":
    [_parent, _log, *_argv] = sys.argv[1:]
    _become(_argv, Path(_log), int(_parent))
