"""CPU memory: how much is free, how much a rank has held at most, and pinned memory, which copies to and from a GPU need.

``torch.empty(pin_memory=True)`` rounds each block up to a power of two; memory that is allocated first and then registered
with CUDA has the size that was asked for. Registering 100 GB takes a minute, and a registration within a backward can
deadlock with NCCL's kernels: so everything is pinned at once, and never in a step.
"""

import contextlib
import dataclasses
import mmap
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

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
    """Have CUDA pin memory that is allocated already.

    Raises:
        UserError: It refuses: the memory does not suffice, or a limit forbids it.
    """
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
