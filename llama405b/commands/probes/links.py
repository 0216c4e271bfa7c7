"""What joins ranks: collectives with their results checked, and the links of every two hosts.

Bus bandwidths are defined as in nccl-tests (PERFORMANCE.md): all-gather and reduce-scatter S (n-1)/n / t, all-reduce
2 S (n-1)/n / t, for S bytes in total on n ranks.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from llama405b.commands.probes.timing import GB, best_s, now
from llama405b.contract.probes import Figure
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank


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
    """Measure bus bandwidths at a small and at a large size, in bytes, and check every result.

    Raises:
        RuntimeError: A result is wrong.
    """
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
    """Time an all-gather of each rank's part."""
    return best_s(me, functools.partial(dist.all_gather_into_tensor, whole, part))


def scatter_seconds(me: Rank, whole: torch.Tensor, part: torch.Tensor) -> float:
    """Time a reduce-scatter into each rank's part."""
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
    """Take part in a round-robin tournament, in which each host has one partner per round; yields this rank's links."""
    hosts = list(first)
    count = len(hosts) + len(hosts) % 2
    places = list(range(count))
    mine = hosts.index(me.host) if me.rank == first[me.host] else -1
    buffer = torch.ones((256 if me.on_gpu else 8) << 20, dtype=torch.uint8, device=me.device)
    for _ in range(count - 1):
        dist.barrier()
        for a, b in zip(places[: count // 2], reversed(places[count // 2 :]), strict=True):
            if mine in (a, b) and max(a, b) < len(hosts):
                other = hosts[b if mine == a else a]
                took = _exchange(me, buffer, first[other])
                if mine == min(a, b):
                    yield Figure(f"{me.host} - {other}", buffer.numel() / took / GB, "GB/s", (me.host, other))
        places = [places[0], places[-1], *places[1:-1]]


def _exchange(me: Rank, buffer: torch.Tensor, other: int) -> float:
    """Seconds to send the buffer to a rank while receiving as much; the second of two attempts."""
    into, took = torch.empty_like(buffer), 0.0
    for _ in range(2):
        began = now(me)
        both_ways = [dist.P2POp(dist.isend, buffer, other), dist.P2POp(dist.irecv, into, other)]
        for work in dist.batch_isend_irecv(both_ways):
            work.wait()  # on CPUs; on GPUs the clock waits for the device
        took = now(me) - began
    return took
