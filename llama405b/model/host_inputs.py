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

from llama405b.distributed.host_memory import OnByteProgress, allocate_blocks, event_seconds, on_stream, record_time

N_BUFFERS = 2


@dataclasses.dataclass(slots=True)
class InputTransfers:
    """Bytes copied and time waited for layer inputs in a step."""

    input_bytes: int = 0  # copied, both ways
    input_wait_s: float = 0.0  # the device waited for copies


@dataclasses.dataclass(slots=True)
class OffloadedInput:
    """One layer's input in CPU memory."""

    slot: Tensor
    previous: "OffloadedInput | None"  # the previous layer's input, in the same forward
    device_copy: Tensor | None = None  # the copy on the device, complete once ``copied``
    copied: torch.cuda.Event | None = None


def offload_inputs(
    model: nn.Module,
    max_inputs: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnByteProgress,
) -> "HostInputs":
    """Make a model with activation checkpointing keep its layer inputs in CPU memory.

    ``max_inputs``: the most inputs at a time; ``shape``: of one, (B, S, h); ``dtype``: of hidden states; ``on_progress``: called with
    progress.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    inputs = HostInputs(max_inputs, shape, dtype, device, on_progress)
    inputs.attach(model)
    return inputs


class HostInputs:
    """Layer inputs in CPU memory, for a model whose layers are wrapped for activation checkpointing."""

    def __init__(
        self,
        max_inputs: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnByteProgress,
    ) -> None:
        """Allocate memory for the inputs, each (B, S, h); ``on_progress``: called with progress.

        Raises:
            UserError: CUDA cannot pin that much.
        """
        self.shape, self.device = shape, device
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        blocks = allocate_blocks([n_bytes] * max_inputs, device, on_progress, "model.activations")
        self.free_slots = [block.view(dtype).view(shape) for block in blocks]
        self.buffers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(N_BUFFERS)]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.latest: OffloadedInput | None = None  # input of this forward
        self.outgoing: tuple[Tensor, torch.cuda.Event | None] | None = (
            None  # tensor still on the device, and its copy's event
        )
        self.waits: list[tuple[Any, Any]] = []
        self.copied_bytes = 0

    def attach(self, model: nn.Module) -> None:
        """Hook the model's wrapped layers, so that their inputs are offloaded."""
        model.register_forward_pre_hook(self._reset)
        for module in model.modules():
            if isinstance(module, CheckpointWrapper):
                module.forward = functools.partial(self._forward, module.forward)

    def work(self) -> InputTransfers:
        """Return and reset the statistics since the last call; the device must have finished the step."""
        waits, self.waits = self.waits, []
        copied_bytes, self.copied_bytes = self.copied_bytes, 0
        return InputTransfers(copied_bytes, sum(event_seconds(*wait) for wait in waits))

    def _reset(self, *_: object) -> None:
        self.latest = None

    def _forward(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with saved_tensors_hooks(self._offload, self._restore):
            return forward(*args, **kwargs)

    def _offload(self, tensor: Tensor) -> Tensor | OffloadedInput:
        """Start to copy a saved tensor to CPU memory if it has the shape of a layer input."""
        if tensor.shape != self.shape:
            return tensor
        self._release_outgoing()
        self.latest = entry = OffloadedInput(self.free_slots.pop(), self.latest)
        self.outgoing = tensor, self._copy(entry.slot, tensor)
        return entry

    def _release_outgoing(self) -> None:
        """Wait for the copy of the latest input and free its device memory."""
        if self.outgoing:
            self._wait(self.outgoing[1])
        self.outgoing = None

    def _restore(self, entry: Tensor | OffloadedInput) -> Tensor:
        """Return a layer's input on the device, and start to copy the previous layer's."""
        if isinstance(entry, Tensor):
            return entry
        self._release_outgoing()
        if entry.device_copy is None:
            self._prefetch(entry)
        self._wait(entry.copied)
        if entry.previous:
            self._prefetch(entry.previous)
        device_copy, entry.previous, entry.device_copy = entry.device_copy, None, None
        assert device_copy is not None
        return device_copy

    def _prefetch(self, entry: OffloadedInput) -> None:
        """Start to copy an input into the older of the two buffers; the backward of its layer has ended."""
        buffer = self.buffers.pop(0)
        self.buffers.append(buffer)
        entry.device_copy, entry.copied = buffer, self._copy(buffer, entry.slot)
        self.free_slots.append(entry.slot)  # the next copy into the slot runs after this one, on the same stream

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Start a copy after the compute stream has finished with both tensors; return its event."""
        self.copied_bytes += source.nbytes
        if self.stream:
            # The source must be written, and the target no longer read, before the copy starts.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), on_stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event() if self.stream else None

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is None:
            return
        start = record_time(cuda=True)
        torch.cuda.current_stream(self.device).wait_event(event)
        self.waits.append((start, record_time(cuda=True)))
