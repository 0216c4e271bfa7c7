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

from llama405b_tools.agent.messages import StepMetrics
from llama405b_tools.text.figures import percent_of
from llama405b_tools.top.state.picture import (
    QUANTITIES,
    ClusterView,
    HostRow,
    Quantity,
    TrainingStatus,
    n_units,
    network_gbps,
    not_none,
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

    def merged_with(self, other: "Bucket") -> "Bucket":
        """Return the union of two buckets."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Bucket(self.n + other.n, self.total + other.total, low, high)


@dataclasses.dataclass(slots=True)
class Series:
    """One quantity over time, in buckets per window; those of the whole run grow with it."""

    rings: tuple[dict[int, Bucket], ...] = dataclasses.field(default_factory=lambda: tuple({} for _ in WINDOWS_S))
    run_bucket_s: float = WINDOWS_S[0] / N_BUCKETS
    last_time: float = -math.inf  # time of the last value

    def bucket_s(self, window: int) -> float:
        """Return the length of a bucket in seconds."""
        return self.run_bucket_s if math.isinf(WINDOWS_S[window]) else WINDOWS_S[window] / N_BUCKETS

    def add(self, time: float, value: float | None) -> None:
        """Add a value; its time must be later than the last."""
        if value is None or time <= self.last_time:
            return
        self.last_time = time
        for window, ring in enumerate(self.rings):
            index, bucket = int(time // self.bucket_s(window)), Bucket(1, value, value, value)
            ring[index] = ring[index].merged_with(bucket) if index in ring else bucket
            while len(ring) > N_BUCKETS and not math.isinf(WINDOWS_S[window]):
                del ring[next(iter(ring))]
        if len(self.rings[-1]) > 2 * N_BUCKETS:
            self._double()

    def _double(self) -> None:
        """Double the length of the whole run's buckets."""
        ring = self.rings[-1]
        old_buckets = list(ring.items())
        ring.clear()
        self.run_bucket_s *= 2
        for index, bucket in old_buckets:
            ring[index // 2] = ring[index // 2].merged_with(bucket) if index // 2 in ring else bucket

    def columns(self, window: int, begin: float, end: float, n: int) -> list[Bucket | None]:
        """Return ``n`` columns from ``begin`` to ``end``; None where nothing is known.

        A value is held until the next one, up to about twice the usual gap between values.
        """
        ring, bucket_s = self.rings[window], self.bucket_s(window)
        visible = [(index, ring[index]) for index in ring if (index + 1) * bucket_s > begin and index * bucket_s <= end]
        gaps = sorted(next_index - index for (index, _), (next_index, _) in itertools.pairwise(visible))
        hold_s = (max(1, 2 * gaps[len(gaps) // 2]) if gaps else 1) * bucket_s
        columns: list[Bucket | None] = [None] * n
        column_s = (end - begin) / n
        for index, bucket in visible:
            column = min(n - 1, max(0, int((index * bucket_s - begin) / column_s)))
            previous = columns[column]
            columns[column] = previous.merged_with(bucket) if previous else bucket
        current, current_time = None, -math.inf
        for i in range(n):
            moment = begin + i * column_s
            if columns[i]:
                current, current_time = columns[i], moment
            elif moment - current_time <= hold_s + column_s:
                columns[i] = current
        return columns

    def first_time(self, window: int) -> float:
        """Return the time of a window's first value; infinity if there is none."""
        return next(iter(self.rings[window]), math.inf) * self.bucket_s(window)


@dataclasses.dataclass(slots=True)
class TrendGrid:
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
            index, counts = int(time // self.column_s(window)), self.counts[window]
            if index in ring:
                ring[index], self.counts[window] = _updated_means(ring[index], counts, values)
            else:
                ring[index], self.counts[window] = values, array.array("f", [float(v >= 0) for v in values])
            while len(ring) > N_COLUMNS and not math.isinf(WINDOWS_S[window]):
                del ring[next(iter(ring))]
        if len(self.columns[-1]) > 2 * N_COLUMNS:
            self.run_column_s *= 2
            ring = self.columns[-1]
            merged = {index // 2: values for index, values in ring.items()}  # of two, the later
            ring.clear()
            ring.update(merged)

    def reorder(self, remap: Callable[["array.array[float]"], "array.array[float]"]) -> None:
        """Reorder the values of every column."""
        for ring in self.columns:
            for index in ring:
                ring[index] = remap(ring[index])
        self.counts = [
            array.array("f", [float(v >= 0) for v in next(reversed(ring.values()), ())]) for ring in self.columns
        ]


def _updated_means(
    old_means: "array.array[float]", counts: "array.array[float]", values: "array.array[float]"
) -> tuple["array.array[float]", "array.array[float]"]:
    """Return the means updated with new values, and the count behind each."""
    means, new_counts = array.array("f"), array.array("f")
    for mean, n, value in zip(old_means, counts, values, strict=True):
        if value < 0:
            means.append(mean)
            new_counts.append(n)
        else:
            means.append((n * mean + value) / (n + 1))  # the mean of nothing has no weight
            new_counts.append(n + 1)
    return means, new_counts


MIN_WINDOW_S = 20.0  # shortest time span shown
MAX_MARKS = 500
Layout = tuple[tuple[str, int], ...]  # hosts in order, and how many GPUs (else ranks) each has


class TrendMark(NamedTuple):
    """An event on the time axis."""

    time: float
    kind: str  # s: save, e: evaluation, r: restart


@dataclasses.dataclass(slots=True)
class Trends:
    """Everything sampled since cluster-top started, plus the run's earlier steps from its metrics."""

    run: str = ""
    steps: dict[str, Series] = dataclasses.field(default_factory=lambda: collections.defaultdict(Series))
    sums: dict[str, Series] = dataclasses.field(default_factory=lambda: collections.defaultdict(Series))
    grids: tuple[TrendGrid, ...] = dataclasses.field(default_factory=lambda: tuple(TrendGrid() for _ in QUANTITIES))
    layout: Layout = ()
    marks: "collections.deque[TrendMark]" = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_MARKS)
    )
    sampled_at: float = -math.inf
    saved_step: int | None = None  # the newest checkpoint's step
    attempt: int = 0

    def take(self, view: ClusterView, steps: Iterable[tuple[float, StepMetrics]]) -> None:
        """Take a picture, and the steps of its run, newest first, by the operator's clock."""
        run = view.training
        if run and run.run != self.run:
            self.run, self.saved_step, self.attempt = run.run, run.checkpoint_step, 0
            self.steps.clear()
            self.marks.clear()
        if run:
            self._take_steps(steps)
            self._mark_save(run, view.time)
        if view.time - self.sampled_at >= 0.9 * view.interval_s:
            self.sampled_at = view.time
            self._sample(view)

    def _take_steps(self, steps: Iterable[tuple[float, StepMetrics]]) -> None:
        last_time = self.steps["steps"].last_time
        for time, step in reversed([*itertools.takewhile(lambda entry: entry[0] > last_time, steps)]):
            self.steps["steps"].add(time, step.step)
            if step.attempt > self.attempt > 0:
                self.marks.append(TrendMark(time, "r"))
            self.attempt = max(self.attempt, step.attempt)
            if step.evaluation_loss is not None:
                self.marks.append(TrendMark(time, "e"))
            for field in ("loss", "rate", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s"):
                self.steps[field].add(time, getattr(step, field))

    def _mark_save(self, run: TrainingStatus, now: float) -> None:
        if run.checkpoint_step is not None and run.checkpoint_step > (self.saved_step or 0):
            if self.saved_step is not None or run.checkpoint_step == run.step:
                self.marks.append(TrendMark(now, "s"))
            self.saved_step = run.checkpoint_step

    def _sample(self, view: ClusterView) -> None:
        heard_rows = [row for row in view.hosts if row.is_heard]
        gpus = [gpu for row in heard_rows for gpu in row.gpus]
        powers, rates = not_none(gpu.power_w for gpu in gpus), not_none(map(network_gbps, heard_rows))
        memory = not_none(percent_of(gpu.used_mib, gpu.memory_mib) for gpu in gpus)
        sums = {
            "power_kw": sum(powers) / 1e3 if powers else None,
            "network_gbit": sum(rates) if rates else None,
            "memory_pct": max(memory, default=None),
            "ram_pct": max(not_none(percent_of(row.ram_used_bytes, row.ram_bytes) for row in heard_rows), default=None),
            "cpu_pct": _mean_of(not_none(row.cpu_pct for row in heard_rows)),
        }
        for name, value in sums.items():
            if value is not None:  # else there would be an empty graph
                self.sums[name].add(view.time, value)
        self._lay_out(view.hosts)
        for quantity, grid in zip(QUANTITIES, self.grids, strict=True):
            grid.add(view.time, self._values(quantity, view.hosts))

    def _values(self, quantity: Quantity, rows: Sequence[HostRow]) -> "array.array[float]":
        values = array.array("f")
        for row, (_, n) in zip(rows, self.layout, strict=True):
            row_values = [quantity.value_of(row, i) if row.is_heard else None for i in range(n)]
            values.extend(UNKNOWN if value is None else value for value in row_values)
        return values

    def _lay_out(self, rows: Sequence[HostRow]) -> None:
        """Update the layout of hosts; a host with more GPUs than before shifts those after it."""
        old_sizes = dict(self.layout)
        layout = tuple((row.name, max(old_sizes.get(row.name, 0), n_units(row))) for row in rows)
        if layout == self.layout:
            return
        begins = dict(zip(old_sizes, itertools.accumulate(old_sizes.values(), initial=0), strict=False))

        def remap(values: "array.array[float]") -> "array.array[float]":
            remapped = array.array("f")
            for name, n in layout:
                old_values = (
                    values[begins[name] : begins[name] + old_sizes[name]] if name in old_sizes else array.array("f")
                )
                remapped.extend(old_values)
                remapped.extend([UNKNOWN] * (n - len(old_values)))
            return remapped

        self.layout = layout
        for grid in self.grids:
            grid.reorder(remap)

    def window_begins(self, window: int, now: float) -> tuple[float, float]:
        """Return where a window begins for steps and for samples: its length before now, or the first value."""
        steps, sums = (
            min((series.first_time(window) for series in series_group.values()), default=now)
            for series_group in (self.steps, self.sums)
        )
        return _window_begin(steps, window, now), _window_begin(sums, window, now)

    def heat(self, quantity: int, window: int, begin: float, end: float, n: int) -> list["array.array[float] | None"]:
        """Return ``n`` columns of a quantity, from ``begin`` to ``end``: a value per GPU (else rank); None: unknown."""
        grid, width_s = self.grids[quantity], (end - begin) / n
        ring, column_s = grid.columns[window], grid.column_s(window)
        heat_columns = []
        current_index = -math.inf
        current: array.array[float] | None = None
        for i in range(n):
            index = int((begin + (i + 0.5) * width_s) // column_s)
            if index in ring:
                current, current_index = ring[index], index
            heat_columns.append(current if index - current_index <= 1 else None)
        return heat_columns

    def host_heat(
        self, quantity: int, window: int, begin: float, end: float, n: int
    ) -> Iterator[tuple[str, list[float]]]:
        """Yield each host, and ``n`` means over its GPUs, ``UNKNOWN`` where nothing is known."""
        columns = self.heat(quantity, window, begin, end, n)
        offset = 0
        for name, size in self.layout:
            yield name, [_known_mean(column[offset : offset + size]) if column else UNKNOWN for column in columns]
            offset += size


def _window_begin(first: float, window: int, now: float) -> float:
    return min(max(first, now - WINDOWS_S[window]), now - MIN_WINDOW_S)


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _known_mean(values: "array.array[float]") -> float:
    known_values = [value for value in values if value >= 0]
    return sum(known_values) / len(known_values) if known_values else UNKNOWN
