"""A Triton kernel that keeps some of a GPU's multiprocessors busy for about 0.1 s, as NCCL does."""

import torch
import triton
import triton.language as tl

# 32 warps per block: large enough that no other block fits on the same multiprocessor.
BLOCK, ROUNDS, WARPS = 8192, 400_000, 32


@triton.jit
def spin(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: D103
    a = tl.load(x + tl.arange(0, BLOCK))
    for _ in range(n):
        a = a * 1.0001 + 0.5
    tl.store(x + tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK, a)


def keep_busy(count: int) -> None:
    """Keep ``count`` multiprocessors busy, on the current stream."""
    if count:
        spin[(count,)](torch.empty(count * BLOCK, device="cuda"), ROUNDS, BLOCK=BLOCK, num_warps=WARPS)
