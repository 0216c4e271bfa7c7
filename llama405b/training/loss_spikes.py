"""Loss spikes: a loss far above those of the last steps. Knows losses alone."""

import collections
import statistics
from collections.abc import Iterable

WINDOW = 64  # steps whose median is compared with
MIN_STEPS = 16  # before these no loss is a spike
MAX_SKIPPED = 16  # in a row: then something else is wrong


class SpikeDetector:
    """The losses of the last steps."""

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        """``factor``: times the median of the last losses, above which a loss is a spike; ``losses``: those of steps before."""
        self.factor, self.losses = factor, collections.deque(losses, maxlen=WINDOW)
        self.skipped = 0  # steps in a row that changed no weight, for whatever reason

    @classmethod
    def replay(cls, factor: float, losses: Iterable[float], *, always: bool = False) -> "SpikeDetector":
        """Return what has seen the losses of earlier steps, as ``update`` sees them."""
        detector = cls(factor)
        for loss in losses:
            detector.update(loss, always=always)
        return detector

    @property
    def median(self) -> float | None:
        """The median of the last losses; None if there were too few steps."""
        return statistics.median(self.losses) if len(self.losses) >= MIN_STEPS else None

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is a spike."""
        return self.median is not None and loss > self.factor * self.median

    def skip(self) -> None:
        """Count a step that changed no weight."""
        self.skipped += 1

    def update(self, loss: float, *, always: bool = False) -> bool:
        """Return whether a step's loss is a spike; it counts for the median if it is not, or ``always``."""
        is_spike = self.is_spike(loss)
        if always or not is_spike:
            self.skipped = 0
            self.losses.append(loss)
        else:
            self.skip()
        return is_spike
