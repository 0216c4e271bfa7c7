"""Probes of hosts: matrix products, copies, updates, collectives, links, and rates of a planned run.

Every probe runs on all ranks at once and checks its results where it can. The rates are those that the parts of a planned run attain
alone: a layer, updates, copies, collectives and disks. Predicts nothing.

Bus bandwidths are defined as in nccl-tests (PERFORMANCE.md): all-gather and reduce-scatter S (n-1)/n / t, all-reduce
2 S (n-1)/n / t, for S bytes in total on n ranks.
"""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig

from llama405b.data.batch import Batch
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import allocate_blocks
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.model.attention import attention_candidates, attention_unsupported_reason, model_inputs
from llama405b.model.llama import checkpoint_activations, compute_dtype
from llama405b.optim.optimizer import build_optimizer, update_group
from llama405b.optim.rounding import StochasticRounding
from llama405b.optim.updater import norm_over_ranks, square_sums
from llama405b.predict.run_shape import PredictedRun, StageSpec, UnitSizes
from llama405b.settings.schema import Optimizer
from llama405b.spec.probes import Figure

GB = 1e9
ROW = 4096  # elements of a matrix's rows


def synced_time(rank: Rank) -> float:
    """Wait for the device, then return the monotonic time in seconds."""
    if rank.on_gpu:
        torch.cuda.synchronize()  # for the timing only: no result depends on it
    return time.monotonic()


def best_s(rank: Rank, action: Callable[[], object]) -> float:
    """Return the fastest of three passes in seconds, after a warmup.

    All ranks start together; the slowest rank's time counts.
    """
    times = []
    for _ in range(4):
        dist.barrier()  # so that no rank measures while another one still prepares
        start = synced_time(rank)
        action()
        times.append(synced_time(rank) - start)
    [micros] = collectives.all_reduce_max([int(1e6 * min(times[1:])) + 1])
    return micros / 1e6


UPDATE_BYTES = 28  # per FP32 element: reads weight, gradient and moments; writes all but the gradient
NORM_ERROR = 1e-6  # accepted relative error


def measure_products(rank: Rank) -> list[Figure]:
    """Measure each rank's TFLOP/s of sustained square matrix products (CUDA: BF16, 20 s)."""
    n, seconds, dtype = (8192, 20.0, torch.bfloat16) if rank.on_gpu else (512, 1.0, torch.float32)
    a, b = (torch.randn(n, n, device=rank.device, dtype=dtype) for _ in range(2))
    count, start = 0, synced_time(rank)
    while (elapsed_s := synced_time(rank) - start) < seconds:
        for _ in range(20):
            a @ b
        count += 20
    label = f"rank {rank.index} ({rank.device.type} {rank.local_rank})"
    return collectives.all_gather_objects(Figure(label, 2 * n**3 * count / elapsed_s / 1e12, "TFLOP/s", (rank.host,)))


def measure_copies(rank: Rank) -> list[Figure]:
    """Measure copies in both directions while all ranks copy; each rate is the slowest rank's.

    Pinned: by torch. Registered: allocated first, then pinned as one block, like the states of ``offload = optimizer``.
    """
    n_bytes = n_copied_bytes(rank)
    memory: dict[str, Callable[[], torch.Tensor]] = {
        "pinned": lambda: torch.empty(n_bytes, dtype=torch.uint8, pin_memory=rank.on_gpu),
        "registered": lambda: allocate_registered(rank),
        "pageable": lambda: torch.empty(n_bytes, dtype=torch.uint8),
    }
    figures = []
    for name, make in memory.items():
        start = time.monotonic()
        on_host = make()
        if name == "registered":
            figures.append(Figure("registering", n_bytes / GB / (time.monotonic() - start), "GB/s"))
        rates = measure_copy_rates(rank, on_host.fill_(1))
        figures += [Figure(f"{name} {way}", rate / GB, "GB/s") for way, rate in rates.items()]
    return figures


def n_copied_bytes(rank: Rank) -> int:
    """Return the number of bytes to copy."""
    return (2 << 30) if rank.on_gpu else (32 << 20)


def allocate_registered(rank: Rank) -> torch.Tensor:
    """Allocate and register host memory as a run does for its states."""
    [memory] = allocate_blocks([n_copied_bytes(rank)], rank.device, lambda *_: None)
    if rank.on_gpu and not memory.is_pinned():
        raise RuntimeError("torch does not report registered memory as pinned")
    return memory


def measure_copy_rates(rank: Rank, on_host: torch.Tensor) -> dict[str, float]:
    """Return the bytes/s of copies between the device and host memory, by direction."""
    on_device = torch.empty_like(on_host, device=rank.device)
    ways = {"to device": (on_device, on_host), "to host": (on_host, on_device)}
    return {
        way: on_host.nbytes / best_s(rank, functools.partial(target.copy_, source, non_blocking=True))
        for way, (target, source) in ways.items()
    }


def measure_update(rank: Rank) -> list[Figure]:
    """Time updates and norms of FP32 tensors by number of threads.

    Also checks the norm of 405B's largest tensor against FP64.
    """
    elements, n_longest = (1 << 28, 872_415_232) if rank.on_gpu else (1 << 20, 1 << 22)
    one_update, gradient = build_update(elements), torch.randn(elements)
    figures, max_threads = [], torch.get_num_threads()
    for threads in sorted({1, max(1, max_threads // 4), max(1, max_threads // 2), max_threads}):
        torch.set_num_threads(threads)
        update_s = best_s(rank, one_update)
        norm_s = best_s(rank, lambda: norm_over_ranks(square_sums([gradient]), gradient.device))
        figures += [
            Figure(f"update with {threads}", UPDATE_BYTES * elements / GB / update_s, "GB/s"),
            Figure(f"norm with {threads}", 4 * elements / GB / norm_s, "GB/s"),
        ]
    return [*figures, _norm_error(n_longest)]


def build_update(
    elements: int, device: str = "cpu", dtype: torch.dtype = torch.float32, *, stochastic: bool = False
) -> Callable[[], None]:
    """Return a function that updates so many elements with AdamW.

    By default in host memory, on this rank's threads.
    """
    shape = (elements // ROW, ROW) if stochastic else (elements,)
    weight = torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype))
    gradient = torch.randn_like(weight.data)
    moments = {name: torch.zeros_like(gradient) for name in ("exp_avg", "exp_avg_sq")}
    state = {"step": torch.zeros((), device=device)} | moments
    params = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    rounding = None
    if stochastic:
        rounding = StochasticRounding.from_master(nn.ParameterDict({"weight": weight}), "bf16-stochastic", "adamw")
    return torch.no_grad()(lambda: update_group([weight], [state], [gradient], params, rounding))


def _norm_error(elements: int) -> Figure:
    tensor = torch.randn(elements)
    exact = math.sqrt(float(torch.stack([part.double().square().sum() for part in tensor.split(1 << 20)]).sum()))
    error = abs(norm_over_ranks(square_sums([tensor]), tensor.device) - exact) / exact
    if error > NORM_ERROR:
        raise RuntimeError(f"the norm of {elements:,} elements is off by {error:.1e}")
    return Figure(f"norm of {elements / 1e6:.0f}M off by", error, "")


def measure_first_collective(rank: Rank) -> list[Figure]:
    """Time two all-reduces of one number; in the first the ranks connect."""
    elapsed_s = []
    for _ in range(2):
        start = synced_time(rank)
        one = torch.ones(1, device=rank.device)
        dist.all_reduce(one)
        elapsed_s.append(synced_time(rank) - start)
        _check_result("all-reduce", float(one), float(rank.world_size))
    return [
        Figure("ranks", rank.world_size, ""),
        Figure("first", elapsed_s[0], "s"),
        Figure("then", 1e3 * elapsed_s[1], "ms"),
    ]


def measure_collectives(this_rank: Rank, sizes: Sequence[int] = ()) -> list[Figure]:
    """Measure bus bandwidths at a small and a large size in bytes, and check every result."""
    figures = []
    for total in sizes or ((1 << 20, 1 << 30) if this_rank.on_gpu else (1 << 16, 1 << 22)):
        n = total // 4 // this_rank.world_size
        full, local = (
            torch.empty(n * this_rank.world_size, device=this_rank.device),
            torch.empty(n, device=this_rank.device),
        )
        moved_gb = (this_rank.world_size - 1) / this_rank.world_size * full.nbytes / GB
        local.fill_(this_rank.index + 1)
        gather_s = time_all_gather(this_rank, full, local)
        for rank in range(this_rank.world_size):
            _check_result("all-gather", float(full[n * rank]), rank + 1)
        full.fill_(this_rank.index + 1)
        scatter_s = time_reduce_scatter(this_rank, full, local)
        for extreme in (local.min(), local.max()):
            _check_result("reduce-scatter", float(extreme), this_rank.world_size * (this_rank.world_size + 1) / 2)
        full.fill_(1)
        dist.all_reduce(full)
        _check_result("all-reduce", float(full[-1]), this_rank.world_size)
        reduce_s = best_s(this_rank, functools.partial(dist.all_reduce, full.zero_()))
        figures += [
            Figure("of", full.nbytes / (1 << 20), "MiB"),
            Figure("all-gather", moved_gb / gather_s, "GB/s"),
            Figure("reduce-scatter", moved_gb / scatter_s, "GB/s"),
            Figure("all-reduce", 2 * moved_gb / reduce_s, "GB/s"),
        ]
    return figures


def time_all_gather(rank: Rank, full: torch.Tensor, local: torch.Tensor) -> float:
    """Return the seconds of an all-gather of each rank's part."""
    return best_s(rank, functools.partial(dist.all_gather_into_tensor, full, local))


def time_reduce_scatter(rank: Rank, full: torch.Tensor, local: torch.Tensor) -> float:
    """Return the seconds of a reduce-scatter into each rank's part."""
    return best_s(rank, functools.partial(dist.reduce_scatter_tensor, local, full))


def _check_result(name: str, actual: float, expected: float) -> None:
    if actual != expected:
        raise RuntimeError(f"{name} gives {actual:g} instead of {expected:g}")


def measure_host_links(rank: Rank) -> list[Figure]:
    """Measure GB/s between the first ranks of every two hosts, both directions at once, while all links are busy."""
    hosts = collectives.all_gather_objects(rank.host)
    first_ranks = {host: hosts.index(host) for host in hosts}
    by_rank = collectives.all_gather_objects(list(_measure_links(rank, first_ranks)), list[Figure])
    return [link for links in by_rank for link in links]


def _measure_links(rank: Rank, first_ranks: dict[str, int]) -> Iterator[Figure]:
    """Measure links in a round-robin tournament, one partner per host and round; yield this rank's links."""
    hosts = list(first_ranks)
    count = len(hosts) + len(hosts) % 2
    places = list(range(count))
    host_index = hosts.index(rank.host) if rank.index == first_ranks[rank.host] else -1
    buffer = torch.ones((256 if rank.on_gpu else 8) << 20, dtype=torch.uint8, device=rank.device)
    for _ in range(count - 1):
        dist.barrier()  # all links of a round are busy at the same time
        for a, b in zip(places[: count // 2], reversed(places[count // 2 :]), strict=True):
            if host_index in (a, b) and max(a, b) < len(hosts):
                peer_host = hosts[b if host_index == a else a]
                elapsed_s = _exchange(rank, buffer, first_ranks[peer_host])
                if host_index == min(a, b):
                    yield Figure(
                        f"{rank.host} - {peer_host}", buffer.numel() / elapsed_s / GB, "GB/s", (rank.host, peer_host)
                    )
        places = [places[0], places[-1], *places[1:-1]]


def _exchange(rank: Rank, buffer: torch.Tensor, peer: int) -> float:
    """Return the seconds to send the buffer to a rank while receiving as much; the second of two tries."""
    received, elapsed_s = torch.empty_like(buffer), 0.0
    for _ in range(2):
        start = synced_time(rank)
        both_ways = [dist.P2POp(dist.isend, buffer, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(both_ways):
            work.wait()  # blocks on CPUs only; on GPUs the final time waits for the device
        elapsed_s = synced_time(rank) - start
    return elapsed_s


def measure_rates(rank: Rank, run: PredictedRun, directory: Path) -> list[Figure]:
    """Measure what ``predict.calibration.StandaloneRates`` holds, by its names and in its units; write to the directory."""
    layer_s = best_s(rank, build_layer_pass(run, rank))
    n = (64 << 20) if rank.on_gpu else (4 << 20)  # elements
    on_device, on_host = best_s(rank, build_device_update(n, rank)), best_s(rank, build_update(n))
    return [
        Figure("layer_s", layer_s, "s"),
        Figure("device_update", UPDATE_BYTES * n / on_device, "B/s"),
        Figure("host_update", UPDATE_BYTES * n * run.ranks_per_host / on_host, "B/s"),
        Figure("copies", min(measure_copy_rates(rank, allocate_registered(rank)).values()), "B/s"),
        *measure_unit_collectives(run, rank),
        Figure("disk", measure_disk(directory, run, rank), "B/s"),
    ]


def build_layer_pass(run: PredictedRun, rank: Rank) -> Callable[[], None]:
    """Return a function that runs a layer forward and backward.

    It uses the first attention kernel that works here.
    """
    dtype = compute_dtype(run.numerics)
    *preferred, fallback = [
        name
        for name in attention_candidates(run.attention)
        if not attention_unsupported_reason(name, rank.device, dtype)
    ]
    for kernel in preferred:
        layer_pass = build_layer_with(kernel, run, rank)
        try:
            layer_pass()
        except Exception:  # noqa: BLE001 - an installed kernel that does not fit may raise anything
            continue
        return layer_pass
    return build_layer_with(fallback, run, rank)


def build_layer_with(kernel: str, run: PredictedRun, rank: Rank) -> Callable[[], None]:
    """Build an unsharded decoder layer; return a function that runs it forward and backward.

    With recomputation, over one micro-batch.
    """
    shape, dtype = run.llama, compute_dtype(run.numerics)
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, num_hidden_layers=1, vocab_size=8,
        attention_bias=shape.attention_bias, mlp_bias=shape.mlp_bias, max_position_embeddings=run.seq_len,
    )  # fmt: skip
    model = llama.build_on_meta(config, kernel, dtype).to_empty(device=rank.device)
    llama.restore_buffers(model, config, rank.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=shape.initializer_range)
    checkpoint_activations(model)
    ids = torch.zeros(run.micro_batch, run.seq_len, dtype=torch.int64, device=rank.device)
    inputs = model_inputs(Batch(ids, ids), kernel)
    del inputs["input_ids"]
    hidden_BSH = torch.randn(*ids.shape, shape.hidden, device=rank.device, dtype=dtype, requires_grad=True)

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        model.model(inputs_embeds=hidden_BSH, **inputs).last_hidden_state.sum().backward()

    return forward_backward


def build_device_update(n: int, rank: Rank) -> Callable[[], None]:
    """Return a function that clips and updates ``n`` elements on the device, like a run without offload."""
    module = nn.Linear(1, n, bias=False, device=rank.device)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer = build_optimizer(module, Optimizer())

    def clip_and_update() -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return clip_and_update


def measure_unit_collectives(run: PredictedRun, rank: Rank) -> list[Figure]:
    """Measure an all-gather and a reduce-scatter of a unit, and a small all-gather; 0 with one rank."""
    gather = scatter = hop_s = 0.0
    if rank.world_size > 1:
        dtype = compute_dtype(run.numerics)
        n = UnitSizes.from_spec(StageSpec(run.llama)).layer // (1 + run.has_sublayer_units) // rank.world_size
        full, local = (torch.zeros(size, device=rank.device, dtype=dtype) for size in (n * rank.world_size, n))
        single, gathered = torch.zeros(1, device=rank.device), torch.zeros(rank.world_size, device=rank.device)
        small_s = time_all_gather(rank, gathered, single)
        hop_s = small_s / (rank.world_size - 1)
        latency_s = small_s * (run.hosts > 1)  # the prediction counts latency between hosts separately
        n_moved_bytes = (rank.world_size - 1) / rank.world_size * full.nbytes
        gather, scatter = (
            n_moved_bytes / max(seconds / 2, seconds - latency_s)
            for seconds in (time_all_gather(rank, full, local), time_reduce_scatter(rank, full, local))
        )
    return [Figure("gather", gather, "B/s"), Figure("scatter", scatter, "B/s"), Figure("hop_s", hop_s, "s")]


def measure_disk(directory: Path, run: PredictedRun, rank: Rank) -> float:
    """Return the bytes/s at which all ranks of a host write to a directory, including fsync."""
    block, blocks = os.urandom(1 << 20), 256 if rank.on_gpu else 32
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f".rates-{rank.index}"

    def write_file() -> None:
        with file.open("wb", buffering=0) as stream:
            for _ in range(blocks):
                stream.write(block)
            os.fsync(stream.fileno())

    try:
        return len(block) * blocks * run.ranks_per_host / best_s(rank, write_file)
    finally:
        file.unlink(missing_ok=True)
