"""Offload the inputs of checkpointed decoder layers to CPU memory between forward and backward.

An input is copied to the host while its layer computes, and its device memory is freed when the next layer begins. The backward copies
it back one layer ahead, into one of two buffers. So a device holds two inputs and two buffers, for any number of layers. All copies run
on one stream, and only the compute stream waits for them. Everything is allocated before training.

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
    """Bytes copied and time waited for layer inputs in a step."""

    input_bytes: int = 0  # copied, both ways
    input_wait_s: float = 0.0  # the device waited for copies


@dataclasses.dataclass(slots=True)
class Kept:
    """One layer's input in CPU memory."""

    slot: Tensor
    before: "Kept | None"  # the previous layer's input, in the same forward
    back: Tensor | None = None  # the copy on the device, complete once ``came``
    came: torch.cuda.Event | None = None


def keep_on_host(
    model: nn.Module,
    count: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    pinning: Progress,
) -> "HostInputs":
    """Make a model with activation checkpointing keep its layer inputs in CPU memory.

    ``count``: the most inputs at a time; ``shape``: of one, (B, S, h); ``dtype``: of hidden states; ``pinning``: called with progress.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    inputs = HostInputs(count, shape, dtype, device, pinning)
    inputs.attach(model)
    return inputs


class HostInputs:
    """Layer inputs in CPU memory, for a model whose layers are wrapped for activation checkpointing."""

    def __init__(
        self, count: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, pinning: Progress
    ) -> None:
        """Allocate memory for the inputs, each (B, S, h); ``pinning``: called with progress.

        Raises:
            UserError: CUDA cannot pin that much.
        """
        self.shape, self.device = shape, device
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        blocks = allocate([n_bytes] * count, device, pinning, "model.activations")
        self.free = [block.view(dtype).view(shape) for block in blocks]
        self.buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(BUFFERS)]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: Kept | None = None  # input of this forward
        self.leaving: tuple[Tensor, torch.cuda.Event | None] | None = (
            None  # tensor still on the device, and its copy's event
        )
        self.waits: list[tuple[Any, Any]] = []
        self.crossed = 0

    def attach(self, model: nn.Module) -> None:
        """Hook the model's wrapped layers, so that their inputs are offloaded."""
        model.register_forward_pre_hook(self._begin)
        for module in model.modules():
            if isinstance(module, CheckpointWrapper):
                module.forward = functools.partial(self._forward, module.forward)

    def work(self) -> InputWork:
        """Return and reset the statistics since the last call; the device must have finished the step."""
        waits, self.waits = self.waits, []
        crossed, self.crossed = self.crossed, 0
        return InputWork(crossed, sum(seconds_between(*each) for each in waits))

    def _begin(self, *_: object) -> None:
        self.last = None

    def _forward(self, forward: Callable[..., Tensor], *args: Any, **more: Any) -> Tensor:
        with saved_tensors_hooks(self._leave, self._come_back):
            return forward(*args, **more)

    def _leave(self, saved: Tensor) -> Tensor | Kept:
        """Start to copy a saved tensor to CPU memory if it has the shape of a layer input."""
        if saved.shape != self.shape:
            return saved
        self._let_go()
        self.last = kept = Kept(self.free.pop(), self.last)
        self.leaving = saved, self._copy(kept.slot, saved)
        return kept

    def _let_go(self) -> None:
        """Wait for the copy of the latest input and free its device memory."""
        if self.leaving:
            self._wait(self.leaving[1])
        self.leaving = None

    def _come_back(self, kept: Tensor | Kept) -> Tensor:
        """Return a layer's input on the device, and start to copy the previous layer's."""
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
        """Start to copy an input into the older of the two buffers; the backward of its layer has ended."""
        buffer = self.buffers.pop(0)
        self.buffers.append(buffer)
        kept.back, kept.came = buffer, self._copy(buffer, kept.slot)
        self.free.append(kept.slot)  # the next copy into the slot runs after this one, on the same stream

    def _copy(self, to: Tensor, of: Tensor) -> torch.cuda.Event | None:
        """Start a copy after the compute stream has finished with both tensors; return its event."""
        self.crossed += of.nbytes
        if self.stream:
            # The source must be written, and the target no longer read, before the copy starts.
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
