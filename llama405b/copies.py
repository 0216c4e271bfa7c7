"""Copies between CPU memory and a GPU that nobody waits for, and the pinned memory that they need. On a CPU they are plain.

``torch.empty(pin_memory=True)`` rounds each block up to a power of two; memory that is allocated first and then registered
with CUDA has the size that was asked for. Registering 100 GB takes a minute, and a registration within a backward can
deadlock with NCCL's kernels: so everything is pinned at once, and never in a step. No GPU has run this yet.
"""

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from llama405b.contract.errors import UserError

GIB = 1 << 30
PIECE_BYTES = 4 * GIB  # registered at a time, so that progress can be shown; blocks are not split
ALIGNED = 256
STAGE_BYTES = 256 << 20  # a power of two, as torch pins it
READERS, READ_BYTES = 8, 16 << 20  # threads, and what each reads at a time
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Arrived = Callable[[], None]  # waits until copies have been made
_registered: list[Tensor] = []  # until the process ends: unmapped, it would still be registered


def copy(pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> Arrived:
    """Copy to the first tensor of each pair from the second; without a stream at once. Returns what waits for it."""
    with torch.cuda.stream(stream):
        for to, of in pairs:
            to.copy_(of, non_blocking=True)
            if stream and of.is_cuda:
                of.record_stream(stream)  # or its memory would be reused before it has been read
    return stream.record_event().synchronize if stream else nothing


def nothing() -> None:
    """Wait for nothing."""


class Stage:
    """Brings bytes of mapped files to a device: several threads read ahead, to a GPU through two pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.threads = device, ThreadPoolExecutor(READERS, "reader")
        self.buffers: list[Tensor] = []

    def bring(self, target: Tensor, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Copy each source to where it begins in ``target`` (uint8, on the device); returns when all are there."""
        if self.device.type == "cpu":
            self._read(target, 0, sources)
            return
        if not self.buffers:
            self.buffers = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._through(self.buffers, target, sources, torch.cuda.current_stream(self.device))

    def _through(
        self,
        buffers: Sequence[Tensor],
        target: Tensor,
        sources: Sequence[tuple[int, Tensor]],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Fill one buffer while the other is copied."""
        free = [nothing] * len(buffers)
        for number, part in enumerate(target.split(buffers[0].numel())):
            slot = number % len(buffers)
            free[slot]()
            buffer = buffers[slot][: part.numel()]
            self._read(buffer, number * buffers[0].numel(), sources)
            free[slot] = copy([(part, buffer)], stream)
        for arrived in free:
            arrived()

    def _read(self, into: Tensor, begin: int, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Fill a buffer that begins there in the target."""
        pairs = list(_overlaps(into, begin, sources))
        list(self.threads.map(lambda pair: np.copyto(*pair), pairs))


def _overlaps(
    into: Tensor, begin: int, sources: Iterable[tuple[int, Tensor]]
) -> Iterator[tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", "np.ndarray[tuple[int], np.dtype[np.uint8]]"]]:
    """Yield what of each source belongs into the buffer, in pieces for one thread each."""
    for at, source in sources:
        flat = source.flatten().view(torch.uint8)
        low, high = max(at, begin), min(at + flat.numel(), begin + into.numel())
        for first in range(low, high, READ_BYTES):
            last = min(first + READ_BYTES, high)
            yield into[first - begin : last - begin].numpy(), flat[first - at : last - at].numpy()


def allocate(blocks: Sequence[int], device: torch.device, progress: Progress) -> list[Tensor]:
    """Return uint8 tensors of these sizes, in bytes; pinned if the device is a GPU.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    found: list[Tensor] = []
    total, done = sum(blocks), 0
    for sizes in pieces(blocks):
        piece = _pages(sum(map(_aligned, sizes)))
        if device.type == "cuda":
            register(piece, done, total)
        begin = 0
        for size in sizes:
            found.append(piece[begin : begin + size])
            begin += _aligned(size)
        done += sum(sizes)
        progress(done, total)
    return found


def pieces(blocks: Sequence[int]) -> list[list[int]]:
    """Group blocks, in their order, into pieces that are pinned at a time: a copy must not cross from one to the next."""
    found: list[list[int]] = []
    for size in blocks:
        if found and sum(map(_aligned, (*found[-1], size))) <= PIECE_BYTES:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def register(piece: Tensor, done: int, total: int) -> None:
    """Have CUDA pin memory that is allocated already.

    Raises:
        UserError: It refuses: the memory does not suffice, or a limit forbids it.
    """
    _registered.append(piece)
    error = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 1))  # 1: for every context
    if error:
        raise refused(done, total, f"error {error}")


def refused(done: int, total: int, why: str) -> UserError:
    """Say that CUDA does not pin as much memory as is needed."""
    return UserError(
        f"--parallel.offload: CUDA pinned {done / GIB:.1f} of {total / GIB:.1f} GiB of this rank's CPU memory, then refused ({why}); "
        "raise the limit of locked memory (ulimit -l) or the container's memory, or use more hosts"
    )


def _pages(n_bytes: int) -> Tensor:
    """Return untouched memory that begins at a page, in huge pages if the system has them."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are seldom huge
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED) * ALIGNED
