"""Measure how long a rank itself computes in a step, without its waits for other ranks (FSDP2's all-gathers wait for the slowest rank).

Busy time includes the forward and backward of the model with its loss, and recomputation. It excludes FSDP2's work before and after each
unit (all-gather of weights, reduction of gradients, copies for both), waits for an update of a unit's weights, and the collectives of
loss and norm.

On a GPU the marks are events on the compute stream, which waits for each all-gather before them. Gaps in which the host launches kernels
too slowly count as busy, except within FSDP2's work.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llama405b.distributed.host_memory import event_seconds, record_time
from llama405b.parallel.fsdp_internals import wrap_backward


class BusyMeter:
    """Adds up the busy spans of a step. Attach it after the updater: its hooks must run before those that wait for updates."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []  # begin of a span, its end, begin of the next span, …

    def attach(self, model: nn.Module) -> None:
        """Measure a model that FSDP2 has sharded.

        Raises:
            AttributeError: This version of torch lacks what ``fsdp_internals`` uses.
        """
        wrap_backward(model, self._exclude, self._pause)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._pause, prepend=True)
                module.register_forward_pre_hook(self._resume_after_gather)

    def seconds(self) -> float | None:
        """Return the busy seconds since the last call and reset; None if no span has ended.

        On a GPU, call it after the step has waited for the device; this method does not wait.
        """
        begins, ends = self.moments[::2], self.moments[1::2]
        self.moments = []
        return sum(map(event_seconds, begins, ends)) if ends else None

    def _resume_after_gather(self, *_: object) -> None:
        if torch.is_grad_enabled():  # otherwise this is an evaluation
            self._resume()

    def _exclude(self, function: Callable[..., None]) -> Callable[..., None]:
        """Wrap a method of FSDP2 so that its time is not counted."""

        @functools.wraps(function)
        def call(*args: object) -> None:
            was_counting = self._is_counting
            self._pause()
            function(*args)
            if was_counting:
                self._resume()

        return call

    @property
    def _is_counting(self) -> bool:
        return len(self.moments) % 2 == 1

    def _pause(self, *_: object) -> None:
        if self._is_counting:
            self.moments.append(record_time(cuda=self.cuda))

    def _resume(self) -> None:
        if not self._is_counting:
            self.moments.append(record_time(cuda=self.cuda))
