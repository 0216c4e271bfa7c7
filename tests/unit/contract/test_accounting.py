"""What a run's time went into: every second once, and each failure with what it cost."""

import random
import time

import pytest

from llama405b.contract.accounting import Attempt, CountedStep, TimeUse, account_time
from llama405b.contract.records import Cause, CauseKind
from llama405b_tools.run.query import account_line, incident_line

HUNG = Cause(CauseKind.HUNG, host="gpu-3", rank=21)
ASKED = Cause(CauseKind.STOPPED, by="ann@desk")


def steps(attempt, begin, n, step_s=10.0, every=()):
    """``n`` steps one after the other; ``every``: seconds of a pause after each of some steps."""
    found, at = [], begin
    for i in range(n):
        at += step_s
        found.append(CountedStep(attempt, at, step_s))
        at += every[i] if i < len(every) else 0.0
    return found


def spent(found):
    return {use: round(seconds, 6) for use, seconds in found.seconds.items() if seconds}


def test_a_run_that_goes_well():
    found = account_time(0.0, [Attempt(1, saves_s=3.0)], steps(1, 60.0, 10, every=[0, 3, 0, 5]), 64, 178.0)
    assert spent(found) == {TimeUse.STARTING: 60, TimeUse.TRAINING: 110, TimeUse.SAVING: 3, TimeUse.PAUSES: 5}
    assert found.goodput == pytest.approx(110 / 178)
    assert found.rank_hours(3600) == 64
    assert found.incidents == []


def test_a_hang_costs_from_the_last_step_that_counts_to_the_next_first_one():
    taken = [*steps(1, 60.0, 5), *steps(2, 500.0, 3)]
    found = account_time(0.0, [Attempt(1, 400.0, HUNG), Attempt(2)], taken, 8, 530.0)
    assert spent(found) == {TimeUse.STARTING: 60, TimeUse.TRAINING: 80, TimeUse.FAILURES: 390}
    [incident] = found.incidents
    assert (incident.attempt, incident.began, incident.failed, incident.resumed, incident.cause) == (
        1,
        110,
        400,
        500,
        HUNG,
    )


def test_attempts_that_fail_before_their_first_step_are_the_same_incident():
    taken = [*steps(1, 60.0, 5), *steps(4, 900.0, 1)]
    attempts = [Attempt(1, 200.0, HUNG), Attempt(2, 300.0, HUNG), Attempt(3, 400.0, HUNG), Attempt(4)]
    found = account_time(0.0, attempts, taken, 8, 910.0)
    assert [(each.attempt, each.failed, each.resumed) for each in found.incidents] == [(1, 200.0, 900.0)]
    assert spent(found)[TimeUse.FAILURES] == 790


def test_a_stop_that_was_asked_for_is_no_time():
    taken = [*steps(1, 60.0, 5), *steps(2, 90_000.0, 5)]
    found = account_time(0.0, [Attempt(1, 130.0), Attempt(2, 90_055.0)], taken, 8, 99_999.0)
    assert spent(found) == {TimeUse.STARTING: 60, TimeUse.TRAINING: 100, TimeUse.SAVING: 25}


def test_a_restart_that_was_asked_for_is_no_failure():
    taken = [*steps(1, 60.0, 5), *steps(2, 150.0, 3)]
    found = account_time(0.0, [Attempt(1, 120.0, ASKED), Attempt(2)], taken, 8, 180.0)
    assert spent(found) == {TimeUse.STARTING: 60, TimeUse.TRAINING: 80, TimeUse.RESTARTS: 40}
    assert found.incidents == []
    assert "lost to a requested restart" in account_line(found, "rank-h")
    assert "failure" not in account_line(found, "rank-h")
    waits = account_time(0.0, [Attempt(1, 120.0, ASKED)], steps(1, 60.0, 5), 8, 180.0)
    assert spent(waits)[TimeUse.RESTARTS] == 10


def test_a_failure_after_a_restart_that_was_asked_for_is_one():
    taken = [*steps(1, 60.0, 5), *steps(3, 500.0, 3)]
    found = account_time(0.0, [Attempt(1, 120.0, ASKED), Attempt(2, 300.0, HUNG), Attempt(3)], taken, 8, 530.0)
    [incident] = found.incidents
    assert (incident.attempt, incident.cause, spent(found)[TimeUse.FAILURES]) == (2, HUNG, 390)


def test_a_failure_that_nobody_restarts_costs_until_it_was_ended():
    found = account_time(0.0, [Attempt(1, 400.0, HUNG)], steps(1, 60.0, 5), 8, 10_000.0)
    assert spent(found)[TimeUse.FAILURES] == 290
    assert found.incidents[0].resumed is None
    loading = account_time(0.0, [Attempt(1, 400.0, HUNG), Attempt(2)], steps(1, 60.0, 5), 8, 1_000.0)
    assert spent(loading)[TimeUse.FAILURES] == 890  # it goes on


@pytest.mark.parametrize(
    ("more", "resumed", "then"),
    [
        ([], [], "not restarted"),
        ([Attempt(2, 450.0, HUNG)], [], "not restarted"),
        ([Attempt(2)], [], "restarted, no step yet"),
        ([Attempt(2)], steps(2, 500.0, 3), "next step after 6m"),
    ],
)
def test_a_failure_has_its_own_time_and_what_came_of_it(more, resumed, then):
    found = account_time(0.0, [Attempt(1, 400.0, HUNG), *more], [*steps(1, 60.0, 5), *resumed], 8, 530.0)
    [line] = [incident_line(found, incident, "GPU-h") for incident in found.incidents]
    assert line.startswith(time.strftime("%Y-%m-%d %H:%M:%S  attempt 1: gpu-3: ", time.localtime(400)))
    assert f"; {then}, " in line


def test_a_hang_that_ended_is_no_training():
    taken = [*steps(1, 0.0, 20, step_s=0.3), *steps(1, 6.0, 1, step_s=85.0), *steps(1, 91.0, 20, step_s=0.3)]
    found = account_time(0.0, [Attempt(1)], taken, 8, 97.0)
    assert spent(found) == {TimeUse.TRAINING: 12.3, TimeUse.SLOW: 84.7}
    assert "lost to slow or hung steps" in account_line(found, "rank-h")


@pytest.mark.parametrize(("step_s", "slow_s"), [(9.0, 0), (11.0, 10), (29.0, 28)])
def test_a_step_is_slow_from_ten_seconds_on(step_s, slow_s):
    taken = [*steps(1, 0.0, 5, step_s=1.0), *steps(1, 5.0, 1, step_s=step_s)]
    assert account_time(0.0, [Attempt(1)], taken, 8, 5.0 + step_s).seconds[TimeUse.SLOW] == slow_s


@pytest.mark.parametrize(("later_s", "use"), [(15.0, TimeUse.TRAINING), (300.0, TimeUse.WAITING)])
def test_since_the_last_step(later_s, use):
    found = account_time(0.0, [Attempt(1)], steps(1, 0.0, 5), 8, 50.0 + later_s)
    assert found.seconds[use] - (50 if use is TimeUse.TRAINING else 0) == later_s


def test_a_launch_without_steps_and_no_launch():
    assert spent(account_time(0.0, [Attempt(1)], [], 8, 60.0)) == {TimeUse.STARTING: 60}
    assert spent(account_time(0.0, [Attempt(1, 60.0)], [], 8, 90.0)) == {TimeUse.STARTING: 60}
    assert account_time(0.0, [], [], 8, 60.0).goodput is None


def test_every_second_is_counted_once():
    draw = random.Random(7)
    for _ in range(200):
        at, attempts, taken = draw.uniform(0, 100), [], []
        for number in range(1, draw.randint(2, 6)):
            n = draw.choice([0, 1, 5, 20])
            new = steps(number, at, n, draw.uniform(1, 9), [draw.choice([0, 0, 4]) for _ in range(n)])
            at = (new[-1].time if new else at) + draw.uniform(0, 50)
            attempts.append(Attempt(number, at, HUNG, draw.uniform(0, 20)))
            taken += new
            at += draw.uniform(0, 60)
        attempts[-1] = Attempt(attempts[-1].number, None, None, 1.0)
        found = account_time(0.0, attempts, taken, 8, at)
        assert sum(found.seconds.values()) == pytest.approx(at)
        assert min(found.seconds.values()) >= 0
