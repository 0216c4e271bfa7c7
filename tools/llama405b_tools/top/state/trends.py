"""Keep quantities over minutes, hours and the whole run, in a bounded number of buckets. Pure.

``take`` is called with every view. Graphs end at a view's time, so a paused screen can be redrawn.
"""

import array
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from llama405b_tools.text.figures import share
from llama405b_tools.top.state.frames import StepMetrics
from llama405b_tools.top.state.picture import (
    QUANTITIES,
    HostRow,
    Picture,
    Quantity,
    TrainingStatus,
    known,
    n_units,
    network,
)

WINDOWS_S = (600.0, 3600.0, 8 * 3600.0, math.inf)  # the last is the whole run
WINDOW_WORDS = ("10 minutes", "1 hour", "8 hours", "the whole run")
N_BUCKETS, N_COLUMNS = 240, 120  # per window: of one quantity; of one of every GPU
UNKNOWN = -1.0  # in an array


class Bucket(NamedTuple):
    """Count, sum and range of a quantity's values in one time bucket."""

    n: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """The mean."""
        return self.total / self.n

    def joined(self, other: "Bucket") -> "Bucket":
        """Return the union of two buckets."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Bucket(self.n + other.n, self.total + other.total, low, high)


@dataclasses.dataclass(slots=True)
class Series:
    """One quantity over time, in buckets per window; those of the whole run grow with it."""

    rings: tuple[dict[int, Bucket], ...] = dataclasses.field(default_factory=lambda: tuple({} for _ in WINDOWS_S))
    run_bucket_s: float = WINDOWS_S[0] / N_BUCKETS
    last: float = -math.inf  # time of the last value

    def bucket_s(self, window: int) -> float:
        """Return the length of a bucket in seconds."""
        return self.run_bucket_s if math.isinf(WINDOWS_S[window]) else WINDOWS_S[window] / N_BUCKETS

    def add(self, time: float, value: float | None) -> None:
        """Add a value; its time must be later than the last."""
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
        """Double the length of the whole run's buckets."""
        ring = self.rings[-1]
        before = list(ring.items())
        ring.clear()
        self.run_bucket_s *= 2
        for at, bucket in before:
            ring[at // 2] = ring[at // 2].joined(bucket) if at // 2 in ring else bucket

    def columns(self, window: int, begin: float, end: float, n: int) -> list[Bucket | None]:
        """Return ``n`` columns from ``begin`` to ``end``; None where nothing is known.

        A value is held until the next one, up to about twice the usual gap between values.
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
        """Return the time of a window's first value; infinity if there is none."""
        return next(iter(self.rings[window]), math.inf) * self.bucket_s(window)


@dataclasses.dataclass(slots=True)
class Grid:
    """One quantity of every GPU (or rank) of every host over time, in columns per window."""

    columns: tuple[dict[int, "array.array[float]"], ...] = dataclasses.field(
        default_factory=lambda: tuple({} for _ in WINDOWS_S)
    )
    counts: list["array.array[float]"] = dataclasses.field(
        default_factory=lambda: [array.array("f") for _ in WINDOWS_S]
    )
    run_column_s: float = WINDOWS_S[0] / N_COLUMNS

    def column_s(self, window: int) -> float:
        """Return the length of a column in seconds."""
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
        """Reorder the values of every column."""
        for ring in self.columns:
            for at in ring:
                ring[at] = remap(ring[at])
        self.counts = [
            array.array("f", [float(v >= 0) for v in next(reversed(ring.values()), ())]) for ring in self.columns
        ]


def _mean(
    before: "array.array[float]", counts: "array.array[float]", new: "array.array[float]"
) -> tuple["array.array[float]", "array.array[float]"]:
    """Return the means updated with new values, and the count behind each."""
    means, ns = array.array("f"), array.array("f")
    for mean, n, value in zip(before, counts, new, strict=True):
        if value < 0:
            means.append(mean)
            ns.append(n)
        else:
            means.append((n * mean + value) / (n + 1))  # the mean of nothing has no weight
            ns.append(n + 1)
    return means, ns


LEAST_S = 20.0  # shortest time span shown
KEPT_MARKS = 500
Layout = tuple[tuple[str, int], ...]  # hosts in order, and how many GPUs (else ranks) each has


class Mark(NamedTuple):
    """An event on the time axis."""

    time: float
    kind: str  # s: save, e: evaluation, r: restart


@dataclasses.dataclass(slots=True)
class Trends:
    """Everything sampled since cluster-top started, plus the run's earlier steps from its metrics."""

    run: str = ""
    steps: dict[str, Series] = dataclasses.field(default_factory=lambda: collections.defaultdict(Series))
    sums: dict[str, Series] = dataclasses.field(default_factory=lambda: collections.defaultdict(Series))
    grids: tuple[Grid, ...] = dataclasses.field(default_factory=lambda: tuple(Grid() for _ in QUANTITIES))
    layout: Layout = ()
    marks: "collections.deque[Mark]" = dataclasses.field(default_factory=lambda: collections.deque(maxlen=KEPT_MARKS))
    sampled: float = -math.inf
    saved: int | None = None  # the newest checkpoint's step
    attempt: int = 0

    def take(self, pic: Picture, steps: Iterable[tuple[float, StepMetrics]]) -> None:
        """Take a picture, and the steps of its run, newest first, by the operator's clock."""
        run = pic.training
        if run and run.run != self.run:
            self.run, self.saved, self.attempt = run.run, run.checkpoint_step, 0
            self.steps.clear()
            self.marks.clear()
        if run:
            self._take_steps(steps)
            self._mark_save(run, pic.time)
        if pic.time - self.sampled >= 0.9 * pic.interval_s:
            self.sampled = pic.time
            self._sample(pic)

    def _take_steps(self, steps: Iterable[tuple[float, StepMetrics]]) -> None:
        last = self.steps["steps"].last
        for time, each in reversed([*itertools.takewhile(lambda entry: entry[0] > last, steps)]):
            self.steps["steps"].add(time, each.step)
            if each.attempt > self.attempt > 0:
                self.marks.append(Mark(time, "r"))
            self.attempt = max(self.attempt, each.attempt)
            if each.evaluation_loss is not None:
                self.marks.append(Mark(time, "e"))
            for field in ("loss", "rate", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s"):
                self.steps[field].add(time, getattr(each, field))

    def _mark_save(self, run: TrainingStatus, now: float) -> None:
        if run.checkpoint_step is not None and run.checkpoint_step > (self.saved or 0):
            if self.saved is not None or run.checkpoint_step == run.step:
                self.marks.append(Mark(now, "s"))
            self.saved = run.checkpoint_step

    def _sample(self, pic: Picture) -> None:
        heard = [row for row in pic.hosts if row.is_heard]
        gpus = [gpu for row in heard for gpu in row.gpus]
        powers, flows = known(gpu.power_w for gpu in gpus), known(map(network, heard))
        memory = known(share(gpu.used_mib, gpu.memory_mib) for gpu in gpus)
        sums = {
            "power_kw": sum(powers) / 1e3 if powers else None,
            "network_gbit": sum(flows) if flows else None,
            "memory_pct": max(memory, default=None),
            "ram_pct": max(known(share(row.ram_used_bytes, row.ram_bytes) for row in heard), default=None),
            "cpu_pct": _mean_of(known(row.cpu_pct for row in heard)),
        }
        for name, value in sums.items():
            if value is not None:  # else there would be an empty graph
                self.sums[name].add(pic.time, value)
        self._lay_out(pic.hosts)
        for quantity, grid in zip(QUANTITIES, self.grids, strict=True):
            grid.add(pic.time, self._values(quantity, pic.hosts))

    def _values(self, quantity: Quantity, rows: Sequence[HostRow]) -> "array.array[float]":
        values = array.array("f")
        for row, (_, n) in zip(rows, self.layout, strict=True):
            found = [quantity.of(row, i) if row.is_heard else None for i in range(n)]
            values.extend(UNKNOWN if value is None else value for value in found)
        return values

    def _lay_out(self, rows: Sequence[HostRow]) -> None:
        """Update the layout of hosts; a host with more GPUs than before shifts those after it."""
        before = dict(self.layout)
        layout = tuple((row.name, max(before.get(row.name, 0), n_units(row))) for row in rows)
        if layout == self.layout:
            return
        begins = dict(zip(before, itertools.accumulate(before.values(), initial=0), strict=False))

        def remap(values: "array.array[float]") -> "array.array[float]":
            new = array.array("f")
            for name, n in layout:
                kept = values[begins[name] : begins[name] + before[name]] if name in before else array.array("f")
                new.extend(kept)
                new.extend([UNKNOWN] * (n - len(kept)))
            return new

        self.layout = layout
        for grid in self.grids:
            grid.change(remap)

    def begins(self, window: int, now: float) -> tuple[float, float]:
        """Return where a window begins for steps and for samples: its length before now, or the first value."""
        steps, sums = (
            min((series.begins(window) for series in found.values()), default=now) for found in (self.steps, self.sums)
        )
        return _begin(steps, window, now), _begin(sums, window, now)

    def heat(self, quantity: int, window: int, begin: float, end: float, n: int) -> list["array.array[float] | None"]:
        """Return ``n`` columns of a quantity, from ``begin`` to ``end``: a value per GPU (else rank); None: unknown."""
        grid, width_s = self.grids[quantity], (end - begin) / n
        ring, column_s = grid.columns[window], grid.column_s(window)
        found = []
        held_at = -math.inf
        held: array.array[float] | None = None
        for i in range(n):
            at = int((begin + (i + 0.5) * width_s) // column_s)
            if at in ring:
                held, held_at = ring[at], at
            found.append(held if at - held_at <= 1 else None)
        return found

    def host_heat(
        self, quantity: int, window: int, begin: float, end: float, n: int
    ) -> Iterator[tuple[str, list[float]]]:
        """Yield each host, and ``n`` means over its GPUs, ``UNKNOWN`` where nothing is known."""
        columns = self.heat(quantity, window, begin, end, n)
        offset = 0
        for name, size in self.layout:
            yield name, [_known_mean(column[offset : offset + size]) if column else UNKNOWN for column in columns]
            offset += size


def _begin(first: float, window: int, now: float) -> float:
    return min(max(first, now - WINDOWS_S[window]), now - LEAST_S)


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _known_mean(values: "array.array[float]") -> float:
    found = [value for value in values if value >= 0]
    return sum(found) / len(found) if found else UNKNOWN
