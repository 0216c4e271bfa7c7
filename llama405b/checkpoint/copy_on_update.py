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
    ALIGNMENT,
    OnByteProgress,
    WaitForCopy,
    align_up,
    allocate_blocks,
    async_copy,
    group_blocks,
    no_wait,
    on_stream,
)
from llama405b.optim.updater import UpdateUnit

BACKGROUND_NICENESS = 15  # niceness, of 19
N_RATE_CHECKS = 20  # of the reading rate before the next update is due


class Slab:
    """One block of memory, allocated in parts: first fit."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.gaps = [(0, memory.numel())]  # begin and end, in order; no two touch

    def allocate(self, n_bytes: int) -> Tensor | None:
        """Return a buffer of so many bytes, or None if no gap is large enough."""
        size = align_up(n_bytes)
        for i, (begin, end) in enumerate(self.gaps):
            if end - begin >= size:
                self.gaps[i : i + 1] = [(begin + size, end)] * (end - begin > size)
                return self.memory[begin : begin + n_bytes]
        return None

    def free(self, buffer: Tensor) -> None:
        """Return a buffer to the gaps, and merge it with its neighbours."""
        begin = buffer.storage_offset() - self.memory.storage_offset()
        end = begin + align_up(buffer.numel())
        # merge with the next gap, then with the previous one
        i = bisect.bisect(self.gaps, (begin, end))
        if i < len(self.gaps) and self.gaps[i][0] == end:
            end = self.gaps.pop(i)[1]
        if i and self.gaps[i - 1][1] == begin:
            i, begin = i - 1, self.gaps.pop(i - 1)[0]
        self.gaps.insert(i, (begin, end))


class Staging:
    """Memory for copies: allocated once and reused by each save."""

    def __init__(
        self, sizes: Iterable[int], limit_bytes: int, device: torch.device, on_progress: OnByteProgress
    ) -> None:
        """Allocate memory for copies of tensors of these sizes in bytes, up to the limit.

        The memory is pinned if ``device``, from which the copies are made, is a GPU.
        """
        pieces = [sum(map(align_up, sizes)) for sizes in group_blocks(list(sizes))]
        remaining_bytes = itertools.accumulate(pieces, lambda remaining, piece: remaining - piece, initial=limit_bytes)
        blocks = [
            min(piece, remaining) // ALIGNMENT * ALIGNMENT
            for piece, remaining in zip(pieces, remaining_bytes, strict=False)
            if remaining > 0
        ]
        self.slabs = [Slab(memory) for memory in allocate_blocks(blocks, device, on_progress, "checkpoint.staging")]

    def allocate(self, n_bytes: int) -> Tensor | None:
        """Return a buffer of so many bytes, or None while there is no room."""
        return next((buffer for slab in self.slabs if (buffer := slab.allocate(n_bytes)) is not None), None)

    def free(self, buffer: Tensor) -> None:
        """Free a buffer for the next copies."""
        address = buffer.untyped_storage().data_ptr()
        next(slab for slab in self.slabs if slab.memory.untyped_storage().data_ptr() == address).free(buffer)


class TensorState(enum.Enum):
    """How far a tensor of the state has been read."""

    LIVE = enum.auto()  # neither read nor copied: it must not change
    READING = enum.auto()  # from where it lives: it must not change
    COPYING = enum.auto()  # it must not change
    STAGED = enum.auto()  # copied, and not read: it may change from here on
    READING_COPY = enum.auto()
    DONE = enum.auto()


BLOCKING_STATES = (TensorState.LIVE, TensorState.READING, TensorState.COPYING)  # an update must wait


@dataclasses.dataclass(slots=True, eq=False)
class TrackedTensor:
    """One tensor of the state."""

    tensor: Tensor
    pending_update: "concurrent.futures.Future[None] | None" = (
        None  # completes when the step that is saved has updated it
    )
    numbers: list[int] = dataclasses.field(default_factory=list)  # under which it is read
    buffer: Tensor | None = None  # its copy
    wait_copied: WaitForCopy = no_wait  # in the buffer
    state: TensorState = TensorState.LIVE

    def check_shape(self, tensor: Tensor) -> None:
        """Refuse a tensor at the same address that is not the same."""
        if tensor.shape != self.tensor.shape:
            raise RuntimeError(f"{tuple(self.tensor.shape)} elements are saved of {tuple(tensor.shape)}")


@dataclasses.dataclass(slots=True)
class SnapshotStats:
    """How a state was read, and how long updates waited for it."""

    in_place_bytes: int = 0  # from where it lives
    staged_bytes: int = 0  # from a copy
    wait_bytes: int = 0  # of them: tensors whose update had to wait
    wait_s: float = 0.0


class CopyOnUpdate:
    """The state after one step, read by several threads while ``before_update`` guards what changes."""

    def __init__(
        self,
        units: Sequence[UpdateUnit],
        tensors: Sequence[Tensor],
        staging: Staging,
        next_update_s: float | None = None,
    ) -> None:
        """``tensors``: what ``read`` yields, numbered in this order; ``units``: those that change, in the order of their updates.

        ``next_update_s``: seconds until the next updates are due; None: unknown, nothing is copied ahead.
        """
        self.staging = staging
        self.stats = SnapshotStats()
        self.condition = threading.Condition()
        unchanging: dict[int, TrackedTensor] = {}  # by address, as are those that change
        for number, tensor in enumerate(tensors):
            entry = unchanging.setdefault(tensor.data_ptr(), TrackedTensor(tensor))
            entry.check_shape(tensor)
            entry.numbers.append(number)
        self.tracked_tensors: dict[int, TrackedTensor] = {}
        for unit in units:
            for tensor in unit.tensors:
                if changing := unchanging.pop(tensor.data_ptr(), None):
                    changing.check_shape(tensor)
                    changing.pending_update = unit.last_update
                    self.tracked_tensors[tensor.data_ptr()] = changing
        self.entries = [*unchanging.values(), *self.tracked_tensors.values()]
        self.live_queue = collections.deque(self.entries)  # in the order in which updates will want to change them
        self.staged_queue: collections.deque[TrackedTensor] = collections.deque()
        self.n_unfinished = len(self.entries)
        self.untouched_bytes = sum(entry.tensor.nbytes for entry in self.entries)  # neither read nor copied
        self.is_updating = self.is_starved = self.is_abandoned = (
            False  # updates have begun; one waits for room; the save failed
        )
        for unit in units:
            if unit.last_update:
                unit.last_update.add_done_callback(self._wake_waiters)
        gpu = next((entry.tensor.device for entry in self.live_queue if entry.tensor.is_cuda), None)
        self.stream = torch.cuda.Stream(gpu) if gpu else None
        if self.stream:  # on a GPU, copies are cheap and memory is scarce
            self.stream.wait_stream(torch.cuda.current_stream(gpu))
            for entry in self.tracked_tensors.values():
                if (buffer := self._allocate_buffer(entry)) is not None:
                    self._claim(entry, TensorState.COPYING)
                    self._copy_to_staging(entry, buffer)
        self.start_s, self.next_update_s = time.perf_counter(), next_update_s
        if next_update_s is not None and self.stream is None:
            threading.Thread(target=self._copy_ahead, name="stage", daemon=True).start()

    def read(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each tensor with its number, in CPU memory; several threads share the work.

        A tensor is valid until the next one is requested.
        """
        while entry := self._wait_for_readable():
            try:
                if entry.pending_update:
                    entry.pending_update.result()
                with on_stream(self.stream):  # on its GPU: a wait on another would make a context there
                    entry.wait_copied()
                    source = entry.tensor if entry.buffer is None else _view_like(entry.tensor, entry.buffer)
                    content = source.detach().cpu()
                yield from ((number, content) for number in entry.numbers)
            finally:
                with self.condition:
                    self._finish(entry)

    @torch.no_grad()
    def before_update(self, tensors: Iterable[Tensor]) -> None:
        """Wait until these tensors may change: each has been read or copied."""
        for tensor in tensors:
            if entry := self.tracked_tensors.get(tensor.data_ptr()):
                self._wait_or_copy(entry)

    def abandon(self) -> None:
        """Release all tensors and end ``read``: the save failed."""
        with self.condition:
            self.is_abandoned = True
            for entry in self.entries:
                self._finish(entry)
            self.entries = []  # FSDP1's are copies
            self.live_queue.clear()

    def _wait_for_readable(self) -> TrackedTensor | None:
        """Wait for a tensor that can be read and return it; None if all have been read."""
        with self.condition:
            while self.n_unfinished and not self.is_abandoned:
                if entry := self._pick_readable():
                    return entry
                self.condition.wait()
        return None

    def _pick_readable(self) -> TrackedTensor | None:
        """Pick the tensor to read next so that updates wait least.

        Before updates begin: the tensor that is updated first. While updates run and tensors are copied for them: copies, which
        frees staging memory, then the tensor that is updated last. If staging is full: the tensor that an update waits for.
        """
        if self.is_updating and not self.is_starved:
            return self._pop_staged() or self._pop_live(-1)
        return self._pop_live(0) or self._pop_staged()

    def _pop_live(self, end: int) -> TrackedTensor | None:
        """Return the first (0) or last (-1) tensor that no thread has claimed, once it has been updated."""
        while self.live_queue:
            entry = self.live_queue[end]
            is_claimed = entry.state is not TensorState.LIVE
            if not is_claimed and entry.pending_update and not entry.pending_update.done():
                return None
            del self.live_queue[end]
            if is_claimed:
                continue
            self._claim(entry, TensorState.READING)
            return entry
        return None

    def _pop_staged(self) -> TrackedTensor | None:
        if not self.staged_queue:
            return None
        entry = self.staged_queue.popleft()
        entry.state = TensorState.READING_COPY
        return entry

    def _claim(self, entry: TrackedTensor, state: TensorState) -> None:
        entry.state = state
        self.untouched_bytes -= entry.tensor.nbytes

    def _wait_or_copy(self, entry: TrackedTensor) -> None:
        start_s = time.perf_counter()
        has_waited = False
        buffer = None
        with self.condition:
            while entry.state in BLOCKING_STATES:
                self.is_updating = True
                is_live = entry.state is TensorState.LIVE
                if is_live and (buffer := self._allocate_buffer(entry)) is not None:
                    self._claim(entry, TensorState.COPYING)
                    break
                has_waited, self.is_starved = True, is_live
                self.condition.wait()
            self.is_starved = False
            if has_waited:
                self.stats.wait_bytes += entry.tensor.nbytes
                self.stats.wait_s += time.perf_counter() - start_s
        if buffer is not None:
            self._copy_to_staging(entry, buffer)
        entry.wait_copied()

    @torch.no_grad()
    def _copy_ahead(self) -> None:
        """Copy, from the end, tensors that will not be read before updates begin, so that these need not wait."""
        assert self.next_update_s is not None
        lower_thread_priority()
        while True:
            with self.condition:
                if self.is_updating or self.is_abandoned or not self.untouched_bytes:
                    return
                elapsed_s = time.perf_counter() - self.start_s
                readable_bytes = self.stats.in_place_bytes / elapsed_s * (self.next_update_s - elapsed_s)
                entry = self._pop_live(-1) if self.untouched_bytes > readable_bytes else None
                if entry is None:
                    self.condition.wait(self.next_update_s / N_RATE_CHECKS)
                    continue
                entry.state, buffer = TensorState.COPYING, self._allocate_buffer(entry)
                if buffer is None:
                    entry.state = TensorState.LIVE
                    self.untouched_bytes += entry.tensor.nbytes
                    self.live_queue.append(entry)
                    return
            self._copy_to_staging(entry, buffer)

    def _allocate_buffer(self, entry: TrackedTensor) -> Tensor | None:
        return self.staging.allocate(entry.tensor.nbytes)

    def _copy_to_staging(self, entry: TrackedTensor, buffer: Tensor) -> None:
        """Copy a tensor that no thread is reading into its staging buffer."""
        wait_copied = async_copy([(_view_like(entry.tensor, buffer), entry.tensor)], self.stream)
        with self.condition:
            if entry.state is TensorState.DONE:
                self.staging.free(buffer)
                return
            entry.buffer = buffer
            entry.wait_copied = wait_copied
            entry.state = TensorState.STAGED
            self.staged_queue.append(entry)
            self.stats.staged_bytes += buffer.numel()
            self.condition.notify_all()

    def _finish(self, entry: TrackedTensor) -> None:
        if entry.state is TensorState.DONE:
            return
        if entry.state is TensorState.LIVE:
            self.untouched_bytes -= entry.tensor.nbytes
        entry.state = TensorState.DONE
        self.n_unfinished -= 1
        if entry.buffer is not None:
            self.staging.free(entry.buffer)
        else:
            self.stats.in_place_bytes += entry.tensor.nbytes
        self.condition.notify_all()

    def _wake_waiters(self, _: object) -> None:
        with self.condition:
            self.condition.notify_all()


def lower_thread_priority() -> None:
    """Lower the priority of this thread, so that it runs when no other thread wants its core."""
    # on Linux, niceness is per thread
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)


def _view_like(tensor: Tensor, buffer: Tensor) -> Tensor:
    return buffer.view(tensor.dtype).view(tensor.shape)
