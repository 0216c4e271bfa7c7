"""The first rungs: a collective, all collectives with their results checked, and copies between device and host."""

import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from llama405b.commands.checkup import best_of, now
from llama405b.contract.rungs import Figure
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import allocate
from llama405b.distributed.ranks import Rank

GB = 1e9


def first_collective(me: Rank) -> list[Figure]:
    """Reduce one number over all ranks, twice: the first time the ranks connect.

    Raises:
        RuntimeError: The sum is wrong.
    """
    took = []
    for _ in range(2):
        began = now(me)
        one = torch.ones(1, device=me.device)
        dist.all_reduce(one)
        took.append(now(me) - began)
        _check("all-reduce", float(one), float(me.world))
    return [Figure("ranks", me.world, ""), Figure("first", took[0], "s"), Figure("then", 1e3 * took[1], "ms")]


def checked_collectives(me: Rank, sizes: Sequence[int] = ()) -> list[Figure]:
    """Measure bus bandwidths (as nccl-tests define them) at a small and at a large size, and check every result.

    Raises:
        RuntimeError: A result is wrong.
    """
    figures = []
    for total in sizes or ((1 << 20, 1 << 30) if me.on_gpu else (1 << 16, 1 << 22)):
        n = total // 4 // me.world
        whole, part = torch.empty(n * me.world, device=me.device), torch.empty(n, device=me.device)
        share = (me.world - 1) / me.world * whole.nbytes / GB
        part.fill_(me.rank + 1)
        gather_s = best_of(me, functools.partial(dist.all_gather_into_tensor, whole, part))
        for rank in range(me.world):
            _check("all-gather", float(whole[n * rank]), rank + 1)
        whole.fill_(me.rank + 1)
        scatter_s = best_of(me, functools.partial(dist.reduce_scatter_tensor, part, whole))
        for found in (part.min(), part.max()):
            _check("reduce-scatter", float(found), me.world * (me.world + 1) / 2)
        whole.fill_(1)
        dist.all_reduce(whole)
        _check("all-reduce", float(whole[-1]), me.world)
        reduce_s = best_of(me, functools.partial(dist.all_reduce, whole.zero_()))
        figures += [
            Figure(f"of {whole.nbytes / (1 << 20):.3g} MiB: all-gather", share / gather_s, "GB/s"),
            Figure("reduce-scatter", share / scatter_s, "GB/s"),
            Figure("all-reduce", 2 * share / reduce_s, "GB/s"),
        ]
    return figures


def _check(what: str, found: float, expected: float) -> None:
    if found != expected:
        raise RuntimeError(f"{what} gives {found:g} instead of {expected:g}")


def copy_rates(me: Rank) -> list[Figure]:
    """Measure copies both ways while all ranks copy; each rate is the slowest rank's.

    Pinned: by torch; registered: allocated first, then pinned in one piece, as the states of ``offload = optimizer`` are.
    """
    n_bytes = (2 << 30) if me.on_gpu else (32 << 20)
    on_device = torch.empty(n_bytes, dtype=torch.uint8, device=me.device)
    memory: dict[str, Callable[[], torch.Tensor]] = {
        "pinned": lambda: torch.empty(n_bytes, dtype=torch.uint8, pin_memory=me.on_gpu),
        "registered": lambda: allocate([n_bytes], me.device, lambda *_: None)[0],
        "pageable": lambda: torch.empty(n_bytes, dtype=torch.uint8),
    }
    figures = []
    for name, make in memory.items():
        began = time.monotonic()
        on_host = make()
        if name == "registered" and me.on_gpu and not on_host.is_pinned():
            raise RuntimeError("torch does not see that registered memory is pinned")
        if name == "registered":
            figures.append(Figure("registering", n_bytes / GB / (time.monotonic() - began), "GB/s"))
        on_host.fill_(1)
        for way, target, source in (("to device", on_device, on_host), ("to host", on_host, on_device)):
            seconds = best_of(me, functools.partial(target.copy_, source, non_blocking=True))
            [slowest_us] = collectives.all_reduce_max([int(1e6 * seconds) + 1])
            figures.append(Figure(f"{name} {way}", n_bytes / GB / (slowest_us / 1e6), "GB/s"))
    return figures
