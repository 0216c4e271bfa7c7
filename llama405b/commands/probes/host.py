"""What a rank's device and its host do: matrix products, copies between them, AdamW and the gradient norm on the cores."""

import functools
import math
import time
from collections.abc import Callable

import torch

from llama405b.commands.probes.timing import GB, best_s, now
from llama405b.contract.probes import Figure
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import allocate
from llama405b.distributed.ranks import Rank
from llama405b.optim.adamw import Settings, update_adamw
from llama405b.optim.norm import norm_over_ranks, squares
from llama405b.optim.stochastic import Elements

UPDATE_BYTES = 28  # per element of FP32: weight, gradient and moments read, all but the gradient written
NORM_ERROR = 1e-6  # relative, that is accepted


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
    """Measure copies both ways while all ranks copy; each rate is the slowest rank's.

    Pinned: by torch; registered: allocated first, then pinned in one piece, as the states of ``offload = optimizer`` are.
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
    """Return how much is copied."""
    return (2 << 30) if me.on_gpu else (32 << 20)


def registered(me: Rank) -> torch.Tensor:
    """Allocate memory as a run does for its states, and register it.

    Raises:
        RuntimeError: It is not pinned.
    """
    [memory] = allocate([copied_bytes(me)], me.device, lambda *_: None)
    if me.on_gpu and not memory.is_pinned():
        raise RuntimeError("torch does not see that registered memory is pinned")
    return memory


def copy_rates(me: Rank, on_host: torch.Tensor) -> dict[str, float]:
    """Measure copies between the device and host memory, each way; returns bytes/s."""
    on_device = torch.empty_like(on_host, device=me.device)
    ways = {"to device": (on_device, on_host), "to host": (on_host, on_device)}
    return {
        way: on_host.nbytes / best_s(me, functools.partial(target.copy_, source, non_blocking=True))
        for way, (target, source) in ways.items()
    }


def update(me: Rank) -> list[Figure]:
    """Time updates and norms of FP32 tensors by threads; compare the norm of the largest tensor of 405B with FP64.

    Raises:
        RuntimeError: The norm is wrong.
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
    """Return what updates so many elements: in host memory, on this rank's threads."""
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
