"""Who this process is among the ranks, and what the ranks tell each other outside of training.

Knows torchrun's environment and process groups; not the model. Ranks count in the order of the hosts file: the
node runner says which rank a host begins with (``LLAMA405B_FIRST_RANK``), since the c10d rendezvous orders hosts
by address and process id instead.
"""

import dataclasses
import datetime
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from llama405b.axes import DP, SHARD, Axes, Place
from llama405b.contract import reader
from llama405b.contract.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place."""

    rank: int
    world: int
    local_rank: int
    host: str  # the name in the hosts file
    device: torch.device
    attempt: int = 1  # launches of this run so far

    @property
    def axes(self) -> Axes:
        """The mesh of all ranks; today every one of them is a shard."""
        return Axes(dp_shard=self.world)

    @property
    def dp(self) -> Place:
        """Among those that share the batch out."""
        return self.axes.place(self.rank, DP)

    @property
    def shard(self) -> Place:
        """Among those that share each parameter out."""
        return self.axes.place(self.rank, SHARD)

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
    attempt = int(os.environ.get("LLAMA405B_ATTEMPT", 1))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return Ranks(rank, world, local_rank, host, device, attempt)


def set_timeout(timeout_s: int) -> None:
    """Change the default group's timeout: loading is slow and skewed between ranks, steps are not."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)


def from_rank0(record: T) -> T:
    """Give every rank rank 0's ``record``, a dataclass."""
    return agreed(record)[0]


def agreed(record: T) -> list[T]:
    """Give every rank all ranks' records (dataclasses of one type), in order of rank, through CPU memory, as JSON.

    Raises:
        MalformedError: Another rank sent something else.
    """
    if dist.get_world_size() == 1:
        return [record]
    mine = torch.frombuffer(bytearray(reader.dumps(record).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [
        reader.loads(type(record), raw[: int(size)].numpy().tobytes(), f"what rank {rank} sent")
        for rank, (raw, size) in enumerate(zip(everyone, sizes, strict=True))
    ]


class FollowedError(UserError):
    """Another rank refused its input, and so all do."""

    def __init__(self, peer: int, words: str) -> None:
        super().__init__(f"stopped with rank {peer}: {words}")
        self.peer, self.words = peer, words


@dataclasses.dataclass(frozen=True, slots=True)
class _Refusal:
    words: str  # "": this rank has nothing against it


def refuse_together(error: UserError | None) -> None:
    """Raise on every rank the error of the lowest rank that has one, so that none waits for a rank that left.

    Raises:
        UserError: This rank's own.
        FollowedError: Another's.
    """
    for rank, found in enumerate(agreed(_Refusal(str(error) if error else ""))):
        if found.words and rank == dist.get_rank():
            raise UserError(found.words)
        if found.words:
            raise FollowedError(rank, found.words)


def greatest_of(mine: Sequence[int]) -> list[int]:
    """The greatest of all ranks' values, place by place; every rank gets the same. Through CPU memory."""
    values = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [int(value) for value in values]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value`` over all ranks."""
    total = value.clone()
    dist.all_reduce(total)
    return total


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
