"""What all GPUs and links of a run do together, against their own last ten minutes. Pure.

A fall of everybody is no deviation from the median of the others, and is seen here. A run may idle in every step (an
update on the CPU) or while it saves: what is judged is a fall that lasts longer than any before.
"""

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from llama405b_tools.top.state import thresholds


class Fall(NamedTuple):
    """A level that has fallen."""

    usual: float
    now: float
    lasts_s: float


@dataclasses.dataclass(slots=True)
class Level:
    """One quantity over the last ten minutes in which the run trained."""

    # time, value
    samples: collections.deque[tuple[float, float]] = dataclasses.field(default_factory=collections.deque)

    def add(self, now: float, value: float | None, every_s: float) -> None:
        """Add a value, at most one per interval."""
        if value is None or (self.samples and now - self.samples[-1][0] < 0.9 * every_s):
            return
        self.samples.append((now, value))
        while now - self.samples[0][0] > thresholds.LEVEL_S:
            self.samples.popleft()

    def fall(self, every_s: float) -> Fall | None:
        """Return how far it has fallen; None if it has not, or for no longer than it did before."""
        values = [value for _, value in self.samples]
        if len(values) < thresholds.LEVEL_SAMPLES:
            return None
        usual = statistics.median(values)
        runs = _low_runs(self.samples, thresholds.FALLEN * usual)
        last = self.samples[-1]
        if not runs or runs[-1][1] != last[0]:
            return None
        *before, (begin, end) = runs
        longest_s = max((until - since for since, until in before), default=0.0)
        lasts_s = end - begin
        if lasts_s < max(every_s, thresholds.LONGER * longest_s):
            return None
        return Fall(usual, last[1], lasts_s)


def _low_runs(samples: Sequence[tuple[float, float]], limit: float) -> list[tuple[float, float]]:
    """Return when the value was below the limit, each time from its first to its last sample."""
    runs: list[tuple[float, float]] = []
    was_low = False
    for moment, value in samples:
        is_low = value < limit
        if is_low:
            begin = runs.pop()[0] if was_low else moment
            runs.append((begin, moment))
        was_low = is_low
    return runs
