"""Statistics of paired measurements. Pure."""

import dataclasses
import math
import statistics
from collections.abc import Sequence


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
