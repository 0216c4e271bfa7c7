"""Inputs of decoder layers in CPU memory: what checkpointing keeps of each between a forward and its backward.

An input leaves the device while its layer computes, and its memory there is given back as the next layer begins. In the backward it comes
back one layer ahead, into one of two buffers. So a device holds two inputs, and two buffers, of however many layers. All copies are on
one stream, and only the stream that computes waits for them. Everything is allocated before training.

Shape suffixes: B sequences, S positions, h hidden size.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from llama405b.distributed.host_memory import Progress, allocate, moment, on_stream, seconds_between

BUFFERS = 2


@dataclasses.dataclass(slots=True)
class InputWork:
    """What the inputs of a step's layers took."""

    input_bytes: int = 0  # that crossed, both ways
    input_wait_s: float = 0.0  # that the device waited for them


@dataclasses.dataclass(slots=True)
class Kept:
    """One layer's input, in CPU memory."""

    slot: Tensor
    before: "Kept | None"  # that of the layer before it, in the same forward
    back: Tensor | None = None  # on the device again, once ``came``
    came: torch.cuda.Event | None = None


def keep_on_host(
    model: nn.Module,
    count: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    pinning: Progress,
) -> "HostInputs":
    """Have a model with activation checkpointing keep its layers' inputs in CPU memory.

    ``count``: how many wait there at most; ``shape``: of one, (B, S, h); ``dtype``: of hidden states; ``pinning`` hears of the progress.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    inputs = HostInputs(count, shape, dtype, device, pinning)
    inputs.attach(model)
    return inputs


class HostInputs:
    """Keeps them for a model whose layers are wrapped for activation checkpointing."""

    def __init__(
        self, count: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, pinning: Progress
    ) -> None:
        """Allocate memory for so many inputs at a time, each (B, S, h); ``pinning`` hears of the progress.

        Raises:
            UserError: CUDA cannot pin that much.
        """
        self.shape, self.device = shape, device
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        blocks = allocate([n_bytes] * count, device, pinning, "model.activations")
        self.free = [block.view(dtype).view(shape) for block in blocks]
        self.buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(BUFFERS)]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: Kept | None = None  # of this forward
        self.leaving: tuple[Tensor, torch.cuda.Event | None] | None = None  # still on the device, until it was copied
        self.waits: list[tuple[Any, Any]] = []
        self.crossed = 0

    def attach(self, model: nn.Module) -> None:
        """Take over what the model's wrapped layers keep."""
        model.register_forward_pre_hook(self._begin)
        for module in model.modules():
            if isinstance(module, CheckpointWrapper):
                module.forward = functools.partial(self._forward, module.forward)

    def work(self) -> InputWork:
        """Return what inputs took since the last call; the device must be done with it."""
        waits, self.waits = self.waits, []
        crossed, self.crossed = self.crossed, 0
        return InputWork(crossed, sum(seconds_between(*each) for each in waits))

    def _begin(self, *_: object) -> None:
        self.last = None

    def _forward(self, forward: Callable[..., Tensor], *args: Any, **more: Any) -> Tensor:
        with saved_tensors_hooks(self._leave, self._come_back):
            return forward(*args, **more)

    def _leave(self, saved: Tensor) -> Tensor | Kept:
        """Copy a layer's input to CPU memory, if it is one."""
        if saved.shape != self.shape:
            return saved
        self._let_go()
        self.last = kept = Kept(self.free.pop(), self.last)
        self.leaving = saved, self._copy(kept.slot, saved)
        return kept

    def _let_go(self) -> None:
        """Give back the memory of the input that left last; by then it was copied."""
        if self.leaving:
            self._wait(self.leaving[1])
        self.leaving = None

    def _come_back(self, kept: Tensor | Kept) -> Tensor:
        """Return a layer's input, and begin to copy that of the layer before it."""
        if isinstance(kept, Tensor):
            return kept
        self._let_go()
        if kept.back is None:
            self._fetch(kept)
        self._wait(kept.came)
        if kept.before:
            self._fetch(kept.before)
        back, kept.before, kept.back = kept.back, None, None
        assert back is not None
        return back

    def _fetch(self, kept: Kept) -> None:
        """Begin to copy an input into the buffer that was used before the last one: its layer's backward is over."""
        buffer = self.buffers.pop(0)
        self.buffers.append(buffer)
        kept.back, kept.came = buffer, self._copy(buffer, kept.slot)
        self.free.append(kept.slot)  # what is copied there next is copied after this

    def _copy(self, to: Tensor, of: Tensor) -> torch.cuda.Event | None:
        """Copy once the stream that computes is done with both."""
        self.crossed += of.nbytes
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), on_stream(self.stream):
            to.copy_(of, non_blocking=True)
        return self.stream.record_event() if self.stream else None

    def _wait(self, copied: torch.cuda.Event | None) -> None:
        if copied is None:
            return
        began = moment(cuda=True)
        torch.cuda.current_stream(self.device).wait_event(copied)
        self.waits.append((began, moment(cuda=True)))
