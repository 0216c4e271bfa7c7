"""How long the parts of a step take. Uses CUDA events, so that measuring does not stall the GPU."""

import time
from collections import defaultdict
from typing import Any

import torch


class StepTimer:
    """Marks the end of each part; a part may end more than once per step (micro-batches)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = [("", moment(cuda=self.cuda))]

    def mark(self, part: str) -> None:
        """Mark the end of ``part``."""
        self.marks.append((part, moment(cuda=self.cuda)))

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in zip(self.marks, self.marks[1:], strict=False):
            total[part] += seconds_between(begin, end)
        return total


def moment(*, cuda: bool) -> Any:
    """Return the time; with ``cuda`` an event, whose time is when the current stream gets there."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments; events must have happened, and torch refuses those that have not."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    return float(end - begin)
