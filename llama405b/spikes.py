"""A loss far above what was usual. Knows losses alone."""

import collections
import statistics
from collections.abc import Iterable

WINDOW = 64  # steps that tell what is usual
LEAST = 16  # before these it is unknown


class Spikes:
    """The losses of the last steps."""

    def __init__(self, times: float, losses: Iterable[float] = ()) -> None:
        """``times``: the median of the last steps' losses, above which a loss is a spike; ``losses``: all before."""
        self.times, self.losses = times, collections.deque[float](maxlen=WINDOW)
        for loss in losses:
            if not self.is_one(loss):
                self.add(loss)

    @property
    def usual(self) -> float | None:
        """The median; None if there were too few steps."""
        return statistics.median(self.losses) if len(self.losses) >= LEAST else None

    def is_one(self, loss: float) -> bool:
        """Whether a loss is a spike."""
        return self.usual is not None and loss > self.times * self.usual

    def add(self, loss: float) -> None:
        """Take a step's loss as usual."""
        self.losses.append(loss)
