"""Copies between CPU memory and a GPU that nobody waits for. On a CPU they are plain."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

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
