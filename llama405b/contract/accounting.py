"""Divide a run's time into steps that count, starts, saves and failures. Pure.

Goodput is the share of time spent in steps that still count. Time is counted on every rank, whether it computes or waits:
GPU-hours are seconds times ranks.
"""

import dataclasses
import enum
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

from llama405b.contract.records import Cause, CauseKind

SLOW_STEPS, SLOW_S = 3.0, 10.0  # a step is slow from this multiple of the usual time, and at least this long
LATE = 2.0  # usual step times since the last step: from then on the run waits


class Use(enum.StrEnum):
    """What time went into."""

    TRAINING = "training"  # steps that count, as long as they usually take, and the one that is being taken
    SLOW = "slow"  # the excess time of far slower steps, which nearly hung
    STARTING = "starting"  # from a launch to its first step: reading data, loading weights
    SAVING = "saving"  # waiting for saves between steps, and the save at a stop
    PAUSES = "pauses"  # between steps, for other reasons: evaluations, profiles
    # from the last step that counts to the first one after it: repeated steps, hang, restart, loading
    FAILURES = "failures"
    RESTARTS = "restarts"  # the same, for a restart that somebody asked for
    WAITING = "waiting"  # since the last step of a live run, if that is long ago


@dataclasses.dataclass(frozen=True, slots=True)
class StepTaken:
    """A step that counts: a resume did not undo it."""

    attempt: int
    time: float  # its end
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One launch of the run."""

    number: int
    ended: float | None = None  # None: it is running, or nobody recorded its end
    cause: Cause | None = None  # why it failed, or was ended for a restart; None: neither
    saves_s: float = 0.0  # that its steps waited for saves


@dataclasses.dataclass(frozen=True, slots=True)
class Incident:
    """A failure, and the time that it cost."""

    attempt: int  # that failed
    began: float  # at the last step that counts
    failed: float  # when the attempt was ended
    resumed: float | None  # at the beginning of the first step after it; None: not yet
    cause: Cause
    restarted: bool = False  # a later attempt is running


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """How a run's time was used; times by the clock of its head."""

    began: float
    until: float
    world: int
    seconds: Mapping[Use, float]
    incidents: Sequence[Incident]

    @property
    def goodput(self) -> float | None:
        """The share of time spent in steps that count; None: there is no time yet."""
        total = sum(self.seconds.values())
        return self.seconds.get(Use.TRAINING, 0.0) / total if total else None

    def rank_hours(self, seconds: float) -> float:
        """Convert seconds of all ranks to rank-hours."""
        return seconds * self.world / 3600


def account(began: float, attempts: Sequence[Attempt], steps: Sequence[StepTaken], world: int, now: float) -> Account:
    """Divide the time since a run began by its use.

    Nothing is counted between a requested stop and the first step of the next attempt.

    Args:
        began: When its first attempt was launched.
        attempts: Its launches, in order; the last one may live.
        steps: Those that count, in order of time.
        world: How many ranks it has.
        now: The moment up to which a live run is counted.
    """
    seconds = dict.fromkeys(Use, 0.0)
    incidents: list[Incident] = []
    of, usual_s = _by_attempt(steps), statistics.median([step.step_s for step in steps] or [0.0])
    at: float | None = began  # None: it was stopped on request
    failed: Incident | None = None
    for attempt in attempts:
        mine = of.get(attempt.number, [])
        if mine:
            first = mine[0].time - mine[0].step_s
            if failed:
                _count_failed(seconds, incidents, dataclasses.replace(failed, resumed=first), first)
            elif at is not None:
                seconds[Use.STARTING] += max(0.0, first - at)
            failed, at = None, mine[-1].time
            _count(seconds, mine, attempt.saves_s, usual_s)
        if attempt.ended is None:
            continue
        if failed and is_failure(attempt.cause) and not is_failure(failed.cause):  # a requested restart failed
            failed = dataclasses.replace(failed, attempt=attempt.number, failed=attempt.ended, cause=attempt.cause)
        elif attempt.cause and at is not None:
            failed = failed or Incident(attempt.number, at, attempt.ended, None, attempt.cause)
        elif not failed:
            if at is not None:
                seconds[Use.SAVING if mine else Use.STARTING] += max(0.0, attempt.ended - at)
            at = None
    last = attempts[-1] if attempts else Attempt(0, ended=began)
    if failed:
        until = now if last.ended is None else failed.failed  # nobody restarts it: count no more time
        failed = dataclasses.replace(failed, restarted=last.ended is None)
        _count_failed(seconds, incidents, failed, until)
    elif last.ended is None and at is not None:
        _count_rest(seconds, of.get(last.number, []), now - at)
    return Account(began, now, world, seconds, incidents)


def _count_failed(seconds: dict[Use, float], incidents: list[Incident], failed: Incident, until: float) -> None:
    """Count the time that a failure, or a requested restart (no incident), cost until a moment."""
    lost_s = max(0.0, until - failed.began)
    if is_failure(failed.cause):
        incidents.append(failed)
        seconds[Use.FAILURES] += lost_s
    else:
        seconds[Use.RESTARTS] += lost_s


def _by_attempt(steps: Iterable[StepTaken]) -> dict[int, list[StepTaken]]:
    found: dict[int, list[StepTaken]] = {}
    for step in steps:
        found.setdefault(step.attempt, []).append(step)
    return found


def _count(seconds: dict[Use, float], steps: Sequence[StepTaken], saves_s: float, usual_s: float) -> None:
    """Count the steps of an attempt and the gaps between them."""
    took_s = sum(step.step_s for step in steps)
    between_s = max(0.0, steps[-1].time - (steps[0].time - steps[0].step_s) - took_s)
    slow_s = sum(step.step_s - usual_s for step in steps if step.step_s > max(SLOW_S, SLOW_STEPS * usual_s))
    seconds[Use.TRAINING] += took_s - slow_s
    seconds[Use.SLOW] += slow_s
    seconds[Use.SAVING] += min(between_s, saves_s)
    seconds[Use.PAUSES] += between_s - min(between_s, saves_s)


def _count_rest(seconds: dict[Use, float], steps: Sequence[StepTaken], rest_s: float) -> None:
    """Count the time since the last step of a live run, or since it was launched."""
    if not steps:
        seconds[Use.STARTING] += max(0.0, rest_s)
        return
    usual_s = statistics.median(step.step_s for step in steps[-50:])
    seconds[Use.TRAINING if rest_s <= LATE * usual_s else Use.WAITING] += max(0.0, rest_s)


def is_failure(cause: Cause | None) -> TypeGuard[Cause]:
    """Whether an attempt that ended with this cause failed; not if it was asked to stop or completed."""
    return cause is not None and cause.kind is not CauseKind.STOPPED
