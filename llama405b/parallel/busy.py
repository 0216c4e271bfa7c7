"""How long a rank itself computes in a step, without waiting for the others: FSDP2's gathers wait for the slowest rank.

Counted are the forward and the backward of the whole model with its loss, and what is recomputed; not, before and after each unit, FSDP2's
part: the gather of its weights, the reduction of its gradients and the copies for both. Neither are the wait for an update
of a unit's weights and the collectives of loss and norm.
On a GPU the marks are events on the stream that computes, which waits for each gather before them. Gaps in which the host is too slow
to launch kernels count as well, but for those in FSDP2's part.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from llama405b.distributed.host_memory import moment, seconds_between


class BusyMeter:
    """Adds up the spans of a step. Attach it after the updater, whose hooks wait for updates: its own must come before those."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []  # a span's begin, its end, the next one's begin, …

    def attach(self, model: nn.Module) -> None:
        """Watch a model that FSDP2 has sharded.

        FSDP2's part of a backward is its own methods, which it looks up when it calls them. Hooks on tensors cannot tell it: recomputing
        a unit calls its forward hooks again within its backward, and of the embedding, whose input has no gradient, FSDP2
        reduces the gradient in a callback at the backward's end.

        Raises:
            AttributeError: This version of torch has no such methods; then nothing is measured.
        """
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for state in {id(state): state for state in map(fully_shard.state, modules)}.values():
            if group := state._fsdp_param_group:
                group.pre_backward = self._left_out(group.pre_backward)
                group.post_backward = self._left_out(group.post_backward)
            end = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = functools.partial(self._end_backward, end)
        for module in modules:
            module.register_forward_pre_hook(self._pause, prepend=True)
            module.register_forward_pre_hook(self._gathered)

    def seconds(self) -> float | None:
        """Return the seconds since the last call, and begin anew; None if no span has ended.

        On a GPU, call it where the step has waited for the device: it does not wait itself.
        """
        begins, ends = self.moments[::2], self.moments[1::2]
        self.moments = []
        return sum(map(seconds_between, begins, ends)) if ends else None

    def _gathered(self, *_: object) -> None:
        if torch.is_grad_enabled():  # else it is an evaluation
            self._resume()

    def _left_out(self, part: Callable[..., None]) -> Callable[..., None]:
        """Return a part of FSDP2 during which nothing is counted."""

        @functools.wraps(part)
        def call(*args: object) -> None:
            counts = self._counts
            self._pause()
            part(*args)
            if counts:
                self._resume()

        return call

    def _end_backward(self, end: Callable[[], None]) -> None:
        self._pause()
        end()

    @property
    def _counts(self) -> bool:
        return len(self.moments) % 2 == 1

    def _pause(self, *_: object) -> None:
        if self._counts:
            self.moments.append(moment(cuda=self.cuda))

    def _resume(self) -> None:
        if not self._counts:
            self.moments.append(moment(cuda=self.cuda))
