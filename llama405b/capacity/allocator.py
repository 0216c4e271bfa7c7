"""How torch's caching allocator places blocks with expandable segments, and so how much it reserves. Pure.

A pool is one address space, which grows at its end by whole segments. A block is placed in the smallest free block that suffices, the
lowest of several; in the last one only if no other does, since that one can grow. Nothing is given back while memory suffices.
Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (get_free_block, try_allocate_expandable_block, should_split).
"""

import bisect
import math
from typing import NamedTuple

MIB = 1 << 20
ROUND = 512  # bytes, of each block: kMinBlockSize
SMALL = MIB  # up to this, blocks are in a pool of their own: kSmallSize
SEGMENT, SMALL_SEGMENT = 20 * MIB, 2 * MIB  # by which pools grow: kLargeBuffer, kSmallBuffer
OUTSIDE = -1  # where small blocks begin: they are only counted


class Block(NamedTuple):
    """Where a block is in its pool."""

    begin: int
    size: int  # bytes


class Pool:
    """The large blocks of one stream, in one expandable segment."""

    def __init__(self) -> None:
        self.end = 0  # of what is mapped
        self.small = self.most_small = 0
        self.free_sizes: list[tuple[int, int]] = []  # (size, begin), in order
        self.sizes: dict[int, int] = {}  # of free blocks, by where they begin
        self.begins: dict[int, int] = {}  # and by where they end

    @property
    def reserved(self) -> int:
        """Bytes."""
        return self.end + -(-self.most_small // SMALL_SEGMENT) * SMALL_SEGMENT

    def allocate(self, n_bytes: float) -> Block:
        """Return a block."""
        size = max(ROUND, -(-math.ceil(n_bytes) // ROUND) * ROUND)
        if size <= SMALL:
            self.small += size
            self.most_small = max(self.most_small, self.small)
            return Block(OUTSIDE, size)
        begin = self._place(size)
        free = self._take(begin)
        if free > size:
            self._give(begin + size, free - size)
        return Block(begin, size)

    def free(self, block: Block) -> None:
        """Take it back; free neighbours become one."""
        begin, size = block
        if begin == OUTSIDE:
            self.small -= size
            return
        if (before := self.begins.get(begin)) is not None:
            size += self._take(before)
            begin = before
        if begin + size in self.sizes:
            size += self._take(begin + size)
        self._give(begin, size)

    def _place(self, size: int) -> int:
        """Return where the free block begins that serves; the last one only if no other does, for it can grow."""
        at = bisect.bisect_left(self.free_sizes, (size, -1))
        if at < len(self.free_sizes) and sum(self.free_sizes[at]) == self.end and at + 1 < len(self.free_sizes):
            at += 1
        if at < len(self.free_sizes):
            return self.free_sizes[at][1]
        last = self.begins.get(self.end, self.end)
        free = self._take(last) if last < self.end else 0
        grown = -(-(size - free) // SEGMENT) * SEGMENT
        self.end += grown
        self._give(last, free + grown)
        return last

    def _give(self, begin: int, size: int) -> None:
        bisect.insort(self.free_sizes, (size, begin))
        self.sizes[begin] = size
        self.begins[begin + size] = begin

    def _take(self, begin: int) -> int:
        size = self.sizes.pop(begin)
        del self.begins[begin + size]
        del self.free_sizes[bisect.bisect_left(self.free_sizes, (size, begin))]
        return size
