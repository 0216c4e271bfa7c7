"""A Triton kernel that keeps some of a GPU's multiprocessors busy for about a tenth of a second, as NCCL's do. Needs Triton."""

import torch
import triton
import triton.language as tl

BLOCK, ROUNDS, WARPS = 8192, 400_000, 32


@triton.jit
def spin(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: D103
    a = tl.load(x + tl.arange(0, BLOCK))
    for _ in range(n):
        a = a * 1.0001 + 0.5
    tl.store(x + tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK, a)


def keep_busy(count: int) -> None:
    """Keep so many of them busy, on the current stream; each has one block that nothing else fits beside."""
    if count:
        spin[(count,)](torch.empty(count * BLOCK, device="cuda"), ROUNDS, BLOCK=BLOCK, num_warps=WARPS)
