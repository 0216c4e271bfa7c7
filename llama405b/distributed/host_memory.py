"""CPU memory: how much is free, how much a rank has held at most, and pinned memory, which copies to and from a GPU need.

``torch.empty(pin_memory=True)`` rounds each block up to a power of two; memory that is allocated first and then registered
with CUDA has the size that was asked for. Registering 100 GB takes a minute, and a registration within a backward can
deadlock with NCCL's kernels: so everything is pinned at once, and never in a step.

Copies between CPU memory and a GPU that nobody waits for. On a CPU they are plain.

How long the parts of a step take. Uses CUDA events, so that measuring does not stall the GPU.
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
PIECE_BYTES = 4 * GIB  # registered at a time, so that progress can be shown; blocks are not split
ALIGNED = 256
Progress = Callable[[int, int], None]  # bytes done, bytes in all
INSTEAD = {
    "parallel.offload": "use more hosts",
    "checkpoint.staging": "set a smaller size, such as 10GB",
    "model.activations": "leave it out",
}
_registered: list[Tensor] = []  # until the process ends: unmapped, it would still be registered

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Return how much memory this machine, or this container, can still give."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        caches = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:  # another version of cgroups, or the machine's own
        return free
    if limit == "max":
        return free
    return max(0, min(free, int(limit) - int(used) + int(caches.get("inactive_file", 0))))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryHeld:
    """The most memory that this rank held so far, as ``Metrics`` has it."""

    peak_bytes: int
    peak_allocated_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0


def memory_held(*, on_gpu: bool) -> MemoryHeld:
    """Return what this rank held: of its GPU, or else of CPU memory."""
    if not on_gpu:
        return MemoryHeld(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    stats = torch.cuda.memory_stats()
    names = ("reserved_bytes.all.peak", "allocated_bytes.all.peak", "num_alloc_retries", "num_ooms")
    return MemoryHeld(*(stats.get(name, 0) for name in names))


def allocate(
    blocks: Sequence[int], device: torch.device, progress: Progress, setting: str = "parallel.offload"
) -> list[Tensor]:
    """Return uint8 tensors of these sizes, in bytes; pinned if the device is a GPU. ``setting``: what they are for.

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
    """Group blocks, in their order, into pieces that are pinned at a time: a copy must not cross from one to the next."""
    found: list[list[int]] = []
    for size in blocks:
        if found and sum(map(aligned, (*found[-1], size))) <= PIECE_BYTES:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def register(piece: Tensor, done: int, total: int, setting: str = "parallel.offload") -> None:
    """Have CUDA pin memory that is allocated already."""
    _registered.append(piece)
    error = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 1))  # 1: for every context
    if error:
        raise refused(done, total, f"error {error}", setting)


def refused(done: int, total: int, why: str, setting: str = "parallel.offload") -> UserError:
    """Say that CUDA does not pin as much memory as is needed."""
    return UserError(
        f"--{setting}: cannot pin {total / GIB:.1f} GiB of this rank's CPU memory (CUDA stopped at {done / GIB:.1f} GiB: {why}); "
        f"raise the limit of locked memory (ulimit -l) or the container's memory, or {INSTEAD[setting]}"
    )


def _pages(n_bytes: int) -> Tensor:
    """Return untouched memory that begins at a page, in huge pages if the system has them."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are seldom huge
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def aligned(n_bytes: int) -> int:
    """Return how much of a piece a block takes."""
    return -(-n_bytes // ALIGNED) * ALIGNED


STAGE_BYTES = 256 << 20  # a power of two, as torch pins it
READERS, READ_BYTES = 8, 16 << 20  # threads, and what each reads at a time
Arrived = Callable[[], None]  # waits until copies have been made


def copy(pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> Arrived:
    """Copy to the first tensor of each pair from the second; without a stream at once. Returns what waits for it."""
    with on_stream(stream):
        for to, of in pairs:
            to.copy_(of, non_blocking=True)
            if stream and of.is_cuda:
                of.record_stream(stream)  # or its memory would be reused before it has been read
    return stream.record_event().synchronize if stream else nothing


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Run what is inside on a stream, if there is one; without one this does not start CUDA, as torch's context would."""
    return torch.cuda.stream(stream) if stream else nullcontext()


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


class StepTimer:
    """Marks the end of each part; a part may end more than once per step (micro-batches)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = [("", moment(cuda=self.cuda))]

    def mark(self, part: str) -> None:
        """Mark the end of ``part``."""
        self.marks.append((part, moment(cuda=self.cuda)))

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in zip(self.marks, self.marks[1:], strict=False):
            total[part] += seconds_between(begin, end)
        return total


def moment(*, cuda: bool) -> Any:
    """Return the time; with ``cuda`` an event, whose time is when the current stream gets there."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments; events must have happened, and torch refuses those that have not."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    return float(end - begin)
