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
from llama405b.distributed.host_memory import allocate
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.model.attention import candidates, flash_lack, model_inputs
from llama405b.model.llama import checkpoint_activations, compute_dtype
from llama405b.optim.adamw import Elements, Settings, build_optimizer, update_adamw
from llama405b.optim.updater import norm_over_ranks, squares
from llama405b.predict.run_shape import Part, RunShape, UnitSizes
from llama405b.settings.schema import Optimizer
from llama405b.spec.probes import Figure

GB = 1e9


def now(me: Rank) -> float:
    """Wait for the device, then return the monotonic time in seconds."""
    if me.on_gpu:
        torch.cuda.synchronize()  # for the timing only: no result depends on it
    return time.monotonic()


def best_s(me: Rank, act: Callable[[], object]) -> float:
    """Return the fastest of three passes in seconds, after a warmup.

    All ranks start together; the slowest rank's time counts.
    """
    times = []
    for _ in range(4):
        dist.barrier()  # so that no rank measures while another one still prepares
        began = now(me)
        act()
        times.append(now(me) - began)
    [micros] = collectives.all_reduce_max([int(1e6 * min(times[1:])) + 1])
    return micros / 1e6


UPDATE_BYTES = 28  # per FP32 element: reads weight, gradient and moments; writes all but the gradient
NORM_ERROR = 1e-6  # accepted relative error


def products(me: Rank) -> list[Figure]:
    """Measure each rank's TFLOP/s of sustained square matrix products (CUDA: BF16, 20 s)."""
    n, seconds, dtype = (8192, 20.0, torch.bfloat16) if me.on_gpu else (512, 1.0, torch.float32)
    a, b = (torch.randn(n, n, device=me.device, dtype=dtype) for _ in range(2))
    count, began = 0, now(me)
    while (took := now(me) - began) < seconds:
        for _ in range(20):
            a @ b
        count += 20
    where = f"rank {me.rank} ({me.device.type} {me.local_rank})"
    return collectives.all_gather_objects(Figure(where, 2 * n**3 * count / took / 1e12, "TFLOP/s", (me.host,)))


def copies(me: Rank) -> list[Figure]:
    """Measure copies in both directions while all ranks copy; each rate is the slowest rank's.

    Pinned: by torch. Registered: allocated first, then pinned as one block, like the states of ``offload = optimizer``.
    """
    n_bytes = copied_bytes(me)
    memory: dict[str, Callable[[], torch.Tensor]] = {
        "pinned": lambda: torch.empty(n_bytes, dtype=torch.uint8, pin_memory=me.on_gpu),
        "registered": lambda: registered(me),
        "pageable": lambda: torch.empty(n_bytes, dtype=torch.uint8),
    }
    figures = []
    for name, make in memory.items():
        began = time.monotonic()
        on_host = make()
        if name == "registered":
            figures.append(Figure("registering", n_bytes / GB / (time.monotonic() - began), "GB/s"))
        rates = copy_rates(me, on_host.fill_(1))
        figures += [Figure(f"{name} {way}", rate / GB, "GB/s") for way, rate in rates.items()]
    return figures


def copied_bytes(me: Rank) -> int:
    """Return the number of bytes to copy."""
    return (2 << 30) if me.on_gpu else (32 << 20)


def registered(me: Rank) -> torch.Tensor:
    """Allocate and register host memory as a run does for its states."""
    [memory] = allocate([copied_bytes(me)], me.device, lambda *_: None)
    if me.on_gpu and not memory.is_pinned():
        raise RuntimeError("torch does not report registered memory as pinned")
    return memory


def copy_rates(me: Rank, on_host: torch.Tensor) -> dict[str, float]:
    """Return the bytes/s of copies between the device and host memory, by direction."""
    on_device = torch.empty_like(on_host, device=me.device)
    ways = {"to device": (on_device, on_host), "to host": (on_host, on_device)}
    return {
        way: on_host.nbytes / best_s(me, functools.partial(target.copy_, source, non_blocking=True))
        for way, (target, source) in ways.items()
    }


def update(me: Rank) -> list[Figure]:
    """Time updates and norms of FP32 tensors by number of threads.

    Also checks the norm of 405B's largest tensor against FP64.
    """
    elements, longest = (1 << 28, 872_415_232) if me.on_gpu else (1 << 20, 1 << 22)
    one_update, gradient = update_of(elements), torch.randn(elements)
    figures, most = [], torch.get_num_threads()
    for threads in sorted({1, max(1, most // 4), max(1, most // 2), most}):
        torch.set_num_threads(threads)
        update_s = best_s(me, one_update)
        norm_s = best_s(me, lambda: norm_over_ranks(squares([gradient]), gradient.device))
        figures += [
            Figure(f"update with {threads}", UPDATE_BYTES * elements / GB / update_s, "GB/s"),
            Figure(f"norm with {threads}", 4 * elements / GB / norm_s, "GB/s"),
        ]
    return [*figures, _norm_error(longest)]


def update_of(
    elements: int, device: str = "cpu", dtype: torch.dtype = torch.float32, *, stochastic: bool = False
) -> Callable[[], None]:
    """Return a function that updates so many elements with AdamW.

    By default in host memory, on this rank's threads.
    """
    weight = torch.nn.Parameter(torch.randn(elements, device=device, dtype=dtype))
    gradient = torch.randn_like(weight.data)
    moments = {name: torch.zeros_like(gradient) for name in ("exp_avg", "exp_avg_sq")}
    state = {"step": torch.zeros((), device=device)} | moments
    settings = Settings(1e-5, (0.9, 0.95), 0.1, 1e-8)
    rounded = {id(weight): Elements(7)} if stochastic else None
    return torch.no_grad()(lambda: update_adamw([weight], [state], [gradient], settings, rounded))


def _norm_error(elements: int) -> Figure:
    long = torch.randn(elements)
    exact = math.sqrt(float(torch.stack([part.double().square().sum() for part in long.split(1 << 20)]).sum()))
    error = abs(norm_over_ranks(squares([long]), long.device) - exact) / exact
    if error > NORM_ERROR:
        raise RuntimeError(f"the norm of {elements:,} elements is off by {error:.1e}")
    return Figure(f"norm of {elements / 1e6:.0f}M off by", error, "")


def first_collective(me: Rank) -> list[Figure]:
    """Time two all-reduces of one number; in the first the ranks connect."""
    took = []
    for _ in range(2):
        began = now(me)
        one = torch.ones(1, device=me.device)
        dist.all_reduce(one)
        took.append(now(me) - began)
        _check("all-reduce", float(one), float(me.world))
    return [Figure("ranks", me.world, ""), Figure("first", took[0], "s"), Figure("then", 1e3 * took[1], "ms")]


def checked_collectives(me: Rank, sizes: Sequence[int] = ()) -> list[Figure]:
    """Measure bus bandwidths at a small and a large size in bytes, and check every result."""
    figures = []
    for total in sizes or ((1 << 20, 1 << 30) if me.on_gpu else (1 << 16, 1 << 22)):
        n = total // 4 // me.world
        whole, part = torch.empty(n * me.world, device=me.device), torch.empty(n, device=me.device)
        share = (me.world - 1) / me.world * whole.nbytes / GB
        part.fill_(me.rank + 1)
        gather_s = gather_seconds(me, whole, part)
        for rank in range(me.world):
            _check("all-gather", float(whole[n * rank]), rank + 1)
        whole.fill_(me.rank + 1)
        scatter_s = scatter_seconds(me, whole, part)
        for found in (part.min(), part.max()):
            _check("reduce-scatter", float(found), me.world * (me.world + 1) / 2)
        whole.fill_(1)
        dist.all_reduce(whole)
        _check("all-reduce", float(whole[-1]), me.world)
        reduce_s = best_s(me, functools.partial(dist.all_reduce, whole.zero_()))
        figures += [
            Figure("of", whole.nbytes / (1 << 20), "MiB"),
            Figure("all-gather", share / gather_s, "GB/s"),
            Figure("reduce-scatter", share / scatter_s, "GB/s"),
            Figure("all-reduce", 2 * share / reduce_s, "GB/s"),
        ]
    return figures


def gather_seconds(me: Rank, whole: torch.Tensor, part: torch.Tensor) -> float:
    """Return the seconds of an all-gather of each rank's part."""
    return best_s(me, functools.partial(dist.all_gather_into_tensor, whole, part))


def scatter_seconds(me: Rank, whole: torch.Tensor, part: torch.Tensor) -> float:
    """Return the seconds of a reduce-scatter into each rank's part."""
    return best_s(me, functools.partial(dist.reduce_scatter_tensor, part, whole))


def _check(what: str, found: float, expected: float) -> None:
    if found != expected:
        raise RuntimeError(f"{what} gives {found:g} instead of {expected:g}")


def host_links(me: Rank) -> list[Figure]:
    """Measure GB/s between the first ranks of every two hosts, both directions at once, while all links are busy."""
    hosts = collectives.all_gather_objects(me.host)
    first = {host: hosts.index(host) for host in hosts}
    by_rank = collectives.all_gather_objects(list(_links_of(me, first)), list[Figure])
    return [link for links in by_rank for link in links]


def _links_of(me: Rank, first: dict[str, int]) -> Iterator[Figure]:
    """Measure links in a round-robin tournament, one partner per host and round; yield this rank's links."""
    hosts = list(first)
    count = len(hosts) + len(hosts) % 2
    places = list(range(count))
    mine = hosts.index(me.host) if me.rank == first[me.host] else -1
    buffer = torch.ones((256 if me.on_gpu else 8) << 20, dtype=torch.uint8, device=me.device)
    for _ in range(count - 1):
        dist.barrier()  # all links of a round are busy at the same time
        for a, b in zip(places[: count // 2], reversed(places[count // 2 :]), strict=True):
            if mine in (a, b) and max(a, b) < len(hosts):
                other = hosts[b if mine == a else a]
                took = _exchange(me, buffer, first[other])
                if mine == min(a, b):
                    yield Figure(f"{me.host} - {other}", buffer.numel() / took / GB, "GB/s", (me.host, other))
        places = [places[0], places[-1], *places[1:-1]]


def _exchange(me: Rank, buffer: torch.Tensor, other: int) -> float:
    """Return the seconds to send the buffer to a rank while receiving as much; the second of two tries."""
    into, took = torch.empty_like(buffer), 0.0
    for _ in range(2):
        began = now(me)
        both_ways = [dist.P2POp(dist.isend, buffer, other), dist.P2POp(dist.irecv, into, other)]
        for work in dist.batch_isend_irecv(both_ways):
            work.wait()  # blocks on CPUs only; on GPUs the final time waits for the device
        took = now(me) - began
    return took


def rates(me: Rank, load: RunShape, directory: Path) -> list[Figure]:
    """Measure what ``predict.calibration.Alone`` holds, by its names and in its units; write to the directory."""
    layer_s = best_s(me, layer_pass(load, me))
    n = (64 << 20) if me.on_gpu else (4 << 20)  # elements
    on_device, on_host = best_s(me, device_update(n, me)), best_s(me, update_of(n))
    return [
        Figure("layer_s", layer_s, "s"),
        Figure("device_update", UPDATE_BYTES * n / on_device, "B/s"),
        Figure("host_update", UPDATE_BYTES * n * load.ranks_per_host / on_host, "B/s"),
        Figure("copies", min(copy_rates(me, registered(me)).values()), "B/s"),
        *unit_collectives(load, me),
        Figure("disk", disk(directory, load, me), "B/s"),
    ]


def layer_pass(load: RunShape, me: Rank) -> Callable[[], None]:
    """Return a function that runs a layer forward and backward.

    It uses the first attention kernel that works here.
    """
    dtype = compute_dtype(load.numerics)
    *others, last = [name for name in candidates(load.attention) if not flash_lack(name, me.device, dtype)]
    for kernel in others:
        act = layer_with(kernel, load, me)
        try:
            act()
        except Exception:  # noqa: BLE001 - an installed kernel that does not fit may raise anything
            continue
        return act
    return layer_with(last, load, me)


def layer_with(kernel: str, load: RunShape, me: Rank) -> Callable[[], None]:
    """Build an unsharded decoder layer; return a function that runs it forward and backward.

    With recomputation, over one micro-batch.
    """
    shape, dtype = load.llama, compute_dtype(load.numerics)
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, num_hidden_layers=1, vocab_size=8,
        attention_bias=shape.attention_bias, mlp_bias=shape.mlp_bias, max_position_embeddings=load.seq_len,
    )  # fmt: skip
    model = llama.build_on_meta(config, kernel, dtype).to_empty(device=me.device)
    llama.restore_buffers(model, config, me.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=shape.initializer_range)
    checkpoint_activations(model)
    ids = torch.zeros(load.micro_batch, load.seq_len, dtype=torch.int64, device=me.device)
    inputs = model_inputs(Batch(ids, ids), kernel)
    del inputs["input_ids"]
    hidden_BSH = torch.randn(*ids.shape, shape.hidden, device=me.device, dtype=dtype, requires_grad=True)

    def act() -> None:
        model.zero_grad(set_to_none=True)
        model.model(inputs_embeds=hidden_BSH, **inputs).last_hidden_state.sum().backward()

    return act


def device_update(n: int, me: Rank) -> Callable[[], None]:
    """Return a function that clips and updates ``n`` elements on the device, like a run without offload."""
    module = nn.Linear(1, n, bias=False, device=me.device)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer = build_optimizer(module, Optimizer())

    def act() -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return act


def unit_collectives(load: RunShape, me: Rank) -> list[Figure]:
    """Measure an all-gather and a reduce-scatter of a unit, and a small all-gather; 0 with one rank."""
    gather = scatter = hop_s = 0.0
    if me.world > 1:
        dtype = compute_dtype(load.numerics)
        n = UnitSizes.of(Part(load.llama)).layer // (1 + load.halves) // me.world
        whole, part = (torch.zeros(size, device=me.device, dtype=dtype) for size in (n * me.world, n))
        few, many = torch.zeros(1, device=me.device), torch.zeros(me.world, device=me.device)
        small_s = gather_seconds(me, many, few)
        hop_s = small_s / (me.world - 1)
        latency_s = small_s * (load.hosts > 1)  # the prediction counts latency between hosts separately
        share = (me.world - 1) / me.world * whole.nbytes
        gather, scatter = (
            share / max(seconds / 2, seconds - latency_s)
            for seconds in (gather_seconds(me, whole, part), scatter_seconds(me, whole, part))
        )
    return [Figure("gather", gather, "B/s"), Figure("scatter", scatter, "B/s"), Figure("hop_s", hop_s, "s")]


def disk(directory: Path, load: RunShape, me: Rank) -> float:
    """Return the bytes/s at which all ranks of a host write to a directory, including fsync."""
    block, blocks = os.urandom(1 << 20), 256 if me.on_gpu else 32
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f".rates-{me.rank}"

    def act() -> None:
        with file.open("wb", buffering=0) as into:
            for _ in range(blocks):
                into.write(block)
            os.fsync(into.fileno())

    try:
        return len(block) * blocks * load.ranks_per_host / best_s(me, act)
    finally:
        file.unlink(missing_ok=True)
