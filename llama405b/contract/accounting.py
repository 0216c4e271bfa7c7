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
LATE_STEPS = 2.0  # usual step times since the last step: from then on the run waits


class TimeUse(enum.StrEnum):
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
class CountedStep:
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
    seconds: Mapping[TimeUse, float]
    incidents: Sequence[Incident]

    @property
    def goodput(self) -> float | None:
        """The share of time spent in steps that count; None: there is no time yet."""
        total = sum(self.seconds.values())
        return self.seconds.get(TimeUse.TRAINING, 0.0) / total if total else None

    def rank_hours(self, seconds: float) -> float:
        """Convert seconds of all ranks to rank-hours."""
        return seconds * self.world / 3600


def account_time(
    start_time: float, attempts: Sequence[Attempt], steps: Sequence[CountedStep], world_size: int, end_time: float
) -> Account:
    """Divide the time since a run began by its use.

    Nothing is counted between a requested stop and the first step of the next attempt.

    Args:
        start_time: When its first attempt was launched.
        attempts: Its launches, in order; the last one may live.
        steps: Those that count, in order of time.
        world_size: How many ranks it has.
        end_time: The moment up to which a live run is counted.
    """
    seconds = dict.fromkeys(TimeUse, 0.0)
    incidents: list[Incident] = []
    steps_by_attempt, usual_s = _group_by_attempt(steps), statistics.median([step.step_s for step in steps] or [0.0])
    counted_until: float | None = start_time  # None: it was stopped on request
    incident: Incident | None = None
    for attempt in attempts:
        attempt_steps = steps_by_attempt.get(attempt.number, [])
        if attempt_steps:
            first_start = attempt_steps[0].time - attempt_steps[0].step_s
            if incident:
                _count_incident(seconds, incidents, dataclasses.replace(incident, resumed=first_start), first_start)
            elif counted_until is not None:
                seconds[TimeUse.STARTING] += max(0.0, first_start - counted_until)
            incident, counted_until = None, attempt_steps[-1].time
            _count_steps(seconds, attempt_steps, attempt.saves_s, usual_s)
        if attempt.ended is None:
            continue
        if incident and is_failure(attempt.cause) and not is_failure(incident.cause):  # a requested restart failed
            incident = dataclasses.replace(incident, attempt=attempt.number, failed=attempt.ended, cause=attempt.cause)
        elif attempt.cause and counted_until is not None:
            incident = incident or Incident(attempt.number, counted_until, attempt.ended, None, attempt.cause)
        elif not incident:
            if counted_until is not None:
                seconds[TimeUse.SAVING if attempt_steps else TimeUse.STARTING] += max(
                    0.0, attempt.ended - counted_until
                )
            counted_until = None
    last_attempt = attempts[-1] if attempts else Attempt(0, ended=start_time)
    if incident:
        incident_end = (
            end_time if last_attempt.ended is None else incident.failed
        )  # nobody restarts it: count no more time
        incident = dataclasses.replace(incident, restarted=last_attempt.ended is None)
        _count_incident(seconds, incidents, incident, incident_end)
    elif last_attempt.ended is None and counted_until is not None:
        _count_since_last_step(seconds, steps_by_attempt.get(last_attempt.number, []), end_time - counted_until)
    return Account(start_time, end_time, world_size, seconds, incidents)


def _count_incident(
    seconds: dict[TimeUse, float], incidents: list[Incident], incident: Incident, end_time: float
) -> None:
    """Count the time that a failure, or a requested restart (no incident), cost until a moment."""
    lost_s = max(0.0, end_time - incident.began)
    if is_failure(incident.cause):
        incidents.append(incident)
        seconds[TimeUse.FAILURES] += lost_s
    else:
        seconds[TimeUse.RESTARTS] += lost_s


def _group_by_attempt(steps: Iterable[CountedStep]) -> dict[int, list[CountedStep]]:
    groups: dict[int, list[CountedStep]] = {}
    for step in steps:
        groups.setdefault(step.attempt, []).append(step)
    return groups


def _count_steps(seconds: dict[TimeUse, float], steps: Sequence[CountedStep], saves_s: float, usual_s: float) -> None:
    """Count the steps of an attempt and the gaps between them."""
    steps_s = sum(step.step_s for step in steps)
    gaps_s = max(0.0, steps[-1].time - (steps[0].time - steps[0].step_s) - steps_s)
    slow_s = sum(step.step_s - usual_s for step in steps if step.step_s > max(SLOW_S, SLOW_STEPS * usual_s))
    seconds[TimeUse.TRAINING] += steps_s - slow_s
    seconds[TimeUse.SLOW] += slow_s
    seconds[TimeUse.SAVING] += min(gaps_s, saves_s)
    seconds[TimeUse.PAUSES] += gaps_s - min(gaps_s, saves_s)


def _count_since_last_step(seconds: dict[TimeUse, float], steps: Sequence[CountedStep], since_last_s: float) -> None:
    """Count the time since the last step of a live run, or since it was launched."""
    if not steps:
        seconds[TimeUse.STARTING] += max(0.0, since_last_s)
        return
    usual_s = statistics.median(step.step_s for step in steps[-50:])
    seconds[TimeUse.TRAINING if since_last_s <= LATE_STEPS * usual_s else TimeUse.WAITING] += max(0.0, since_last_s)


def is_failure(cause: Cause | None) -> TypeGuard[Cause]:
    """Whether an attempt that ended with this cause failed; not if it was asked to stop or completed."""
    return cause is not None and cause.kind is not CauseKind.STOPPED
