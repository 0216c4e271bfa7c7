"""This process's place among the ranks, and what the ranks exchange outside of training.

Knows torchrun's environment and process groups; not the model. Ranks follow the order of the hosts file: the node
runner sets each host's first rank (``LLAMA405B_FIRST_RANK``), because the c10d rendezvous orders hosts by address
and process id.
"""

import contextlib
import dataclasses
import datetime
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llama405b.axes import DP, SHARD, Axes, Place
from llama405b.contract import reader
from llama405b.contract.errors import UserError

T = TypeVar("T")
WORKING_S = 1.0  # how often rank 0 tells those that wait for it that it is working


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    world: int
    local_rank: int
    host: str  # the name in the hosts file
    device: torch.device
    attempt: int = 1  # launches of this run so far

    @property
    def axes(self) -> Axes:
        """The mesh of all ranks; for now each rank is a shard."""
        return Axes(dp_shard=self.world)

    @property
    def dp(self) -> Place:
        """Place among the ranks that split the batch."""
        return self.axes.place(self.rank, DP)

    @property
    def shard(self) -> Place:
        """Place among the ranks that shard each parameter."""
        return self.axes.place(self.rank, SHARD)

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


# What torch reads when CUDA and NCCL begin, unless the user has set it: less fragmentation; and when a collective times out,
# a record of the last ones (in /tmp, where torch puts it).
CUDA_ENV = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its older name
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
OLDER = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


def join(device: str, timeout_s: int) -> Ranks:
    """Join the process group: gloo for CPU tensors, and on CUDA also NCCL.

    Without torchrun's environment this is a run of one rank.

    Raises:
        UserError: CUDA was requested and is not available.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("--parallel.device: cuda was requested, but torch sees no GPU; use cpu, or fix the driver")
    me = place(cuda=cuda and device != "cpu")
    if me.on_gpu:
        for name, value in CUDA_ENV.items():
            if OLDER.get(name, name) not in os.environ:
                os.environ.setdefault(name, value)
        torch.cuda.set_device(me.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if me.on_gpu else "gloo",
        store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),
        rank=me.rank,
        world_size=me.world,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=me.device if me.on_gpu else None,  # or each peer of a send gets an NCCL communicator of its own
    )
    return me


def place(*, cuda: bool = False) -> Ranks:
    """Read this process's place from the environment alone."""
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first = os.environ.get("LLAMA405B_FIRST_RANK")
    rank = int(os.environ.get("RANK", 0)) if first is None else int(first) + local_rank
    host = os.environ.get("LLAMA405B_HOST", socket.gethostname())
    attempt = int(os.environ.get("LLAMA405B_ATTEMPT", 1))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return Ranks(rank, world, local_rank, host, device, attempt)


def set_timeout(timeout_s: int) -> None:
    """Change the default group's timeout: loading is slow and uneven between ranks, steps are not."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)


def from_rank0(value: T, kind: Any = None, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on every rank; see ``from_rank``."""
    return from_rank(0, value, kind, group)


def from_rank(rank: int, value: T, kind: Any = None, group: dist.ProcessGroup | None = None) -> T:
    """Return one rank's value on every rank: one broadcast, where ``agreed`` would hold a copy for each rank.

    ``kind``, ``group``: see ``agreed``.

    Raises:
        MalformedError: That rank sent something else.
    """
    if dist.get_world_size() == 1:
        return value
    own = reader.dumps(value).encode() if dist.get_rank() == rank else b""
    return reader.loads(kind or type(value), bytes_from(rank, own, group), f"what rank {rank} sent")


def agreed(value: T, kind: Any = None, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return all ranks' values, by rank, on every rank; sent as JSON through CPU memory.

    ``kind``: their type, needed if it is generic, like ``dict[str, int]``. ``group``: of all ranks, for what happens beside
    training; None: the default one.

    Raises:
        MalformedError: Another rank sent something else.
    """
    if dist.get_world_size() == 1:
        return [value]
    mine = torch.frombuffer(bytearray(reader.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(everyone, padded, group)
    return [
        reader.loads(kind or type(value), raw[: int(size)].numpy().tobytes(), f"what rank {rank} sent")
        for rank, (raw, size) in enumerate(zip(everyone, sizes, strict=True))
    ]


def bytes_from(rank: int, content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Return one rank's bytes on every rank; sent through CPU memory."""
    size = torch.tensor([len(content)])
    dist.broadcast(size, rank, group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == rank and content:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if int(size):
        dist.broadcast(buffer, rank, group)
    return buffer.numpy().tobytes()


class FollowedError(UserError):
    """Another rank refused its input, so all ranks stop."""

    def __init__(self, peer: int, words: str) -> None:
        super().__init__(f"stopped with rank {peer}: {words}")
        self.peer, self.words = peer, words


@contextlib.contextmanager
def refusing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If any rank refuses inside, all do, with the message of the lowest such rank, so that none waits for one that left.

    ``group``: see ``agreed``.

    Raises:
        UserError: This rank refused.
        FollowedError: Another rank refused.
    """
    error = ""
    try:
        yield
    except UserError as found:
        error = str(found)
    for rank, words in enumerate(agreed(error, group=group)):
        if words and rank == dist.get_rank():
            raise UserError(words)
        if words:
            raise FollowedError(rank, words)


@contextlib.contextmanager
def waiting_for_rank0(alive: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Let rank 0 work for as long as it takes: no collective blocks longer than one piece of its work.

    Rank 0 calls what it gets between the pieces. The others call ``alive`` meanwhile, and enter when it has left.
    """
    if dist.get_rank() != 0:
        while any(greatest_of([0])):
            alive()
        yield lambda: None
        return
    told = time.monotonic()

    def still_working() -> None:
        nonlocal told
        if time.monotonic() - told >= WORKING_S:
            greatest_of([1])
            told = time.monotonic()

    try:
        yield still_working
    finally:
        greatest_of([0])


def greatest_of(mine: Sequence[int]) -> list[int]:
    """Return the maximum over all ranks of each value, on every rank. Uses CPU memory."""
    values = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [int(value) for value in values]


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value`` over all ranks, on every rank."""
    total = value.clone()
    dist.all_reduce(total)
    return total


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
