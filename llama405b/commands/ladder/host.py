"""The rung of the host's cores: AdamW and the gradient norm by number of threads."""

import math
import time
from collections.abc import Callable

import torch

from llama405b.contract.rungs import Figure
from llama405b.distributed.ranks import Rank
from llama405b.optim.adamw import Settings, update_adamw
from llama405b.optim.norm import norm_over_ranks

UPDATE_BYTES = 28  # per element: weight, gradient and moments read, all but the gradient written
NORM_ERROR = 1e-6  # relative, that is accepted
PASSES = 3


def update(me: Rank) -> list[Figure]:
    """Time updates and norms of FP32 tensors by threads; compare the norm of the largest tensor of 405B with FP64.

    Raises:
        RuntimeError: The norm is wrong.
    """
    elements, longest = (1 << 28, 872_415_232) if me.on_gpu else (1 << 20, 1 << 22)
    return [*_speeds(elements), _norm_error(longest)]


def _speeds(elements: int) -> list[Figure]:
    weight, gradient = torch.nn.Parameter(torch.randn(elements)), torch.randn(elements)
    state = {"step": torch.zeros(())} | {name: torch.zeros(elements) for name in ("exp_avg", "exp_avg_sq")}
    settings = Settings(1e-5, (0.9, 0.95), 0.1, 1e-8)

    @torch.no_grad()
    def one_update() -> None:
        update_adamw([weight], [state], [gradient], settings)

    figures, most = [], torch.get_num_threads()
    for threads in sorted({1, max(1, most // 4), max(1, most // 2), most}):
        torch.set_num_threads(threads)
        for name, act, n_bytes in (
            ("update", one_update, UPDATE_BYTES * elements),
            ("norm", lambda: norm_over_ranks([gradient]), 4 * elements),
        ):
            figures.append(Figure(f"{name} with {threads}", n_bytes / 1e9 / _best_s(act), "GB/s"))
    return figures


def _norm_error(elements: int) -> Figure:
    long = torch.randn(elements)
    exact = math.sqrt(float(torch.stack([part.double().square().sum() for part in long.split(1 << 20)]).sum()))
    error = abs(norm_over_ranks([long]) - exact) / exact
    if error > NORM_ERROR:
        raise RuntimeError(f"the norm of {elements:,} elements is off by {error:.1e}")
    return Figure(f"norm of {elements / 1e6:.0f}M off by", error, "")


def _best_s(act: Callable[[], object]) -> float:
    times = []
    for _ in range(PASSES):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)
