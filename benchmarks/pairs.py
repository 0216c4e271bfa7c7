"""Measurements in turns, and their statistics."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

WARMUP = 2  # of each, before measuring


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """The median of ratios, with its distribution-free 95 % interval (order statistics of the binomial distribution)."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def ratio_of(ours: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Compare two series that were measured in turns, pair by pair."""
    ratios = sorted(mine / other for mine, other in zip(ours, baseline, strict=True))
    n = len(ratios)
    off = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return Ratio(statistics.median(ratios), ratios[off], ratios[n - 1 - off], n)


def in_turns(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Return the seconds, by this clock, of two acts that take turns, after a warmup of each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(WARMUP + pairs):
        for act, series in zip((ours, baseline), seconds, strict=True):
            began = clock()
            act()
            if i >= WARMUP:
                series.append(clock() - began)
    return seconds
