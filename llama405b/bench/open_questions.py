"""Probes of questions that a few minutes on one GPU can answer; what is expected and what follows is in ``spec.probes.OPEN``.

On a CPU each probe runs as far as it can, with small shapes; that table also says what this does not show.
"""

import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import MetadataIndex, SavePlan, TensorWriteData, WriteItem, WriteItemType

from llama405b.bench import host
from llama405b.bench.host import GB, best_s
from llama405b.bench.runs import BF16_TOLERANCE, Runs, agree, in_own_process, own_process, short_documents, uses_gpu
from llama405b.bench.steps import STEPS, Workload, take_steps
from llama405b.contract.paths import RunDir
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.settings.schema import Model, Parallel
from llama405b.spec.probes import Figure

RANKS = 64  # ranks of the 405B run in question
HIDDEN, INTERMEDIATE, LAYERS, TENSORS = 16384, 53248, 126, 4500
JOIN_S, FLIGHT_S = 600, 20.0


def comms(me: Rank) -> list[Figure]:
    """Measure the GPU memory that CUDA takes by itself and with 1 to 4 communicators."""
    x, figures = torch.ones(1 << 20, device=me.device), []
    for count in range(5):
        if count:
            dist.all_reduce(x, group=dist.new_group([0]) if count > 1 else None)
        if me.on_gpu:
            torch.cuda.synchronize()
            free, whole = torch.cuda.mem_get_info()
            figures.append(Figure(f"{count} communicators", (whole - free - torch.cuda.memory_reserved()) / GB, "GB"))
    return figures


def fsdp_copies(me: Rank) -> list[Figure]:
    """Time FSDP2's copies for a layer of 405B on 64 ranks.

    They copy out of the all-gather, and gradients into the reduce-scatter.
    """
    h, f = (HIDDEN, INTERMEDIATE) if me.on_gpu else (16 * RANKS, 2 * RANKS)
    shapes = [(h, h), (h // 16, h), (h // 16, h), (h, h), (f, h), (f, h), (h, f)]
    each = [rows * columns // RANKS for rows, columns in shapes]
    gathered = torch.empty(RANKS, sum(each), dtype=torch.bfloat16, device=me.device)
    weights = [gathered.new_empty(RANKS, size) for size in each]
    out_s = best_s(me, lambda: torch.split_with_sizes_copy(gathered, each, dim=1, out=weights))
    gradients = [weight.view(shape) for weight, shape in zip(weights, shapes, strict=True)]
    flat = torch.empty(RANKS, sum(each), device=me.device)
    cat_s = best_s(me, lambda: torch._chunk_cat(gradients, dim=0, num_chunks=RANKS, out=flat))
    of_405b = Figure("of a step of 405B", LAYERS * (2 * out_s + cat_s), "s")
    return [Figure("copy out", 1e3 * out_s, "ms"), Figure("chunk cat", 1e3 * cat_s, "ms"), of_405b]


def rounding(me: Rank) -> list[Figure]:
    """Time AdamW with each numerics, on this rank's threads and on its GPU."""
    figures = []
    for device, count in {"cpu": 1 << 22, me.device.type: 1 << (29 if me.on_gpu else 22)}.items():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("bf16-stochastic", torch.bfloat16)):
            act = host.update_of(count, device, dtype, stochastic=name == "bf16-stochastic")
            figures.append(Figure(f"{device} {name}", 1e9 * best_s(me, act) / count, "ns an element"))
    return figures


def tokens(me: Rank) -> list[Figure]:
    """Time a layer of 405B by number of tokens: as in the recipe, fused, and in FP8."""
    figures, offload = [], Parallel(offload="all")
    kinds = {"bf16": (offload, Model()), "fused": (offload, Model(fused=True))}
    if not (llama.compile_lack(me.device) or llama.fp8_lack(me.device)):
        kinds["fp8"] = Parallel(offload="all", numerics="fp8"), Model(compile=True)
    for name, (parallel, model) in kinds.items():
        for seq_len in (8192, 4096, 2048) if me.on_gpu else (64,):
            timed = take_steps(Workload("llama3.1-405b", 1, 1, seq_len), parallel, me, 1 + STEPS, model)[1]
            waited = timed.work.exposed_s if timed.work else 0.0
            figures.append(Figure(f"{name} {seq_len}: forward", timed.seconds["forward"] - waited, "s"))
            figures.append(Figure(f"{name} {seq_len}: backward", timed.seconds["backward"], "s"))
    return figures


def hog(me: Rank) -> list[Figure]:
    """Time the matrix products of a layer of 405B while some of the GPU's multiprocessors are busy."""
    h, f, count, dtype = (HIDDEN, INTERMEDIATE, 4096, torch.bfloat16) if me.on_gpu else (64, 128, 64, torch.float32)
    x, wide = (torch.randn(count, width, device=me.device, dtype=dtype) for width in (h, f))
    weights = [x.new_empty(h, width) for width in (h + h // 8, h, 2 * f)]
    narrow = x.new_empty(f, h)

    def products() -> None:
        for weight in weights:
            x @ weight
        wide @ narrow

    if not me.on_gpu:
        return [Figure("0 busy", 1e3 * best_s(me, products), "ms")]
    from llama405b.bench.busy_kernel import keep_busy  # needs Triton

    figures, beside = [], torch.cuda.Stream(priority=-1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for busy in (0, 8, 16, 24, 32):
        for _ in range(3):
            with torch.cuda.stream(beside):
                keep_busy(busy)
            begin.record()
            products()
            end.record()
            torch.cuda.synchronize()
        figures.append(Figure(f"{busy} busy", begin.elapsed_time(end), "ms"))
    return figures


def packed_fast(runs: Runs) -> list[Figure]:
    """Train on packed documents plain, compiled and in FP8; compare losses and count recompilations."""
    os.environ["TORCH_LOGS"] = "recompiles"
    kinds: dict[str, dict[str, object]] = {"plain": {}}
    if uses_gpu(runs.device):
        kinds["compiled"] = {"model__compile": "true"}
        if not llama.fp8_lack(torch.device("cuda")):
            kinds["fp8"] = {"model__compile": "true", "parallel__numerics": "fp8"}
    paths = short_documents(runs.directory / "short.jsonl")
    losses = {
        name: runs.train(name, "no", data__paths=paths, model__attention="auto", **settings)
        for name, settings in kinds.items()
    }
    logs = {name: (runs.directory / f"{name}.log").read_text(errors="replace") for name in kinds}
    again = [Figure(f"{name}: recompilations", log.count("Recompiling function"), "") for name, log in logs.items()]
    return [*agree(losses, BF16_TOLERANCE), *again]


def planning(me: Rank) -> list[Figure]:
    """Time steps alone, and while a thread plans a DCP save of 405B on 64 ranks in Python."""
    count, tensors = (RANKS, TENSORS) if me.on_gpu else (2, 20)
    ends, workload = threading.Event(), Workload("llama3.1-8b", 8, 2, 4096)

    def item(number: int, rank: int) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size((64 * rank, 0)), torch.Size((64, 8)))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size((64 * count, 8)))
        index = MetadataIndex(f"model.layers.{number}.weight", chunk.offsets)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    plans = [pickle.dumps(SavePlan([item(number, rank) for number in range(tensors)])) for rank in range(count)]

    def plan() -> None:
        while not ends.is_set():
            for each in create_default_global_save_plan([pickle.loads(text) for text in plans])[0]:
                pickle.dumps(each)

    alone = take_steps(workload, Parallel(), me, 1 + STEPS)[1].whole_s
    thread = threading.Thread(target=plan, daemon=True)
    thread.start()
    beside = take_steps(workload, Parallel(), me, 1 + STEPS)[1].whole_s
    ends.set()
    return [Figure("alone", alone, "s"), Figure("beside", beside, "s"), Figure("beside / alone", beside / alone, "")]


def streams(device: str) -> list[Figure]:
    """Time steps with offload by number of CUDA hardware queues, which a process reads at its start."""
    figures = []
    for queues in (1, 8, 32) if uses_gpu(device) else (8,):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
        figures.append(Figure(f"{queues} queues: step", in_own_process(None, _step_s, device), "s"))
    return figures


def _step_s(device: str) -> float:
    """Return the seconds of a step with copies in both directions."""
    me = ranks.join(device, JOIN_S)
    layers, count = (6, 1 + STEPS) if me.on_gpu else (1, 1)
    workload, model = Workload("llama3.1-8b", layers, 4, 4096), Model(activations="host" if me.on_gpu else "device")
    return take_steps(workload, Parallel(offload="all"), me, count, model)[1].whole_s


def hang(device: str) -> list[Figure]:
    """Query NCCL's flight recorder and py-spy about a rank whose GPU kernel never ends."""
    with tempfile.TemporaryDirectory() as directory:
        record, mark = RunDir(Path(directory)).flight(0), Path(directory) / "stuck"
        with own_process(_stuck, device, record, mark) as (child, _):
            _wait(mark)
            return [*_flight(record), _stack(child.pid)]


def _stuck(device: str, record: Path, mark: Path) -> None:
    """Join, then hang on a GPU that spins between two collectives."""
    ranks.record_flights(record)
    me = ranks.join(device, JOIN_S)
    x = torch.ones(1 << 20, device=me.device)
    dist.all_reduce(x)
    mark.write_text("soon")  # the other process waits for this before it queries
    if not me.on_gpu:
        signal.pause()
    torch.cuda._sleep(10**12)
    dist.all_reduce(x)
    float(x.sum())


def _flight(record: Path) -> list[Figure]:
    try:
        pipe = os.open(f"{record}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no process has the pipe open for reading
        return [Figure("pipes", 0, "")]
    os.write(pipe, b"1")
    os.close(pipe)
    after_s = _wait(record)
    size = record.stat().st_size if record.exists() else 0
    return [Figure("pipes", 1, ""), Figure("dump", size / 1e3, "kB"), Figure("after", after_s, "s")]


def _stack(pid: int | None) -> Figure:
    """Return where py-spy finds a process's main thread, and the depth of its stack."""
    with os.popen(f"'{Path(sys.executable).with_name('py-spy')}' dump --json --nonblocking --pid {pid}") as said:
        threads = json.loads(said.read() or "[]")  # empty: py-spy is not installed or not permitted
    frames = [frame for each in threads if each["os_thread_id"] == pid for frame in each["frames"]]
    where = "".join(f"in {frame['name']}, line {frame['line']}" for frame in frames[:1])
    return Figure(f"py-spy: {where or 'no stack'}", len(frames), "frames")


def _wait(file: Path) -> float:
    """Wait until a file has content, at most ``FLIGHT_S``; return the seconds waited."""
    began = time.monotonic()
    while not (file.exists() and file.stat().st_size) and time.monotonic() < began + FLIGHT_S:
        time.sleep(0.1)
    return time.monotonic() - began
