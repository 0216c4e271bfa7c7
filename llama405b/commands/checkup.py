"""What ``doctor --deep`` runs on every rank: matrix products on each device, links between hosts, and collectives.

Rank 0 prints lines of ``checkup {json}``; the last one has the devices. Knows collectives and clocks; judges nothing.
Bus bandwidths are defined as in nccl-tests (PERFORMANCE.md): all-gather S (n-1)/n / t, all-reduce 2 S (n-1)/n / t,
for S bytes in total on n ranks.
"""

import functools
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from llama405b.contract import reader
from llama405b.contract.checkup import SIGN, Checkup, HostLink, RankSpeed
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank

TIMEOUT_S = 300
LINKS_A_LINE = 500


def main() -> int:
    """Measure, and print on rank 0."""
    me = ranks.join("auto", TIMEOUT_S)
    flops = burn(me)
    everyone = collectives.all_gather_objects(RankSpeed(me.rank, me.host, me.local_rank, flops))
    hosts = list(dict.fromkeys(device.host for device in everyone))
    first = {device.host: device.rank for device in reversed(everyone)}
    links = [
        link
        for part in collectives.all_gather_objects(Checkup(links=tuple(pairs(me, hosts, first))))
        for link in part.links
    ]
    gather, reduce = measure_collectives(me)
    if me.is_rank0:
        for begin in range(0, len(links), LINKS_A_LINE):
            _say(Checkup(links=tuple(links[begin : begin + LINKS_A_LINE])))
        _say(Checkup((), me.device.type, tuple(everyone), gather, reduce))
    ranks.leave()
    return 0


def _say(part: Checkup) -> None:
    print(SIGN + reader.dumps(part), flush=True)


def burn(me: Rank) -> float:
    """Measure the TFLOP/s of sustained square matrix products (CUDA: BF16, 20 s)."""
    n, seconds, dtype = (8192, 20.0, torch.bfloat16) if me.on_gpu else (512, 1.0, torch.float32)
    a, b = (torch.randn(n, n, device=me.device, dtype=dtype) for _ in range(2))
    products, began = 0, now(me)
    while (took := now(me) - began) < seconds:
        for _ in range(20):
            a @ b
        products += 20
    return 2 * n**3 * products / took / 1e12


def pairs(me: Rank, hosts: list[str], first: dict[str, int]) -> list[HostLink]:
    """Measure GB/s between the first ranks of every two hosts, both directions at once, while all links are busy."""
    count = len(hosts) + len(hosts) % 2
    places = list(range(count))
    mine = hosts.index(me.host) if me.rank == first[me.host] else -1
    buffer = torch.ones((256 if me.on_gpu else 8) << 20, dtype=torch.uint8, device=me.device)
    found: list[HostLink] = []
    for _ in range(count - 1):  # a round-robin tournament: each host has one partner per round
        dist.barrier()
        for a, b in zip(places[: count // 2], reversed(places[count // 2 :]), strict=True):
            if mine in (a, b) and max(a, b) < len(hosts):
                other = b if mine == a else a
                took = _exchange(me, buffer, first[hosts[other]])
                if mine == min(a, b):
                    found.append(HostLink(hosts[mine], hosts[other], buffer.numel() / took / 1e9))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def _exchange(me: Rank, buffer: torch.Tensor, other: int) -> float:
    """Seconds to send the buffer to a rank while receiving as much; the second of two attempts."""
    into, took = torch.empty_like(buffer), 0.0
    for _ in range(2):
        began = now(me)
        both_ways = [dist.P2POp(dist.isend, buffer, other), dist.P2POp(dist.irecv, into, other)]
        for work in dist.batch_isend_irecv(both_ways):
            work.wait()
        took = now(me) - began
    return took


def measure_collectives(me: Rank) -> tuple[float, float]:
    """Measure the bus bandwidth of an all-gather and an all-reduce over all ranks, in GB/s."""
    total = (1 << 30) if me.on_gpu else (16 << 20)
    each = total // 4 // me.world
    part = torch.ones(each, device=me.device)
    whole = torch.empty(each * me.world, device=me.device)
    share = (me.world - 1) / me.world * whole.numel() * 4 / 1e9

    gather_s = best_of(me, functools.partial(dist.all_gather_into_tensor, whole, part))
    return share / gather_s, 2 * share / best_of(me, functools.partial(dist.all_reduce, whole))


def best_of(me: Rank, do: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three passes, after one, which all ranks begin together."""
    times = []
    for _ in range(4):
        dist.barrier()
        began = now(me)
        do()
        times.append(now(me) - began)
    return max(1e-9, min(times[1:]))


def now(me: Rank) -> float:
    """Return the time once the device is done, in seconds."""
    if me.on_gpu:
        torch.cuda.synchronize()
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
