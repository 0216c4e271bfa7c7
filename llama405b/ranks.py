"""Who this process is among the ranks, and what the ranks tell each other outside of training.

Knows torchrun's environment and process groups; not the model. Ranks count in the order of the hosts file: the
node runner says which rank a host begins with (``LLAMA405B_FIRST_RANK``), since the c10d rendezvous orders hosts
by address and process id instead.
"""

import dataclasses
import datetime
import os
import pickle
import socket
from typing import Any

import torch
import torch.distributed as dist

from llama405b.contract.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place."""

    rank: int
    world: int
    local_rank: int
    host: str  # the name in the hosts file
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def join(device: str, timeout_s: int) -> Ranks:
    """Join the process group: gloo for CPU tensors always, NCCL beside it on CUDA.

    Without torchrun's environment this is a run of one rank.

    Raises:
        UserError: CUDA was asked for and there is none.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError(
            "--parallel.device: cuda was asked for, but torch sees no GPU here; take cpu, or fix the driver"
        )
    use_cuda = cuda and device != "cpu"
    me = place(cuda=use_cuda)
    if use_cuda:
        torch.cuda.set_device(me.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),
        rank=me.rank,
        world_size=me.world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return me


def place(*, cuda: bool = False) -> Ranks:
    """This process's place, from the environment alone."""
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first = os.environ.get("LLAMA405B_FIRST_RANK")
    rank = int(os.environ.get("RANK", 0)) if first is None else int(first) + local_rank
    host = os.environ.get("LLAMA405B_HOST", socket.gethostname())
    return Ranks(rank, world, local_rank, host, torch.device("cuda", local_rank) if cuda else torch.device("cpu"))


def set_timeout(timeout_s: int) -> None:
    """Change the default group's timeout: loading is slow and skewed between ranks, steps are not."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)


def from_rank0(value: Any) -> Any:
    """Give every rank rank 0's ``value`` (a plain Python value, pickled)."""
    return agreed(value)[0]


def agreed(value: Any) -> list[Any]:
    """Give every rank all ranks' values, in order of rank, through CPU memory."""
    if dist.get_world_size() == 1:
        return [value]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [pickle.loads(raw[: int(size)].numpy().tobytes()) for raw, size in zip(everyone, sizes, strict=True)]


def refuse_together(error: UserError | None) -> None:
    """Raise on every rank the error of the lowest rank that has one, so that none waits for a rank that left.

    Raises:
        UserError: Some rank had one.
    """
    for rank, found in enumerate(agreed(error and str(error))):
        if found:
            raise UserError(found if rank == dist.get_rank() else f"stopped with rank {rank}: {found}")


def any_of(mine: bool) -> bool:
    """Whether any rank says so; every rank gets the same answer. Through CPU memory."""
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value`` over all ranks."""
    total = value.clone()
    dist.all_reduce(total)
    return total


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
