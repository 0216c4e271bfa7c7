"""How the steps of a run go: their loss against what was usual, and whether heartbeats and metrics agree. Pure."""

import bisect
import operator
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llama405b.contract.phrases import counted, given
from llama405b.contract.records import Phase
from llama405b_tools.remote.messages.host_run import Beat
from llama405b_tools.text.fold import fold_ranks
from llama405b_tools.top.state import thresholds
from llama405b_tools.top.state.frames import StepMetrics
from llama405b_tools.top.state.picture import known
from llama405b_tools.top.state.verdicts import MISSING, STEP_AND_AGE, Note


class Measured(NamedTuple):
    """The steps of this attempt, by the metrics and by the clock of the host that writes them."""

    step: int  # the last
    age_s: float  # since the last
    since_s: float  # since the first


def measured(metrics: Sequence[StepMetrics], attempt: int, now: float) -> Measured | None:
    """Return what the metrics tell about an attempt; None if it has none, or if they do not tell their attempt and time."""
    if not metrics or metrics[-1].attempt != attempt:
        return None
    first = metrics[bisect.bisect_left(metrics, attempt, key=operator.attrgetter("attempt"))]
    if first.time is None or metrics[-1].time is None:
        return None
    return Measured(metrics[-1].step, now - metrics[-1].time, now - first.time)


def seconds_between(metrics: Sequence[StepMetrics], saved: int, step: int) -> float:
    """Return how long the steps after one took: what was measured, and their mean for those of which there are no metrics."""
    took = known(each.step_s for each in metrics if each.step > saved) or known([metrics[-1].step_s])
    return statistics.mean(took) * max(0, step - saved) if took else 0.0


def unusual(metrics: Sequence[StepMetrics]) -> Iterator[Note]:
    """Yield what stands out about the last steps, other than how long they take."""
    last = metrics[-1]
    if last.step_s is None:
        return
    recent = [each for each in metrics[-thresholds.RECENT_STEPS :] if each.step_s is not None]
    if bad := [each.step for each in recent if each.loss is None]:
        yield Note("loss", f"the loss of {_steps(bad)} was not a finite number", ("loss",))
    else:
        yield from _high_loss([each.loss for each in metrics if each.step_s is not None])
    if retries := _retries(metrics):
        shown = counted(retries, "allocator retry", "allocator retries")
        why = "GPU memory is short, and each makes a step slower; `llama405b plan` says what helps"
        yield Note("retries", f"{shown} in the last {thresholds.RECENT_STEPS} steps: {why}", ("step_s",))


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" + given(" and {} more", len(steps) - 1)


def _high_loss(losses: Sequence[float | None]) -> Iterator[Note]:
    """Yield that the loss stays above its median: the higher it is, the sooner that is told."""
    for times, n in thresholds.HIGH_LOSS:
        if usual := _exceeded(losses, times, n):
            words = f"the loss is {losses[-1]:.4g}, for {n} steps above {times:g} times its median of {usual:.4g}"
            yield Note("loss", words, ("loss",))
            return


def _retries(metrics: Sequence[StepMetrics]) -> int:
    """Return how many more the allocator of rank 0 counts than some steps before, in this attempt."""
    recent = [each for each in metrics if each.attempt == metrics[-1].attempt][-thresholds.RECENT_STEPS :]
    counts = [each.num_alloc_retries for each in recent if each.num_alloc_retries is not None]
    return max(0, counts[-1] - counts[0]) if counts else 0


def _exceeded(values: Sequence[float | None], times: float, n: int) -> float | None:
    """Return the median of the values before the last ``n``, if each of these exceeds so many times the median."""
    before, recent = known(values[:-n]), known(values[-n:])
    if len(before) < thresholds.USUAL_LOSS_STEPS or not recent:
        return None
    median = statistics.median(before)
    return median if 0 < times * median < min(recent) else None


def without_heartbeat(ranks: range, beats: Sequence[Beat], late: Sequence[Beat]) -> Iterator[Note]:
    """Yield which of a host's ranks have no heartbeat, or one that is ``late``, while the metrics go on."""
    if missing := sorted({*ranks} - {beat.rank for beat in beats}):
        yield Note(
            f"{MISSING} {missing}", f"no heartbeat from {fold_ranks(missing)}, although the run trains", STEP_AND_AGE
        )
    if late:
        names, step = fold_ranks([beat.rank for beat in late]), min(beat.step for beat in late)
        yield Note(
            f"late {names}", f"no heartbeat from {names} since step {step}, although the metrics go on", STEP_AND_AGE
        )


def without_metrics(found: Measured | None, beats: Sequence[tuple[Beat, float]], patience_s: float) -> Iterator[Note]:
    """Yield that the metrics stand while the ranks of the host that writes them go on.

    ``beats``: theirs, with the age of each. Steps without a target have no metrics, and never are many in a row.
    """
    if any(beat.phase is not Phase.TRAIN for beat, _ in beats):
        return
    step, at_step = 0, min((beat.step for beat, _ in beats), default=0)
    silent_s = min((beat.time - beat.phase_since for beat, _ in beats), default=0.0)
    if found:
        step, silent_s = found.step, found.age_s - max((age_s for _, age_s in beats), default=0.0)
    if at_step > step + thresholds.DISAGREE_STEPS and silent_s > patience_s:
        yield Note(
            "metrics", f"no metrics{given(' since step {}', step)}, although its ranks are at step {at_step}", ("step",)
        )
