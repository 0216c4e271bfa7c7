"""Who this process is among the ranks, and what the ranks tell each other outside of training.

Knows torchrun's environment and process groups; not the model. Ranks count in the order of the hosts file: the
node runner says which rank a host begins with (``LLAMA405B_FIRST_RANK``), since the c10d rendezvous orders hosts
by address and process id instead.
"""

import contextlib
import dataclasses
import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llama405b.axes import DP, SHARD, Axes, Place
from llama405b.contract import reader
from llama405b.contract.errors import UserError

T = TypeVar("T")


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
    def on_gpu(self) -> bool:
        """Whether it computes on one."""
        return self.device.type == "cuda"

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
    me = place(cuda=cuda and device != "cpu")
    if me.on_gpu:
        torch.cuda.set_device(me.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if me.on_gpu else "gloo",
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


def from_rank0(value: T, kind: Any = None) -> T:
    """Give every rank rank 0's value; see ``agreed``."""
    return agreed(value, kind)[0]


def agreed(value: T, kind: Any = None) -> list[T]:
    """Give every rank all ranks' values, in order of rank, through CPU memory, as JSON.

    ``kind``: their type, where it is no dataclass or plain type, but like ``dict[str, int]``.

    Raises:
        MalformedError: Another rank sent something else.
    """
    if dist.get_world_size() == 1:
        return [value]
    mine = torch.frombuffer(bytearray(reader.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [
        reader.loads(kind or type(value), raw[: int(size)].numpy().tobytes(), f"what rank {rank} sent")
        for rank, (raw, size) in enumerate(zip(everyone, sizes, strict=True))
    ]


class FollowedError(UserError):
    """Another rank refused its input, and so all do."""

    def __init__(self, peer: int, words: str) -> None:
        super().__init__(f"stopped with rank {peer}: {words}")
        self.peer, self.words = peer, words


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """What any rank refuses inside, all refuse, with the words of the lowest of them, so that none waits for one that left.

    Raises:
        UserError: This rank's own.
        FollowedError: Another's.
    """
    error = ""
    try:
        yield
    except UserError as found:
        error = str(found)
    for rank, words in enumerate(agreed(error)):
        if words and rank == dist.get_rank():
            raise UserError(words)
        if words:
            raise FollowedError(rank, words)


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
