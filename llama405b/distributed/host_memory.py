"""CPU memory (free, peak, pinned), asynchronous copies between it and a GPU, and timers that do not stall the GPU.

``torch.empty(pin_memory=True)`` rounds each block up to a power of two; memory that is allocated first and then registered with CUDA has
exactly the requested size. Registering 100 GB takes a minute, and registering during a backward can deadlock with NCCL's kernels, so
everything is pinned at once and never within a step.

Without a GPU, copies are synchronous. Timers use CUDA events. Knows devices and streams; not the model.
"""

import contextlib
import dataclasses
import mmap
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama405b.contract.errors import UserError

GIB = 1 << 30
PIECE_BYTES = 4 * GIB  # registered at a time, so that progress can be shown; a block is never split
ALIGNED = 256
Progress = Callable[[int, int], None]  # done bytes, total bytes
INSTEAD = {
    "parallel.offload": "use more hosts",
    "checkpoint.staging": "set a smaller size, such as 10GB",
    "model.activations": "leave it out",
}
_registered: list[Tensor] = []  # kept until the process ends: CUDA's registration would outlive the mapping

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return the free memory of this machine or container, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        caches = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # cgroup v1, or the root cgroup of the machine
        return free
    if limit == "max":
        return free
    # A cgroup counts page cache as used; the inactive part of it can be reclaimed.
    return max(0, min(free, int(limit) - int(used) + int(caches.get("inactive_file", 0))))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryHeld:
    """Peak memory of this rank so far; the fields are those of ``Metrics``."""

    peak_bytes: int
    peak_allocated_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0


def memory_held(*, on_gpu: bool) -> MemoryHeld:
    """Return this rank's peak memory: of its GPU, or without one of the CPU."""
    if not on_gpu:
        return MemoryHeld(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    stats = torch.cuda.memory_stats()
    names = ("reserved_bytes.all.peak", "allocated_bytes.all.peak", "num_alloc_retries", "num_ooms")
    return MemoryHeld(*(stats.get(name, 0) for name in names))


def allocate(
    blocks: Sequence[int], device: torch.device, progress: Progress, setting: str = "parallel.offload"
) -> list[Tensor]:
    """Return uint8 tensors of these sizes in bytes, pinned if the device is a GPU; ``setting`` is named in the error.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    found: list[Tensor] = []
    total, done = sum(blocks), 0
    for sizes in grouped(blocks):
        piece = _pages(sum(map(aligned, sizes)))
        if device.type == "cuda":
            register(piece, done, total, setting)
        begin = 0
        for size in sizes:
            found.append(piece[begin : begin + size])
            begin += aligned(size)
        done += sum(sizes)
        progress(done, total)
    return found


def grouped(blocks: Sequence[int]) -> list[list[int]]:
    """Group block sizes, in order, into pieces to pin: a copy must not cross the border between two registrations."""
    found: list[list[int]] = []
    for size in blocks:
        if found and sum(map(aligned, (*found[-1], size))) <= PIECE_BYTES:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def register(piece: Tensor, done: int, total: int, setting: str = "parallel.offload") -> None:
    """Pin memory that is already allocated."""
    _registered.append(piece)
    error = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 1))  # 1: cudaHostRegisterPortable
    if error:
        raise refused(done, total, f"error {error}", setting)


def refused(done: int, total: int, why: str, setting: str = "parallel.offload") -> UserError:
    """Return the error for CPU memory that CUDA could not pin."""
    return UserError(
        f"--{setting}: cannot pin {total / GIB:.1f} GiB of this rank's CPU memory (CUDA stopped at {done / GIB:.1f} GiB: {why}); "
        f"raise the limit of locked memory (ulimit -l) or the container's memory, or {INSTEAD[setting]}"
    )


def _pages(n_bytes: int) -> Tensor:
    """Return page-aligned memory, untouched so far, in huge pages if the system has them."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared mappings rarely get huge pages
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def aligned(n_bytes: int) -> int:
    """Return a size in bytes, rounded up to the alignment of blocks."""
    return -(-n_bytes // ALIGNED) * ALIGNED


STAGE_BYTES = 256 << 20  # a power of two: torch would round up to one
READERS, READ_BYTES = 8, 16 << 20  # threads, and bytes that each reads at a time
Arrived = Callable[[], None]  # blocks until copies are finished


def copy(pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> Arrived:
    """Copy the second tensor of each pair to the first, on a stream if given; return a function that waits for the copies."""
    with on_stream(stream):
        for to, of in pairs:
            to.copy_(of, non_blocking=True)
            if stream and of.is_cuda:
                of.record_stream(stream)  # otherwise its memory could be reused before the copy reads it
    return stream.record_event().synchronize if stream else nothing


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Run the block on a stream if given; unlike torch's context manager, do not initialize CUDA without one."""
    return torch.cuda.stream(stream) if stream else nullcontext()


def nothing() -> None:
    """Do nothing: there is no copy to wait for."""


class Stage:
    """Copies bytes of mapped files to a device with several reader threads; to a GPU through two pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.threads = device, ThreadPoolExecutor(READERS, "reader")
        self.buffers: list[Tensor] = []

    def bring(self, target: Tensor, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Copy each source to its offset in ``target`` (uint8, on the device); return when all are copied."""
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
        """Fill one buffer while the other is copied to the device."""
        free: list[Arrived] = [nothing] * len(buffers)
        for number, part in enumerate(target.split(buffers[0].numel())):
            slot = number % len(buffers)
            free[slot]()
            buffer = buffers[slot][: part.numel()]
            self._read(buffer, number * buffers[0].numel(), sources)
            free[slot] = copy([(part, buffer)], stream)
        for arrived in free:
            arrived()

    def _read(self, into: Tensor, begin: int, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Fill a buffer that stands for the target from offset ``begin`` on."""
        pairs = list(_overlaps(into, begin, sources))
        list(self.threads.map(lambda pair: np.copyto(*pair), pairs))


def _overlaps(
    into: Tensor, begin: int, sources: Iterable[tuple[int, Tensor]]
) -> Iterator[tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", "np.ndarray[tuple[int], np.dtype[np.uint8]]"]]:
    """Yield (buffer slice, source slice) pairs for the parts of sources that fall into the buffer, one pair per thread task."""
    for at, source in sources:
        flat = source.flatten().view(torch.uint8)
        low, high = max(at, begin), min(at + flat.numel(), begin + into.numel())
        for first in range(low, high, READ_BYTES):
            last = min(first + READ_BYTES, high)
            yield into[first - begin : last - begin].numpy(), flat[first - at : last - at].numpy()


class StepTimer:
    """Measures the parts of a step by marking their ends; a part may end more than once (micro-batches)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = [("", moment(cuda=self.cuda))]

    def mark(self, part: str) -> None:
        """Mark the end of ``part``."""
        self.marks.append((part, moment(cuda=self.cuda)))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part; wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in zip(self.marks, self.marks[1:], strict=False):
            total[part] += seconds_between(begin, end)
        return total


def moment(*, cuda: bool) -> Any:
    """Return the current time; with ``cuda`` an event that takes its time when the current stream reaches it."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two recorded times; torch raises for events that have not completed."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    return float(end - begin)
