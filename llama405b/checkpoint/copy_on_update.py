"""Keep the state after one step readable while training changes it.

A tensor is read in place between its update in that step and its next update. A tensor that has not been read by then is
copied into staging memory; if that is full, the update waits. Knows tensors, updates and threads; not files.
"""

import bisect
import collections
import concurrent.futures
import dataclasses
import enum
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from llama405b.distributed.host_memory import (
    ALIGNED,
    Arrived,
    Progress,
    aligned,
    allocate,
    copy,
    grouped,
    nothing,
    on_stream,
)
from llama405b.optim.updater import Unit

BACKGROUND = 15  # niceness, of 19
PEEKS = 20  # of the reading rate before the next update is due


class Slab:
    """One block of memory, allocated in parts: first fit."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.gaps = [(0, memory.numel())]  # begin and end, in order; no two touch

    def take(self, n_bytes: int) -> Tensor | None:
        """Return a buffer of so many bytes, or None if no gap is large enough."""
        size = aligned(n_bytes)
        for i, (begin, end) in enumerate(self.gaps):
            if end - begin >= size:
                self.gaps[i : i + 1] = [(begin + size, end)] * (end - begin > size)
                return self.memory[begin : begin + n_bytes]
        return None

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the gaps, and merge it with its neighbours."""
        begin = buffer.storage_offset() - self.memory.storage_offset()
        end = begin + aligned(buffer.numel())
        # merge with the next gap, then with the previous one
        i = bisect.bisect(self.gaps, (begin, end))
        if i < len(self.gaps) and self.gaps[i][0] == end:
            end = self.gaps.pop(i)[1]
        if i and self.gaps[i - 1][1] == begin:
            i, begin = i - 1, self.gaps.pop(i - 1)[0]
        self.gaps.insert(i, (begin, end))


class Staging:
    """Memory for copies: allocated once and reused by each save."""

    def __init__(self, sizes: Iterable[int], limit_bytes: int, device: torch.device, progress: Progress) -> None:
        """Allocate memory for copies of tensors of these sizes in bytes, up to the limit.

        The memory is pinned if ``device``, from which the copies are made, is a GPU.
        """
        pieces = [sum(map(aligned, sizes)) for sizes in grouped(list(sizes))]
        room = itertools.accumulate(pieces, lambda left, piece: left - piece, initial=limit_bytes)
        blocks = [min(piece, left) // ALIGNED * ALIGNED for piece, left in zip(pieces, room, strict=False) if left > 0]
        self.slabs = [Slab(memory) for memory in allocate(blocks, device, progress, "checkpoint.staging")]

    def take(self, n_bytes: int) -> Tensor | None:
        """Return a buffer of so many bytes, or None while there is no room."""
        return next((buffer for slab in self.slabs if (buffer := slab.take(n_bytes)) is not None), None)

    def give_back(self, buffer: Tensor) -> None:
        """Free a buffer for the next copies."""
        where = buffer.untyped_storage().data_ptr()
        next(slab for slab in self.slabs if slab.memory.untyped_storage().data_ptr() == where).give_back(buffer)


class TensorState(enum.Enum):
    """How far a tensor of the state has been read."""

    LIVE = enum.auto()  # neither read nor copied: it must not change
    READING = enum.auto()  # from where it lives: it must not change
    COPYING = enum.auto()  # it must not change
    STAGED = enum.auto()  # copied, and not read: it may change from here on
    READING_COPY = enum.auto()
    DONE = enum.auto()


BOUND = (TensorState.LIVE, TensorState.READING, TensorState.COPYING)  # an update must wait


@dataclasses.dataclass(slots=True, eq=False)
class TrackedTensor:
    """One tensor of the state."""

    tensor: Tensor
    updated: "concurrent.futures.Future[None] | None" = None  # completes when the step that is saved has updated it
    entries: list[int] = dataclasses.field(default_factory=list)  # numbers in the plan that are read from it
    buffer: Tensor | None = None  # its copy
    arrived: Arrived = nothing  # in the buffer
    state: TensorState = TensorState.LIVE


@dataclasses.dataclass(slots=True)
class SnapshotStats:
    """How a state was read, and how long updates waited for it."""

    straight_bytes: int = 0  # from where it lives
    staged_bytes: int = 0  # from a copy
    waited_bytes: int = 0  # of them: tensors whose update had to wait
    waited_s: float = 0.0


class CopyOnUpdate:
    """The state after one step, read by several threads while ``before_update`` guards what changes."""

    def __init__(self, units: Sequence[Unit], staging: Staging, next_update_s: float | None = None) -> None:
        """``next_update_s``: seconds until the next updates are due; None: unknown, nothing is copied ahead."""
        self.staging = staging
        self.stats = SnapshotStats()
        self.changed = threading.Condition()
        self.pieces = {
            t.data_ptr(): TrackedTensor(t, unit.updated) for unit in units for t in unit.tensors if t.numel()
        }
        self.live = collections.deque(self.pieces.values())  # in the order in which updates will want to change them
        self.staged: collections.deque[TrackedTensor] = collections.deque()
        self.left = len(self.pieces)
        self.untouched_bytes = sum(piece.tensor.nbytes for piece in self.live)  # of what is neither read nor copied
        self.changing = self.starved = self.abandoned = False  # updates have begun; one waits for room; the save failed
        for unit in units:
            if unit.updated:
                unit.updated.add_done_callback(self._notify)
        gpu = next((piece.tensor.device for piece in self.live if piece.tensor.is_cuda), None)
        self.stream = torch.cuda.Stream(gpu) if gpu else None
        if self.stream:  # on a GPU, copies are cheap and memory is scarce
            self.stream.wait_stream(torch.cuda.current_stream(gpu))
            for piece in self.pieces.values():
                if (buffer := self._room(piece)) is not None:
                    self._claim(piece, TensorState.COPYING)
                    self._stage(piece, buffer)
        self.began, self.next_update_s = time.perf_counter(), next_update_s
        if next_update_s is not None and self.stream is None:
            threading.Thread(target=self._stage_ahead, name="stage", daemon=True).start()

    def plan(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors that ``read`` yields, numbered in this order. All others may change from now on."""
        with self.changed:
            for number, tensor in enumerate(tensors):
                piece = self.pieces.get(tensor.data_ptr())
                if piece is None:  # nobody changes it
                    piece = TrackedTensor(tensor)
                    self.live.appendleft(piece)
                    self.left += 1
                    self.untouched_bytes += tensor.nbytes
                if piece.tensor.shape != tensor.shape:
                    raise RuntimeError(f"{tuple(tensor.shape)} elements are saved of {tuple(piece.tensor.shape)}")
                piece.entries.append(number)
            for piece in self.pieces.values():
                if not piece.entries:
                    self._finish(piece)

    def read(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each tensor of the plan with its number, in CPU memory; several threads share the work.

        A tensor is valid until the next one is requested.
        """
        while piece := self._next():
            try:
                if piece.updated:
                    piece.updated.result()
                piece.arrived()
                with on_stream(self.stream):
                    found = piece.tensor if piece.buffer is None else _as(piece.tensor, piece.buffer)
                    content = found.detach().cpu()
                yield from ((number, content) for number in piece.entries)
            finally:
                with self.changed:
                    self._finish(piece)

    @torch.no_grad()
    def before_update(self, tensors: Iterable[Tensor]) -> None:
        """Wait until these tensors may change: each has been read or copied."""
        for tensor in tensors:
            if piece := self.pieces.get(tensor.data_ptr()):
                self._release(piece)

    def abandon(self) -> None:
        """Release all tensors and end ``read``: the save failed."""
        with self.changed:
            self.abandoned = True
            for piece in self.pieces.values():
                self._finish(piece)

    def _next(self) -> TrackedTensor | None:
        """Wait for a tensor that can be read and return it; None if all have been read."""
        with self.changed:
            while self.left and not self.abandoned:
                if piece := self._first():
                    return piece
                self.changed.wait()
        return None

    def _first(self) -> TrackedTensor | None:
        """Pick the tensor to read next so that updates wait least.

        Before updates begin: the tensor that is updated first. While updates run and tensors are copied for them: copies, which
        frees staging memory, then the tensor that is updated last. If staging is full: the tensor that an update waits for.
        """
        if self.changing and not self.starved:
            return self._take_staged() or self._take_live(-1)
        return self._take_live(0) or self._take_staged()

    def _take_live(self, end: int) -> TrackedTensor | None:
        """Return the first (0) or last (-1) tensor that no thread has claimed, once it has been updated."""
        while self.live:
            piece = self.live[end]
            taken = piece.state is not TensorState.LIVE
            if not taken and piece.updated and not piece.updated.done():
                return None
            del self.live[end]
            if taken:
                continue
            self._claim(piece, TensorState.READING)
            return piece
        return None

    def _take_staged(self) -> TrackedTensor | None:
        while self.staged:
            piece = self.staged.popleft()
            if piece.state is TensorState.STAGED:  # tensors outside the plan are done already
                piece.state = TensorState.READING_COPY
                return piece
        return None

    def _claim(self, piece: TrackedTensor, state: TensorState) -> None:
        piece.state = state
        self.untouched_bytes -= piece.tensor.nbytes

    def _release(self, piece: TrackedTensor) -> None:
        began = time.perf_counter()
        waited = False
        buffer = None
        with self.changed:
            while piece.state in BOUND:
                self.changing = True
                live = piece.state is TensorState.LIVE
                if live and (buffer := self._room(piece)) is not None:
                    self._claim(piece, TensorState.COPYING)
                    break
                waited, self.starved = True, live
                self.changed.wait()
            self.starved = False
            if waited:
                self.stats.waited_bytes += piece.tensor.nbytes
                self.stats.waited_s += time.perf_counter() - began
        if buffer is not None:
            self._stage(piece, buffer)
        piece.arrived()

    @torch.no_grad()
    def _stage_ahead(self) -> None:
        """Copy, from the end, tensors that will not be read before updates begin, so that these need not wait."""
        assert self.next_update_s is not None
        give_way()
        while True:
            with self.changed:
                if self.changing or self.abandoned or not self.untouched_bytes:
                    return
                passed_s = time.perf_counter() - self.began
                read_by_then = self.stats.straight_bytes / passed_s * (self.next_update_s - passed_s)
                piece = self._take_live(-1) if self.untouched_bytes > read_by_then else None
                if piece is None:
                    self.changed.wait(self.next_update_s / PEEKS)
                    continue
                piece.state, buffer = TensorState.COPYING, self._room(piece)
                if buffer is None:
                    piece.state = TensorState.LIVE
                    self.untouched_bytes += piece.tensor.nbytes
                    self.live.append(piece)
                    return
            self._stage(piece, buffer)

    def _room(self, piece: TrackedTensor) -> Tensor | None:
        return self.staging.take(piece.tensor.nbytes)

    def _stage(self, piece: TrackedTensor, buffer: Tensor) -> None:
        """Copy a tensor that no thread is reading into its staging buffer."""
        arrived = copy([(_as(piece.tensor, buffer), piece.tensor)], self.stream)
        with self.changed:
            if piece.state is TensorState.DONE:
                self.staging.give_back(buffer)
                return
            piece.buffer = buffer
            piece.arrived = arrived
            piece.state = TensorState.STAGED
            self.staged.append(piece)
            self.stats.staged_bytes += buffer.numel()
            self.changed.notify_all()

    def _finish(self, piece: TrackedTensor) -> None:
        if piece.state is TensorState.DONE:
            return
        if piece.state is TensorState.LIVE:
            self.untouched_bytes -= piece.tensor.nbytes
        piece.state = TensorState.DONE
        self.left -= 1
        if piece.buffer is not None:
            self.staging.give_back(piece.buffer)
        elif piece.entries:
            self.stats.straight_bytes += piece.tensor.nbytes
        self.changed.notify_all()

    def _notify(self, _: object) -> None:
        with self.changed:
            self.changed.notify_all()


def give_way() -> None:
    """Lower the priority of this thread, so that it runs when no other thread wants its core."""
    # on Linux, niceness is per thread
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND)


def _as(tensor: Tensor, buffer: Tensor) -> Tensor:
    return buffer.view(tensor.dtype).view(tensor.shape)
