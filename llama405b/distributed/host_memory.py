"""CPU memory (free, peak, pinned), asynchronous copies between it and a GPU, and timers that do not stall the GPU.

``torch.empty(pin_memory=True)`` rounds each block up to a power of two; memory that is allocated first and then registered with CUDA has
exactly the requested size. Registering 100 GB takes a minute, and registering during a backward can deadlock with NCCL's kernels, so
everything is pinned at once and never within a step.

Without a GPU, copies are synchronous. Timers use CUDA events. Knows devices and streams; not the model.
"""

import contextlib
import ctypes
import dataclasses
import errno
import gc
import mmap
import os
import re
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
ALIGNMENT = 256
OnByteProgress = Callable[[int, int], None]  # done bytes, total bytes
ALTERNATIVES = {
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


def total_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # number of the system call
MPOL_PREFERRED = 1  # linux/mempolicy.h: other nodes' memory only where this one has no free pages
MIN_CACHED_SHARE = (
    0.25  # of a host's memory, from which on the files of a model leave the page cache once they are read
)


def prefer_numa_node(node: int) -> None:
    """Take this thread's memory, and that of threads that it starts, from a NUMA node.

    Raises:
        OSError: The kernel refuses, as in some containers.
    """
    number, bits = SET_MEMPOLICY.get(os.uname().machine), 8 * ctypes.sizeof(ctypes.c_ulong)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, MPOL_PREFERRED, mask, len(mask) * bits + 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def bytes_by_numa_node(numa_maps: str) -> dict[int, int]:
    """Return the bytes of a process that are no file's, by NUMA node, from ``/proc/PID/numa_maps`` (see proc(5))."""
    sizes: dict[int, int] = defaultdict(int)
    for line in numa_maps.splitlines():
        if " file=" in line:
            continue
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        page_bytes = 1024 * int(fields.get("kernelpagesize_kB", 4))
        for name, value in fields.items():
            if re.fullmatch(r"N\d+", name):
                sizes[int(name[1:])] += int(value) * page_bytes
    return dict(sizes)


def drop_cached(mapped: mmap.mmap, file: Path, begin: int, n_bytes: int) -> None:
    """Let go of a range of a mapped file in the page cache, which would push pinned memory to other NUMA nodes."""
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (begin + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first  # other ranks may read the pages at the ends
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), first, length, os.POSIX_FADV_DONTNEED)


@dataclasses.dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak memory of this rank so far; the fields are those of ``Metrics``."""

    peak_bytes: int
    peak_allocated_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0


def peak_memory(*, on_gpu: bool) -> PeakMemory:
    """Return this rank's peak memory: of its GPU, or without one of the CPU."""
    if not on_gpu:
        return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    stats = torch.cuda.memory_stats()
    names = ("reserved_bytes.all.peak", "allocated_bytes.all.peak", "num_alloc_retries", "num_ooms")
    return PeakMemory(*(stats.get(name, 0) for name in names))


def reset_peak_memory(*, on_gpu: bool) -> None:
    """Give back memory that is not in use, and begin to count the peak anew."""
    gc.collect()
    if on_gpu:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # some containers forbid it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def allocate_blocks(
    blocks: Sequence[int], device: torch.device, on_progress: OnByteProgress, setting: str = "parallel.offload"
) -> list[Tensor]:
    """Return uint8 tensors of these sizes in bytes, pinned if the device is a GPU; ``setting`` is named in the error.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    tensors: list[Tensor] = []
    total_bytes, done_bytes = sum(blocks), 0
    for sizes in group_blocks(blocks):
        piece = _map_pages(sum(map(align_up, sizes)))
        if device.type == "cuda":
            register_pinned(piece, done_bytes, total_bytes, setting)
        begin = 0
        for size in sizes:
            tensors.append(piece[begin : begin + size])
            begin += align_up(size)
        done_bytes += sum(sizes)
        on_progress(done_bytes, total_bytes)
    return tensors


def group_blocks(blocks: Sequence[int]) -> list[list[int]]:
    """Group block sizes, in order, into pieces to pin: a copy must not cross the border between two registrations."""
    groups: list[list[int]] = []
    for size in blocks:
        if groups and sum(map(align_up, (*groups[-1], size))) <= PIECE_BYTES:
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups


def register_pinned(piece: Tensor, done_bytes: int, total_bytes: int, setting: str = "parallel.offload") -> None:
    """Pin memory that is already allocated."""
    _registered.append(piece)
    error = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 1))  # 1: cudaHostRegisterPortable
    if error:
        raise pinning_error(done_bytes, total_bytes, f"error {error}", setting)


def pinning_error(done_bytes: int, total_bytes: int, reason: str, setting: str = "parallel.offload") -> UserError:
    """Return the error for CPU memory that CUDA could not pin."""
    return UserError(
        f"--{setting}: cannot pin {total_bytes / GIB:.1f} GiB of this rank's CPU memory (CUDA stopped at "
        f"{done_bytes / GIB:.1f} GiB: {reason}); "
        f"raise the limit of locked memory (ulimit -l) or the container's memory, or {ALTERNATIVES[setting]}"
    )


def _map_pages(n_bytes: int) -> Tensor:
    """Return page-aligned memory, untouched so far, in huge pages if the system has them."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared mappings rarely get huge pages
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def align_up(n_bytes: int) -> int:
    """Return a size in bytes, rounded up to the alignment of blocks."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


STAGE_BYTES = 256 << 20  # a power of two: torch would round up to one
N_READERS, READ_BYTES = 8, 16 << 20  # threads, and bytes that each reads at a time
WaitForCopy = Callable[[], None]  # blocks until copies are finished


def async_copy(pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> WaitForCopy:
    """Copy the second tensor of each pair to the first, on a stream if given; return a function that waits for the copies."""
    with on_stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            if stream and source.is_cuda:
                source.record_stream(stream)  # otherwise its memory could be reused before the copy reads it
    return stream.record_event().synchronize if stream else no_wait


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Run the block on a stream if given; unlike torch's context manager, do not initialize CUDA without one."""
    return torch.cuda.stream(stream) if stream else nullcontext()


def no_wait() -> None:
    """Do nothing: there is no copy to wait for."""


class DeviceStager:
    """Copies bytes of mapped files to a device with several reader threads; to a GPU through two pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.threads = device, ThreadPoolExecutor(N_READERS, "reader")
        self.buffers: list[Tensor] = []

    def copy_to_device(self, target: Tensor, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Copy each source to its offset in ``target`` (uint8, on the device); return when all are copied."""
        if self.device.type == "cpu":
            self._read(target, 0, sources)
            return
        if not self.buffers:
            self.buffers = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copy_through_buffers(self.buffers, target, sources, torch.cuda.current_stream(self.device))

    def _copy_through_buffers(
        self,
        buffers: Sequence[Tensor],
        target: Tensor,
        sources: Sequence[tuple[int, Tensor]],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Fill one buffer while the other is copied to the device."""
        wait_until_free: list[WaitForCopy] = [no_wait] * len(buffers)
        for number, part in enumerate(target.split(buffers[0].numel())):
            slot = number % len(buffers)
            wait_until_free[slot]()
            buffer = buffers[slot][: part.numel()]
            self._read(buffer, number * buffers[0].numel(), sources)
            wait_until_free[slot] = async_copy([(part, buffer)], stream)
        for wait in wait_until_free:
            wait()

    def _read(self, buffer: Tensor, begin: int, sources: Sequence[tuple[int, Tensor]]) -> None:
        """Fill a buffer that stands for the target from offset ``begin`` on."""
        pairs = list(_overlaps(buffer, begin, sources))
        list(self.threads.map(lambda pair: np.copyto(*pair), pairs))


def _overlaps(
    buffer: Tensor, begin: int, sources: Iterable[tuple[int, Tensor]]
) -> Iterator[tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", "np.ndarray[tuple[int], np.dtype[np.uint8]]"]]:
    """Yield (buffer slice, source slice) pairs for the parts of sources that fall into the buffer, one pair per thread task."""
    for offset, source in sources:
        flat = source.flatten().view(torch.uint8)
        low, high = max(offset, begin), min(offset + flat.numel(), begin + buffer.numel())
        for first in range(low, high, READ_BYTES):
            last = min(first + READ_BYTES, high)
            yield buffer[first - begin : last - begin].numpy(), flat[first - offset : last - offset].numpy()


class StepTimer:
    """Measures the parts of a step by marking their ends; a part may end more than once (micro-batches)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = [("", record_time(cuda=self.cuda))]

    def mark(self, part: str) -> None:
        """Mark the end of ``part``."""
        self.marks.append((part, record_time(cuda=self.cuda)))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part; wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds_by_part: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in zip(self.marks, self.marks[1:], strict=False):
            seconds_by_part[part] += event_seconds(begin, end)
        return seconds_by_part


def record_time(*, cuda: bool) -> Any:
    """Return the current time; with ``cuda`` an event that takes its time when the current stream reaches it."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def event_seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two recorded times; torch raises for events that have not completed."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    return float(end - begin)
