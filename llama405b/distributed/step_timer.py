"""How long the parts of a step take. Uses CUDA events, so that measuring does not stall the GPU."""

import time
from collections import defaultdict
from typing import Any

import torch


class StepTimer:
    """Marks the end of each part; a part may end more than once per step (micro-batches)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, part: str) -> None:
        """Mark the end of ``part``."""
        self.marks.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in zip(self.marks, self.marks[1:], strict=False):
            total[part] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return total

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
