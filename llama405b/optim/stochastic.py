"""Stochastic rounding to BF16: up or down, with the odds that make the mean right, so that updates below BF16's resolution are not lost.

The odds come from a hash of a tensor's name, the number of an element in the whole tensor, and the step: whatever ranks hold it, and
after a resume, an element is rounded alike. Nothing is drawn from a generator.

Shape suffix: C elements of a chunk.
"""

import dataclasses
import math
import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

LOW = 0xFFFF  # the bits of FP32 that BF16 has not
GOLDEN = -1640531527  # 2^32 over the golden ratio, as an int32


@dataclasses.dataclass(frozen=True, slots=True)
class Elements:
    """Which elements of a whole tensor a rank has: some of its rows, and of each some columns."""

    key: int  # of the tensor, 32 bits
    row: int = 0
    column: int = 0
    width: int = 1  # of a row here
    whole: int = 1  # of a row of the whole tensor

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> "Elements":
        """Return this rank's of a parameter, which has this name in the checkpoint."""
        shape, begin = tuple(parameter.shape), (0,) * parameter.dim()
        local = shape
        if isinstance(parameter, DTensor):
            local, begin = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        column = begin[1] if len(shape) > 1 else 0
        return cls(zlib.crc32(name.encode()), begin[0], column, math.prod(local[1:]), math.prod(shape[1:]))

    def numbers(self, first: int, last: int, device: torch.device) -> Tensor:
        """Return the numbers, in the whole tensor, of elements by their place here; int32, which may wrap."""
        own_C = torch.arange(first, last, device=device)
        if self.width == self.whole:
            return own_C.add_(self.row * self.whole).to(torch.int32)
        rows_C = own_C.div(self.width, rounding_mode="floor").add_(self.row)
        return (rows_C * self.whole + own_C % self.width + self.column).to(torch.int32)


class Dice:
    """The odds of a chunk of elements in one step: 16 bits for each of three tensors, weights and two moments."""

    def __init__(self, elements: Elements, first: int, last: int, step: Tensor) -> None:
        """``step``: a number on the device of the elements, which nobody waits for."""
        mixed_C = _hashed(elements.numbers(first, last, step.device) ^ _int32(elements.key))
        self.bits_C = _hashed(mixed_C ^ _hashed(step.to(torch.int32)))

    def round_(self, to_C: Tensor, wide_C: Tensor) -> None:
        """Write FP32 values as BF16, rounded; each call uses other bits."""
        raised_C = wide_C.view(torch.int32) + (self.bits_C & LOW)
        to_C.copy_((raised_C & ~LOW).view(torch.float32))
        self.bits_C = _hashed(self.bits_C + GOLDEN)


def _hashed(x_C: Tensor) -> Tensor:
    """Mix 32 bits (Wellons' lowbias32: shifts by 16, 15, 16 and two products)."""
    x_C = x_C ^ ((x_C >> 16) & 0xFFFF)
    x_C = x_C * 0x7FEB352D
    x_C = x_C ^ ((x_C >> 15) & 0x1FFFF)
    x_C = x_C * _int32(0x846CA68B)
    return x_C ^ ((x_C >> 16) & 0xFFFF)


def _int32(number: int) -> int:
    """Return 32 bits as a signed number."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
