"""How long a rank itself computes in a step, without waiting for the others: FSDP2's gathers wait for the slowest rank.

Counted are the decoder layers: the forward from where a layer's weights are gathered to its output, and the backward from where they
are gathered again to the gradient of its input, with what is recomputed. Not counted are the embedding, the head and the loss.
On a GPU the marks are events on the stream that computes, which waits for each gather before them; gaps within a layer, in
which the host is too slow to launch kernels, count as well.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class BusyMeter:
    """Adds up the spans of a step. Attach it after sharding, since its hooks must run within those of FSDP2."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []
        self.begin: Any = None  # of the span that is under way
        self.in_backward = False  # then a forward is a recomputation, within a span

    def attach(self, model: nn.Module) -> None:
        """Watch every decoder layer of a model that is sharded."""
        for layer in model.modules():
            if isinstance(layer, LlamaDecoderLayer):
                layer.register_forward_pre_hook(self._forward_begins)  # after FSDP2's, which gathers
                layer.register_forward_hook(self._forward_ends, prepend=True)  # before FSDP2's
                layer.register_forward_hook(
                    self._watch_backward
                )  # after FSDP2's, so that its wait for the gather comes first

    def seconds(self) -> float | None:
        """Return the seconds since the last call, and begin anew; None if no span has ended.

        On a GPU, call it where the step has waited for the device: it does not wait itself.
        """
        spans, self.spans, self.begin, self.in_backward = self.spans, [], None, False
        if not spans:
            return None
        return sum(begin.elapsed_time(end) / 1000 if self.cuda else end - begin for begin, end in spans)

    def _forward_begins(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or self.in_backward:  # an evaluation; a recomputation
            return
        if isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(self._backward_ends)  # FSDP2's reduction hangs on the tensor that this one is made of
        self.begin = self._now()

    def _forward_ends(self, *_: Any) -> None:
        if not self.in_backward:
            self._end()

    def _watch_backward(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad and not self.in_backward:
            hidden.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        self.in_backward, self.begin = True, self._now()

    def _backward_ends(self, _: Tensor) -> None:
        self._end()
        self.in_backward = False

    def _end(self) -> None:
        if self.begin is not None:
            self.spans.append((self.begin, self._now()))
            self.begin = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
