"""Exchange values, sums and errors between ranks through CPU memory, outside of training itself.

Two errors belong to another rank: it refused its input, or it is gone. Then its message matters, not the message of this rank.

This is the only module that parses messages of gloo, NCCL and torch's store; ``tests/data/foreign/lost-peer`` has recordings. Knows
process groups; not the model.
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

LOST_PEER_MESSAGES = (  # fragments that occur only in messages about a lost peer
    "Connection closed by peer",  # gloo
    "Connection reset",  # gloo, torch's store
    "Broken pipe",  # gloo, torch's store
    "Timed out waiting",  # gloo, when a peer does not answer
    "Socket Timeout",  # torch's store
    "wait timeout after",  # torch's store, when no peer connected
    "timed out",  # NCCL's watchdog, torch's store
)


def says_lost_peer(message: str) -> bool:
    """Return whether a message says that a peer is lost."""
    return any(fragment in message for fragment in LOST_PEER_MESSAGES)


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error means that a peer is gone, by its type or message."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError) or says_lost_peer(
        str(error)
    )


class PeerFailedError(UserError):
    """Another rank refused its input, so all ranks stop."""

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(f"rank {peer} failed: {message}")
        self.peer, self.message = peer, message


T = TypeVar("T")
WORKING_INTERVAL_S = 1.0  # how often rank 0 tells the waiting ranks that it is still working


def broadcast_object(value: T, kind: Any = None, group: dist.ProcessGroup | None = None, *, source: int = 0) -> T:
    """Return one rank's value on every rank, with one broadcast; ``all_gather_objects`` would hold a copy for each rank.

    ``kind``, ``group``: see ``all_gather_objects``.

    Raises:
        MalformedError: The rank sent a value of another type.
    """
    if dist.get_world_size() == 1:
        return value
    content = reader.dumps(value).encode() if dist.get_rank() == source else b""
    return reader.loads(kind or type(value), broadcast_bytes(source, content, group), f"what rank {source} sent")


def all_gather_objects(value: T, kind: Any = None, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, by rank, on every rank; they travel as JSON through CPU memory.

    ``kind``: their type, needed if it is generic, like ``dict[str, int]``. ``group``: a group of all ranks for background
    work; None: the default group.

    Raises:
        MalformedError: Another rank sent a value of another type.
    """
    if dist.get_world_size() == 1:
        return [value]
    local = torch.frombuffer(bytearray(reader.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    # all_gather needs tensors of one size: exchange the sizes first, then pad to the longest.
    dist.all_gather(sizes, torch.tensor([local.numel()]), group)
    max_size = int(max(sizes))
    padded = torch.zeros(max_size, dtype=torch.uint8)
    padded[: local.numel()] = local
    buffers = [torch.empty(max_size, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(buffers, padded, group)
    return [
        reader.loads(kind or type(value), raw[: int(size)].numpy().tobytes(), f"what rank {rank} sent")
        for rank, (raw, size) in enumerate(zip(buffers, sizes, strict=True))
    ]


def broadcast_bytes(rank: int, content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Return one rank's bytes on every rank; they travel through CPU memory."""
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
    """Raise on all ranks if any rank raises UserError inside, with the lowest such rank's message: none waits for a rank that left.

    ``group``: see ``all_gather_objects``.

    Raises:
        UserError: This rank raised it.
        PeerFailedError: Another rank raised it.
    """
    error = ""
    try:
        yield
    except UserError as user_error:
        error = str(user_error)
    for rank, message in enumerate(all_gather_objects(error, group=group)):
        if message and rank == dist.get_rank():
            raise UserError(message)
        if message:
            raise PeerFailedError(rank, message)


@contextlib.contextmanager
def waiting_for_rank0(on_wait: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Let rank 0 work for any length of time while the other ranks wait, without a collective that exceeds its timeout.

    Rank 0 must call the yielded function between the pieces of its work. The others call ``on_wait`` while they wait, and
    enter the block when rank 0 has left it.
    """
    if dist.get_rank() != 0:
        while any(all_reduce_max([0])):
            on_wait()
        yield lambda: None
        return
    last_report_s = time.monotonic()

    def report_working() -> None:
        nonlocal last_report_s
        if time.monotonic() - last_report_s >= WORKING_INTERVAL_S:
            all_reduce_max([1])
            last_report_s = time.monotonic()

    try:
        yield report_working
    finally:
        # Release the waiting ranks, also after an exception.
        all_reduce_max([0])


def all_reduce_max(local_values: Sequence[int]) -> list[int]:
    """Return the maximum of each value over all ranks, on every rank; through CPU memory."""
    values = torch.tensor(local_values, dtype=torch.int64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [int(value) for value in values]


def all_reduce_max_fields(local: T) -> T:
    """Return a dataclass of integers with the maximum of each field over all ranks, on every rank."""
    values = all_reduce_max(dataclasses.astuple(local))  # type: ignore[call-overload]
    return type(local)(*values)


def all_reduce_sum(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``value`` over all ranks, on every rank."""
    total = value.clone()
    dist.all_reduce(total)
    return total
