"""How fast the steps of a run are, against the plan and against the same run before. Pure."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import StepMetrics
from llama405b_tools.top.state.verdicts import Note


class Pace(NamedTuple):
    """Seconds of a step: of the last ones, and what is expected."""

    recent_s: float
    expected_s: float
    is_planned: bool  # the expected time is the plan's; else it is this run's own

    @property
    def is_slow(self) -> bool:
        """Whether the last steps are slower than they should be."""
        return self.expected_s < thresholds.PACE * self.recent_s

    @property
    def words(self) -> str:
        """How long a step takes, and how much that differs from what is expected: ``a step takes 6.00 s, 3% more than planned``."""
        percent = round(100 * (self.recent_s / self.expected_s - 1))
        measure = "planned" if self.is_planned else "usual"
        if not percent:
            return f"a step takes {self.recent_s:.2f} s, as {measure}"
        more = "more" if percent > 0 else "less"
        return f"a step takes {self.recent_s:.2f} s, {abs(percent)}% {more} than {measure}"


@dataclasses.dataclass(slots=True)
class Paces:
    """The pace and the usual step, computed anew only when there is a new step: both look at thousands of them."""

    key: tuple[int, StepMetrics | None, float | None] = (0, None, None)
    pace: Pace | None = None
    usual_s: float | None = None

    def look(self, metrics: Sequence[StepMetrics], planned_s: float | None) -> "Paces":
        """Return them for these steps."""
        key = len(metrics), metrics[-1] if metrics else None, planned_s
        if key != self.key:
            self.key, self.pace, self.usual_s = key, pace(metrics, planned_s), usual_s(metrics)
        return self


def usual_s(metrics: Sequence[StepMetrics]) -> float | None:
    """Return the median step of the run's best ten minutes, so that a run that has been slow for hours is not the measure."""
    took = [each.step_s for each in metrics if each.step_s]
    return min(map(statistics.median, _blocks(took)), default=None)


def _blocks(took: Sequence[float]) -> Iterator[Sequence[float]]:
    """Divide the steps into blocks of ten minutes and 20 steps or more; the last may be twice as long."""
    begin, elapsed_s = 0, 0.0
    for end, step_s in enumerate(took, 1):
        elapsed_s += step_s
        n_left = len(took) - end
        is_long = elapsed_s >= thresholds.BLOCK_S and end - begin >= thresholds.BLOCK_STEPS
        if n_left == 0 or (is_long and n_left >= thresholds.BLOCK_STEPS):
            yield took[begin:end]
            begin, elapsed_s = end, 0.0


def pace(metrics: Sequence[StepMetrics], planned_s: float | None) -> Pace | None:
    """Return the pace of the last five steps, or of the last minute if they are shorter; None if it is not known yet.

    The first step of an attempt, which connects and compiles, is not judged. A run without a plan is judged against its own
    first steps as soon as there are as many of them.
    """
    attempt = list(itertools.takewhile(lambda each: each.attempt == metrics[-1].attempt, reversed(metrics)))[:-1]
    n = n_recent(attempt)
    if planned_s is None:
        n = min(n, len(metrics) // 2)
    recent = [each.step_s for each in attempt[:n] if each.step_s]
    if len(recent) < thresholds.PACE_STEPS or sum(recent) < thresholds.PACE_LEAST_S:
        return None
    own_s = usual_s(metrics[: len(metrics) - n])
    expected = [(value_s, is_planned) for value_s, is_planned in ((planned_s, True), (own_s, False)) if value_s]
    if not expected:
        return None
    recent_s = statistics.mean(sorted(recent)[:-1])  # without the slowest: one slow step is no pace
    return Pace(recent_s, *min(expected))


def n_recent(newest_first: Iterable[StepMetrics]) -> int:
    """Return how many of the steps make five steps and a minute; all, if they do not."""
    n, sum_s = 0, 0.0
    for each in newest_first:
        n, sum_s = n + 1, sum_s + (each.step_s or 0.0)
        if n >= thresholds.PACE_STEPS and sum_s >= thresholds.PACE_S:
            break
    return n


def slow_note(found: Pace | None) -> Iterator[Note]:
    """Yield that the last steps are slower than expected, and by how much."""
    if found and found.is_slow:
        than = "planned" if found.is_planned else "usual"
        factor = found.recent_s / found.expected_s
        words = f"a step takes {found.recent_s:.2f} s, {factor:.2g} times the {than} {found.expected_s:.2f} s"
        yield Note("step_s", words, ("step_s",))
