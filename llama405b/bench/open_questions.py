"""Probes of questions that a few minutes on one GPU can answer; what is expected and what follows is in ``spec.probes.OPEN_QUESTIONS``.

On a CPU each probe runs as far as it can, with small shapes; that table also says what this does not show.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from llama405b.bench import host
from llama405b.bench.host import GB, best_s
from llama405b.bench.runs import (
    BF16_TOLERANCE,
    DemoRuns,
    compare_losses,
    run_in_own_process,
    short_documents,
    spawned_process,
    uses_gpu,
)
from llama405b.bench.steps import STEPS, Workload, take_steps
from llama405b.checkpoint.index import Held, Holdings, plan_index
from llama405b.contract import reader
from llama405b.contract.paths import RunDir
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.settings.schema import Model, Parallel
from llama405b.spec.probes import Figure

N_RANKS = 64  # ranks of the 405B run in question
HIDDEN, INTERMEDIATE, LAYERS, TENSORS = 16384, 53248, 126, 4500
JOIN_S, FLIGHT_S = 600, 20.0


def measure_comms(rank: Rank) -> list[Figure]:
    """Measure the GPU memory that CUDA takes by itself and with 1 to 4 communicators."""
    x, figures = torch.ones(1 << 20, device=rank.device), []
    for count in range(5):
        if count:
            dist.all_reduce(x, group=dist.new_group([0]) if count > 1 else None)
        if rank.on_gpu:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            figures.append(Figure(f"{count} communicators", (total - free - torch.cuda.memory_reserved()) / GB, "GB"))
    return figures


def measure_fsdp_copies(rank: Rank) -> list[Figure]:
    """Time FSDP2's copies for a layer of 405B on 64 ranks.

    They copy out of the all-gather, and gradients into the reduce-scatter.
    """
    h, f = (HIDDEN, INTERMEDIATE) if rank.on_gpu else (16 * N_RANKS, 2 * N_RANKS)
    shapes = [(h, h), (h // 16, h), (h // 16, h), (h, h), (f, h), (f, h), (h, f)]
    sizes = [rows * columns // N_RANKS for rows, columns in shapes]
    gathered = torch.empty(N_RANKS, sum(sizes), dtype=torch.bfloat16, device=rank.device)
    weights = [gathered.new_empty(N_RANKS, size) for size in sizes]
    out_s = best_s(rank, lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=weights))
    gradients = [weight.view(shape) for weight, shape in zip(weights, shapes, strict=True)]
    flat = torch.empty(N_RANKS, sum(sizes), device=rank.device)
    cat_s = best_s(rank, lambda: torch._chunk_cat(gradients, dim=0, num_chunks=N_RANKS, out=flat))
    step_405b = Figure("of a step of 405B", LAYERS * (2 * out_s + cat_s), "s")
    return [Figure("copy out", 1e3 * out_s, "ms"), Figure("chunk cat", 1e3 * cat_s, "ms"), step_405b]


def measure_rounding(rank: Rank) -> list[Figure]:
    """Time AdamW with each numerics, on this rank's threads and on its GPU."""
    figures = []
    for device, count in {"cpu": 1 << 22, rank.device.type: 1 << (29 if rank.on_gpu else 22)}.items():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("bf16-stochastic", torch.bfloat16)):
            update = host.build_update(count, device, dtype, stochastic=name == "bf16-stochastic")
            figures.append(Figure(f"{device} {name}", 1e9 * best_s(rank, update) / count, "ns an element"))
    return figures


def measure_tokens(rank: Rank) -> list[Figure]:
    """Time a layer of 405B by number of tokens: as in the recipe, fused, and in FP8."""
    figures, offload = [], Parallel(offload="all")
    variants = {"bf16": (offload, Model(fused="false")), "fused": (offload, Model(fused="true"))}
    if not (llama.compile_unsupported_reason(rank.device) or llama.fp8_unsupported_reason(rank.device)):
        variants["fp8"] = Parallel(offload="all", numerics="fp8"), Model(compile=True)
    for name, (parallel, model) in variants.items():
        for seq_len in (8192, 4096, 2048) if rank.on_gpu else (64,):
            timing = take_steps(Workload("llama3.1-405b", 1, 1, seq_len), parallel, rank, 1 + STEPS, model)[1]
            exposed_s = timing.work.exposed_s if timing.work else 0.0
            figures.append(Figure(f"{name} {seq_len}: forward", timing.seconds["forward"] - exposed_s, "s"))
            figures.append(Figure(f"{name} {seq_len}: backward", timing.seconds["backward"], "s"))
    return figures


def measure_hog(rank: Rank) -> list[Figure]:
    """Time the matrix products of a layer of 405B while some of the GPU's multiprocessors are busy."""
    h, f, n_tokens, dtype = (
        (HIDDEN, INTERMEDIATE, 4096, torch.bfloat16) if rank.on_gpu else (64, 128, 64, torch.float32)
    )
    x, wide = (torch.randn(n_tokens, width, device=rank.device, dtype=dtype) for width in (h, f))
    weights = [x.new_empty(h, width) for width in (h + h // 8, h, 2 * f)]
    narrow = x.new_empty(f, h)

    def products() -> None:
        for weight in weights:
            x @ weight
        wide @ narrow

    if not rank.on_gpu:
        return [Figure("0 busy", 1e3 * best_s(rank, products), "ms")]
    from llama405b.bench.busy_kernel import keep_busy  # needs Triton

    figures, background = [], torch.cuda.Stream(priority=-1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for busy in (0, 8, 16, 24, 32):
        for _ in range(3):
            with torch.cuda.stream(background):
                keep_busy(busy)
            begin.record()
            products()
            end.record()
            torch.cuda.synchronize()
        figures.append(Figure(f"{busy} busy", begin.elapsed_time(end), "ms"))
    return figures


def compare_packed_fast(runs: DemoRuns) -> list[Figure]:
    """Train on packed documents plain, compiled and in FP8; compare losses and count recompilations."""
    os.environ["TORCH_LOGS"] = "recompiles"
    variants: dict[str, dict[str, object]] = {"plain": {}}
    if uses_gpu(runs.device):
        variants["compiled"] = {"model__compile": "true"}
        if not llama.fp8_unsupported_reason(torch.device("cuda")):
            variants["fp8"] = {"model__compile": "true", "parallel__numerics": "fp8"}
    paths = short_documents(runs.directory / "short.jsonl")
    losses = {
        name: runs.train(name, "no", data__paths=paths, model__attention="auto", **settings)
        for name, settings in variants.items()
    }
    logs = {name: (runs.directory / f"{name}.log").read_text(errors="replace") for name in variants}
    recompilations = [
        Figure(f"{name}: recompilations", log.count("Recompiling function"), "") for name, log in logs.items()
    ]
    return [*compare_losses(losses, BF16_TOLERANCE), *recompilations]


def measure_planning(this_rank: Rank) -> list[Figure]:
    """Time steps alone, and while a thread plans in Python who writes what of a checkpoint of 405B on 64 ranks."""
    count, tensors, layers, n_steps = (N_RANKS, TENSORS, 8, 1 + STEPS) if this_rank.on_gpu else (2, 20, 1, 2)
    stop, workload = threading.Event(), Workload("llama3.1-8b", layers, 2, 4096)

    def holdings(rank: int) -> Holdings:
        held = Held("F32", (64 * count, 8), (((64 * rank, 64 * (rank + 1)), (0, 8)),))
        return Holdings.of({f"model.layers.{number}.weight": held for number in range(tensors)})

    received = [reader.dumps(holdings(rank)) for rank in range(count)]

    def plan() -> None:
        while not stop.is_set():
            reader.dumps(plan_index([reader.loads(Holdings, text, "a rank's holdings") for text in received]))

    alone_s = take_steps(workload, Parallel(), this_rank, n_steps)[1].total_s
    thread = threading.Thread(target=plan, daemon=True)
    thread.start()
    background_s = take_steps(workload, Parallel(), this_rank, n_steps)[1].total_s
    stop.set()
    return [
        Figure("alone", alone_s, "s"),
        Figure("beside", background_s, "s"),
        Figure("beside / alone", background_s / alone_s, ""),
    ]


def measure_streams(device: str) -> list[Figure]:
    """Time steps with offload by number of CUDA hardware queues, which a process reads at its start."""
    figures = []
    for queues in (1, 8, 32) if uses_gpu(device) else (8,):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
        figures.append(Figure(f"{queues} queues: step", run_in_own_process(None, _time_offloaded_step, device), "s"))
    return figures


def _time_offloaded_step(device: str) -> float:
    """Return the seconds of a step with copies in both directions."""
    rank = ranks.join_process_group(device, JOIN_S)
    layers, count = (6, 1 + STEPS) if rank.on_gpu else (1, 1)
    workload, model = Workload("llama3.1-8b", layers, 4, 4096), Model(activations="host" if rank.on_gpu else "device")
    return take_steps(workload, Parallel(offload="all"), rank, count, model)[1].total_s


def measure_hang(device: str) -> list[Figure]:
    """Query NCCL's flight recorder and py-spy about a rank whose GPU kernel never ends."""
    with tempfile.TemporaryDirectory() as directory:
        record, mark = RunDir(Path(directory)).flight(0), Path(directory) / "stuck"
        with spawned_process(_stuck, device, record, mark) as (child, _):
            _wait_for_content(mark)
            return [*_dump_flight(record), _find_stack(child.pid)]


def _stuck(device: str, record: Path, mark: Path) -> None:
    """Join, then hang on a GPU that spins between two collectives."""
    ranks.enable_flight_recorder(record)
    rank = ranks.join_process_group(device, JOIN_S)
    x = torch.ones(1 << 20, device=rank.device)
    dist.all_reduce(x)
    mark.write_text("soon")  # the other process waits for this before it queries
    if not rank.on_gpu:
        signal.pause()
    torch.cuda._sleep(10**12)
    dist.all_reduce(x)
    float(x.sum())


def _dump_flight(record: Path) -> list[Figure]:
    try:
        pipe = os.open(f"{record}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no process has the pipe open for reading
        return [Figure("pipes", 0, "")]
    os.write(pipe, b"1")
    os.close(pipe)
    after_s = _wait_for_content(record)
    size = record.stat().st_size if record.exists() else 0
    return [Figure("pipes", 1, ""), Figure("dump", size / 1e3, "kB"), Figure("after", after_s, "s")]


def _find_stack(pid: int | None) -> Figure:
    """Return where py-spy finds a process's main thread, and the depth of its stack."""
    with os.popen(f"'{Path(sys.executable).with_name('py-spy')}' dump --json --nonblocking --pid {pid}") as output:
        threads = json.loads(output.read() or "[]")  # empty: py-spy is not installed or not permitted
    frames = [frame for thread in threads if thread["os_thread_id"] == pid for frame in thread["frames"]]
    where = "".join(f"in {frame['name']}, line {frame['line']}" for frame in frames[:1])
    return Figure(f"py-spy: {where or 'no stack'}", len(frames), "frames")


def _wait_for_content(file: Path) -> float:
    """Wait until a file has content, at most ``FLIGHT_S``; return the seconds waited."""
    start = time.monotonic()
    while not (file.exists() and file.stat().st_size) and time.monotonic() < start + FLIGHT_S:
        time.sleep(0.1)
    return time.monotonic() - start
