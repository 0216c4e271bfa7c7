"""A loss far above what was usual. Knows losses alone."""

import collections
import statistics
from collections.abc import Iterable

WINDOW = 64  # steps that tell what is usual
LEAST = 16  # before these it is unknown
MOST_SKIPPED = 16  # in a row: the others are no longer usual


class SpikeDetector:
    """The losses of the last steps."""

    def __init__(self, times: float, losses: Iterable[float] = ()) -> None:
        """``times``: the median of the last steps' losses, above which a loss is a spike; ``losses``: what is usual."""
        self.times, self.losses = times, collections.deque(losses, maxlen=WINDOW)
        self.in_a_row = 0  # steps that were left out, for whatever reason

    @classmethod
    def after(cls, times: float, losses: Iterable[float], *, always: bool = False) -> "SpikeDetector":
        """Return what was usual after steps with these losses, heard as ``take`` hears them."""
        found = cls(times)
        for loss in losses:
            found.take(loss, always=always)
        return found

    @property
    def usual(self) -> float | None:
        """The median; None if there were too few steps."""
        return statistics.median(self.losses) if len(self.losses) >= LEAST else None

    def is_one(self, loss: float) -> bool:
        """Whether a loss is a spike."""
        return self.usual is not None and loss > self.times * self.usual

    def leave_out(self) -> None:
        """Count a step that did not change the weights."""
        self.in_a_row += 1

    def take(self, loss: float, *, always: bool = False) -> bool:
        """Hear a step's loss, which is usual if it is no spike, or ``always``; returns whether it is a spike."""
        is_one = self.is_one(loss)
        if always or not is_one:
            self.in_a_row = 0
            self.losses.append(loss)
        else:
            self.leave_out()
        return is_one
