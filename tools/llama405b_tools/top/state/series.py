"""Quantities over minutes, hours and a whole run, in a bounded number of buckets. Pure."""

import array
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

WINDOWS_S = (600.0, 3600.0, 8 * 3600.0, math.inf)  # the last is the whole run
WINDOW_WORDS = ("10 minutes", "1 hour", "8 hours", "the whole run")
N_BUCKETS, N_COLUMNS = 240, 120  # per window: of one quantity; of one of every GPU
UNKNOWN = -1.0  # in an array


class Bucket(NamedTuple):
    """What a quantity was in a time."""

    n: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """The mean."""
        return self.total / self.n

    def joined(self, other: "Bucket") -> "Bucket":
        """Return both as one."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Bucket(self.n + other.n, self.total + other.total, low, high)


@dataclasses.dataclass(slots=True)
class Series:
    """One quantity, in buckets of each window's length; those of the whole run grow with it."""

    rings: tuple[dict[int, Bucket], ...] = dataclasses.field(default_factory=lambda: tuple({} for _ in WINDOWS_S))
    run_bucket_s: float = WINDOWS_S[0] / N_BUCKETS
    last: float = -math.inf  # time of the last value

    def bucket_s(self, window: int) -> float:
        """Return how long a bucket is."""
        return self.run_bucket_s if math.isinf(WINDOWS_S[window]) else WINDOWS_S[window] / N_BUCKETS

    def add(self, time: float, value: float | None) -> None:
        """Add a value, later than those before."""
        if value is None or time <= self.last:
            return
        self.last = time
        for window, ring in enumerate(self.rings):
            at, new = int(time // self.bucket_s(window)), Bucket(1, value, value, value)
            ring[at] = ring[at].joined(new) if at in ring else new
            while len(ring) > N_BUCKETS and not math.isinf(WINDOWS_S[window]):
                del ring[next(iter(ring))]
        if len(self.rings[-1]) > 2 * N_BUCKETS:
            self._double()

    def _double(self) -> None:
        """Make the buckets of the whole run twice as long."""
        ring = self.rings[-1]
        before = list(ring.items())
        ring.clear()
        self.run_bucket_s *= 2
        for at, bucket in before:
            ring[at // 2] = ring[at // 2].joined(bucket) if at // 2 in ring else bucket

    def columns(self, window: int, begin: float, end: float, n: int) -> list[Bucket | None]:
        """Return ``n`` columns from ``begin`` to ``end``; None where nothing is known.

        A value lasts until the next one, if that is not much later than those before were apart.
        """
        ring, bucket_s = self.rings[window], self.bucket_s(window)
        inside = [(at, ring[at]) for at in ring if (at + 1) * bucket_s > begin and at * bucket_s <= end]
        gaps = sorted(later - at for (at, _), (later, _) in itertools.pairwise(inside))
        lasts = (max(1, 2 * gaps[len(gaps) // 2]) if gaps else 1) * bucket_s
        columns: list[Bucket | None] = [None] * n
        column_s = (end - begin) / n
        for at, bucket in inside:
            column = min(n - 1, max(0, int((at * bucket_s - begin) / column_s)))
            there = columns[column]
            columns[column] = there.joined(bucket) if there else bucket
        held, since = None, -math.inf
        for i in range(n):
            moment = begin + i * column_s
            if columns[i]:
                held, since = columns[i], moment
            elif moment - since <= lasts + column_s:
                columns[i] = held
        return columns

    def begins(self, window: int) -> float:
        """Return when its first known value of a window was; infinity if there is none."""
        return next(iter(self.rings[window]), math.inf) * self.bucket_s(window)


@dataclasses.dataclass(slots=True)
class Grid:
    """One quantity of every GPU (else rank) of every host, in columns of each window's length."""

    columns: tuple[dict[int, "array.array[float]"], ...] = dataclasses.field(
        default_factory=lambda: tuple({} for _ in WINDOWS_S)
    )
    counts: list["array.array[float]"] = dataclasses.field(
        default_factory=lambda: [array.array("f") for _ in WINDOWS_S]
    )
    run_column_s: float = WINDOWS_S[0] / N_COLUMNS

    def column_s(self, window: int) -> float:
        """Return how long a column is."""
        return self.run_column_s if math.isinf(WINDOWS_S[window]) else WINDOWS_S[window] / N_COLUMNS

    def add(self, time: float, values: "array.array[float]") -> None:
        """Add the values of a moment, ``UNKNOWN`` where they are not known, to the mean of its column."""
        for window, ring in enumerate(self.columns):
            at, counts = int(time // self.column_s(window)), self.counts[window]
            if at in ring:
                ring[at], self.counts[window] = _mean(ring[at], counts, values)
            else:
                ring[at], self.counts[window] = values, array.array("f", [float(v >= 0) for v in values])
            while len(ring) > N_COLUMNS and not math.isinf(WINDOWS_S[window]):
                del ring[next(iter(ring))]
        if len(self.columns[-1]) > 2 * N_COLUMNS:
            self.run_column_s *= 2
            ring = self.columns[-1]
            kept = {at // 2: values for at, values in ring.items()}  # of two, the later
            ring.clear()
            ring.update(kept)

    def change(self, remap: Callable[["array.array[float]"], "array.array[float]"]) -> None:
        """Give every column another order."""
        for ring in self.columns:
            for at in ring:
                ring[at] = remap(ring[at])
        self.counts = [
            array.array("f", [float(v >= 0) for v in next(reversed(ring.values()), ())]) for ring in self.columns
        ]


def _mean(
    before: "array.array[float]", counts: "array.array[float]", new: "array.array[float]"
) -> tuple["array.array[float]", "array.array[float]"]:
    """Return the mean of what was known, and of how many values each is."""
    means, ns = array.array("f"), array.array("f")
    for mean, n, value in zip(before, counts, new, strict=True):
        if value < 0:
            means.append(mean)
            ns.append(n)
        else:
            means.append((n * mean + value) / (n + 1))  # the mean of nothing has no weight
            ns.append(n + 1)
    return means, ns
