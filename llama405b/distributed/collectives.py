"""What the ranks exchange outside of training, and the errors of other ranks.

Errors of another rank: one that refused its input, and one that went away. Then its message matters, not this one's.

The only place that parses messages of gloo, NCCL and torch's store; ``tests/data/foreign/lost-peer`` has recordings.

What the ranks exchange outside of training: values, refusals, sums; through CPU memory. Knows process groups; not the model.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llama405b.contract import reader
from llama405b.contract.errors import UserError

SIGNS = (  # parts of messages that occur in no other message
    "Connection closed by peer",  # gloo
    "Connection reset",  # gloo, torch's store
    "Broken pipe",  # gloo, torch's store
    "Timed out waiting",  # gloo, if a peer is silent
    "Socket Timeout",  # torch's store
    "wait timeout after",  # torch's store, if nobody came
    "timed out",  # NCCL's watchdog, torch's store
)


def says_lost_peer(message: str) -> bool:
    """Return whether a message is of a known form."""
    return any(sign in message for sign in SIGNS)


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error means that a peer went away, by its type or message."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError) or says_lost_peer(
        str(error)
    )


class FollowedError(UserError):
    """Another rank refused its input, so all ranks stop."""

    def __init__(self, peer: int, words: str) -> None:
        super().__init__(f"rank {peer} failed: {words}")
        self.peer, self.words = peer, words


T = TypeVar("T")
WORKING_S = 1.0  # how often rank 0 tells those that wait for it that it is working


def broadcast_object(value: T, kind: Any = None, group: dist.ProcessGroup | None = None, *, source: int = 0) -> T:
    """Return one rank's value on every rank: one broadcast, where ``all_gather_objects`` would hold a copy for each rank.

    ``kind``, ``group``: see ``all_gather_objects``.

    Raises:
        MalformedError: That rank sent something else.
    """
    if dist.get_world_size() == 1:
        return value
    own = reader.dumps(value).encode() if dist.get_rank() == source else b""
    return reader.loads(kind or type(value), broadcast_bytes(source, own, group), f"what rank {source} sent")


def all_gather_objects(value: T, kind: Any = None, group: dist.ProcessGroup | None = None) -> list[T]:
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


def broadcast_bytes(rank: int, content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Return one rank's bytes on every rank; sent through CPU memory."""
    size = torch.tensor([len(content)])
    dist.broadcast(size, rank, group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == rank and content:
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if int(size):
        dist.broadcast(buffer, rank, group)
    return buffer.numpy().tobytes()


@contextlib.contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """If any rank refuses inside, all do, with the message of the lowest such rank, so that none waits for one that left.

    ``group``: see ``all_gather_objects``.

    Raises:
        UserError: This rank refused.
        FollowedError: Another rank refused.
    """
    error = ""
    try:
        yield
    except UserError as found:
        error = str(found)
    for rank, words in enumerate(all_gather_objects(error, group=group)):
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
        while any(all_reduce_max([0])):
            alive()
        yield lambda: None
        return
    told = time.monotonic()

    def still_working() -> None:
        nonlocal told
        if time.monotonic() - told >= WORKING_S:
            all_reduce_max([1])
            told = time.monotonic()

    try:
        yield still_working
    finally:
        all_reduce_max([0])


def all_reduce_max(mine: Sequence[int]) -> list[int]:
    """Return the maximum over all ranks of each value, on every rank. Uses CPU memory."""
    values = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [int(value) for value in values]


def all_reduce_max_fields(mine: T) -> T:
    """Return a dataclass of integers with the maximum over all ranks in each field, on every rank."""
    values = all_reduce_max(dataclasses.astuple(mine))  # type: ignore[call-overload]
    return type(mine)(*values)


def all_reduce_sum(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value`` over all ranks, on every rank."""
    total = value.clone()
    dist.all_reduce(total)
    return total
