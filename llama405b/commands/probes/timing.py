"""How acts on all ranks are timed."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank

GB = 1e9


def now(me: Rank) -> float:
    """Return the time once the device is done, in seconds."""
    if me.on_gpu:
        torch.cuda.synchronize()  # for the time alone: no result depends on it
    return time.monotonic()


def best_s(me: Rank, act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of three passes, after one, which all ranks begin together; the slowest rank's."""
    times = []
    for _ in range(4):
        dist.barrier()
        began = now(me)
        act()
        times.append(now(me) - began)
    [micros] = collectives.all_reduce_max([int(1e6 * min(times[1:])) + 1])
    return micros / 1e6
