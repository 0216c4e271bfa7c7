"""Memory that copies to and from a GPU need not block on: pinned in few large pieces, before training.

``torch.empty(pin_memory=True)`` rounds each block up to a power of two; memory that is allocated first and then registered
with CUDA has the size that was asked for. Registering 100 GB takes a minute, and a registration within a backward can
deadlock with NCCL's kernels: so everything is pinned at once, and never in a step. No GPU has run this yet.
"""

import contextlib
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b.contract.errors import UserError
from llama405b.optim.norm import local

GIB = 1 << 30
PIECE_BYTES = 4 * GIB  # registered at a time, so that progress can be shown; blocks are not split
ALIGNED = 256
Progress = Callable[[int, int], None]  # bytes done, bytes in all


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


def fill_for_fsdp(model: nn.Module, sets: int, progress: Progress) -> None:
    """Pin an offloaded model's weights, and leave torch the pinned blocks that ``sets`` of gradients will take.

    FSDP would pin the weights in the first forward, and the gradients in the first backwards.
    """
    parameters = list(model.parameters())
    total, done, blocks = sum(local(p).nbytes for p in parameters) * (1 + sets), 0, []
    for parameter in parameters:
        weight = local(parameter)
        if isinstance(parameter, DTensor) and weight.numel():
            parameter._local_tensor = weight.pin_memory()
        blocks += [torch.empty_like(weight, pin_memory=True) for _ in range(sets)]  # freed together, when all exist
        done += weight.nbytes * (1 + sets)
        progress(done, total)


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
    error = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 1))  # 1: for every context
    if error:
        raise UserError(
            f"--parallel.offload: CUDA pinned {done / GIB:.1f} of {total / GIB:.1f} GiB of this rank's CPU memory, then refused (error "
            f"{error}); raise the limit of locked memory (ulimit -l) or the container's memory, or use more hosts"
        )


def _pages(n_bytes: int) -> Tensor:
    """Return untouched memory that begins at a page, in huge pages if the system has them."""
    if not n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, n_bytes)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED) * ALIGNED
