"""Time and memory of loading, compared with the usual ways and with plain reading.

Baseline: ``from_pretrained`` on rank 0 in the dtype that is kept, then ``set_model_state_dict(broadcast_from_rank0=True)``. Its
careful form: loaded and sent in BF16, and each rank casts its shards. DCP: ``HuggingFaceStorageReader``. Plain reading: each
rank's rows with ``readinto``, into fresh memory. Each way runs in fresh processes, in rotating order; the median counts. Memory
is rank 0's RssAnon + RssShmem (unreclaimable, unlike mapped file pages), sampled from another process: the peak, less the value
before loading, less the bytes of rank 0's shards.
"""

import collections
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import LlamaForCausalLM

from llama405b.contract.errors import RunError
from llama405b.distributed import ranks
from llama405b.model import llama as model
from llama405b.parallel import fsdp, load_weights
from llama405b.settings.schema import Numerics, Parallel
from llama405b.spec import models
from llama405b.spec.tensors import INDEX_FILE, read_tensors, shard_range

Figures = dict[str, float]  # of one way of loading, by name
GIB = 1 << 30
SAMPLE_S = 0.002
TIMEOUT_S = 600
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 32000,
}  # fmt: skip
FORMS = {
    "streamed": "rank 0 streams each rank its rows",
    "baseline": "from_pretrained + set_model_state_dict",
    "careful": "the same in BF16, shards cast after",
    "local": "each rank reads its own rows",
    "dcp": "the same by torch's DCP",
    "plain": "the same bytes, with readinto",
}
RATIOS = (("streamed", "baseline"), ("streamed", "careful"), ("local", "dcp"), ("local", "plain"))


def bench_load(
    gb: float, n_ranks: int, numerics: Numerics, directory: Path | None, repeat: int, *, cold: bool
) -> tuple[dict[str, Any], str]:
    """Write a BF16 checkpoint of ``gb`` x 10^9 bytes, load it in each way, and compare.

    ``cold``: drop the files from the page cache before each, with ``POSIX_FADV_DONTNEED``.
    """
    with contextlib.ExitStack() as leaving:
        scratch = directory or Path(leaving.enter_context(tempfile.TemporaryDirectory(prefix="llama405b-bench-")))
        llama = write_random(scratch, gb)
        file_bytes = sum(info.n_bytes for info in read_tensors(scratch).values())
        forms, tries = list(FORMS), collections.defaultdict[str, list[Figures]](list)
        for first in range(repeat):
            for form in forms[first % len(forms) :] + forms[: first % len(forms)]:
                if cold:
                    _forget(scratch)
                tries[form].append(_measure(form, scratch, n_ranks, numerics))
        results = {form: _median(tries[form]) for form in FORMS}
    dtype = fsdp.shard_dtype(Parallel(numerics=numerics))
    unit = largest_unit(llama) * dtype.itemsize
    report = {
        "checkpoint_bytes": file_bytes,
        "ranks": n_ranks,
        "numerics": numerics,
        "largest_unit_bytes": unit,
        "forms": results,
        "repeat": repeat,
        "cold": cold,
        "ratios": {f"{ours}/{other}": results[ours]["seconds"] / results[other]["seconds"] for ours, other in RATIOS},
        "torch": torch.__version__,
    }
    lines = [
        f"checkpoint {file_bytes / 1e9:.2f} GB in BF16, {n_ranks} ranks (gloo, CPU), kept in {dtype}, "
        f"largest unit {unit / GIB:.3f} GiB, page cache {'cold' if cold else 'warm'}, median of {repeat}, torch {torch.__version__}",
        f"{'form':40} {'seconds':>8} {'rank 0 peak above its shards':>29} {'in largest units':>17}",
    ]
    for form, found in results.items():
        above = found["peak_above_shards_bytes"]
        lines.append(f"{FORMS[form]:40} {found['seconds']:8.2f} {above / GIB:25.3f} GiB {above / unit:17.1f}")
    lines += [
        f"seconds of {ours} / {other}: {ratio:.2f}"
        for (ours, other), ratio in zip(RATIOS, report["ratios"].values(), strict=True)
    ]
    return report, "\n".join(lines)


def _median(tries: Sequence[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in tries) for name in tries[0]}


def _forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_random(directory: Path, gb: float) -> models.Llama:
    """Write a Llama of about ``gb`` x 10^9 bytes: config.json, BF16 shards, index."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, **SHAPE}
    one = models.parse_llama(config | {"num_hidden_layers": 1}, "bench")
    two = models.parse_llama(config | {"num_hidden_layers": 2}, "bench")
    each = two.parameters - one.parameters
    n_layers = max(1, round((gb * 1e9 / 2 - (one.parameters - each)) / each))
    config["num_hidden_layers"] = n_layers
    (directory / "config.json").write_text(json.dumps(config))
    llama = models.parse_llama(config, "bench")
    torch.manual_seed(0)
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in llama.tensors().items():
        groups.setdefault(f"model-{_unit(name)}.safetensors", {})[name] = shape
    for file, shapes in groups.items():
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for name, shape in shapes.items()}
        save_file(tensors, directory / file, {"format": "pt"})
    index = {name: file for file, shapes in groups.items() for name in shapes}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return llama


def largest_unit(llama: models.Llama) -> int:
    """Count the parameters of the largest FSDP unit: a decoder layer, the embedding, or the head with its norm."""
    sizes: dict[str, int] = collections.Counter()
    for name, shape in llama.tensors().items():
        sizes[_unit(name)] += math.prod(shape)
    return max(sizes.values())


def _unit(name: str) -> str:
    if ".layers." in name:
        return name.split(".")[2]
    return "embedding" if "embed" in name else "head"


def _measure(form: str, directory: Path, n_ranks: int, numerics: Numerics) -> Figures:
    """Load in one way on fresh ranks; returns rank 0's figures."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:
        processes = [
            context.Process(target=_rank, args=(rank, n_ranks, meeting, form, directory, numerics, results))
            for rank in range(n_ranks)
        ]
        for process in processes:
            process.start()
        found = _first_result(results, processes)
        for process in processes:
            process.join(30 if found else 0)
            process.kill()
    if not found:
        raise RunError(f"load: the ranks of {form!r} failed or took over {TIMEOUT_S} s; see their output above")
    return found


def _first_result(results: "Queue[Figures]", processes: Sequence[BaseProcess]) -> Figures:
    """Rank 0's figures; empty if a rank fails or time runs out."""
    deadline = time.monotonic() + TIMEOUT_S
    while results.empty() and time.monotonic() < deadline and not any(process.exitcode for process in processes):
        time.sleep(0.05)
    if results.empty():
        return {}
    return results.get()


def _rank(
    rank: int, n_ranks: int, meeting: str, form: str, directory: Path, numerics: Numerics, results: "Queue[Figures]"
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=n_ranks)
    me = ranks.Rank(rank, n_ranks, rank, f"rank-{rank}", torch.device("cpu"))
    config = model.read_hf_config(directory)
    parallel = Parallel(numerics=numerics)
    master = fsdp.shard_dtype(parallel)
    module = model.build_on_meta(config, "sdpa", torch.bfloat16 if form == "careful" else master)
    fsdp.shard_model(module, parallel, me.device)
    dist.barrier()  # do not count the connections and buffers of the first collective
    with _Peak() as peak:
        began = time.perf_counter()
        if form in ("streamed", "local"):
            load_weights.load(module, directory, {"streamed": "rank0"}.get(form, form), me, lambda *_: None)
        elif form == "plain":
            read = _read_plainly(directory, me)
        elif form == "dcp":
            load_weights.materialize(module, me)
            dcp.load(module.state_dict(), storage_reader=HuggingFaceStorageReader(str(directory)))
        else:
            _baseline(module, directory, me, torch.bfloat16 if form == "careful" else master)
            module.to(master)
        dist.barrier()
        seconds = time.perf_counter() - began
    shards = read if form == "plain" else sum(p.data.to_local().nbytes for p in module.parameters())
    if me.is_rank0:
        results.put({"seconds": seconds, "shard_bytes": shards, "peak_above_shards_bytes": peak.above - shards})
    ranks.leave_process_group()


def _baseline(module: Any, directory: Path, me: ranks.Rank, dtype: torch.dtype) -> None:
    whole = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).state_dict() if me.is_rank0 else {}
    load_weights.materialize(module, me)
    set_model_state_dict(module, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def _read_plainly(directory: Path, me: ranks.Rank) -> int:
    """Read this rank's rows of every tensor into fresh memory; returns how many bytes that were."""
    pieces = []
    for info in read_tensors(directory).values():
        row_bytes = info.n_bytes // info.shape[0]
        start, stop = shard_range(info.shape[0], me.index, me.world_size)
        pieces.append(np.empty((stop - start) * row_bytes, dtype=np.uint8))
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset + start * row_bytes)
            view = pieces[-1].data
            while view:
                view = view[file.readinto(view) :]
    return sum(piece.nbytes for piece in pieces)


class _Peak:
    """Samples this process's unreclaimable memory from another process."""

    def __enter__(self) -> "_Peak":
        context = multiprocessing.get_context("spawn")
        self.above = 0
        self.mine, theirs = context.Pipe()
        self.sampler = context.Process(target=_sample, args=(os.getpid(), theirs), daemon=True)
        self.sampler.start()
        self.mine.recv()  # it is sampling
        return self

    def __exit__(self, *exc: object) -> None:
        self.mine.send("stop")
        self.above = self.mine.recv()
        self.sampler.join()


def _sample(pid: int, pipe: Any) -> None:
    before = peak = unreclaimable_bytes(pid)
    pipe.send("ready")
    while not pipe.poll(SAMPLE_S):
        peak = max(peak, unreclaimable_bytes(pid))
    pipe.send(peak - before)


def unreclaimable_bytes(pid: int) -> int:
    """Return RssAnon + RssShmem of a process, from /proc/<pid>/status (proc(5): in kB)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
