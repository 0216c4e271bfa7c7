"""How following a run handles what arrives: values in, values out."""

import dataclasses
import types

import pytest
from fakes import running_fleet
from run_rig import ended, metrics, plan, take

from llama405b.contract.records import Cause, CauseKind, EventKind, Phase, RunEvent
from llama405b_tools.agent.messages import NodeUpdate, RankHeartbeat
from llama405b_tools.run import follow
from llama405b_tools.run.follow import Ending, EndKind, RunMonitor, watch_run
from llama405b_tools.run.hang import Pace
from llama405b_tools.run.judge import Failure
from llama405b_tools.run.query import HostMessage, Unreachable


@pytest.fixture
def watch():
    return RunMonitor(plan("-m", "llama405b.train"))


@pytest.fixture
def foreign():
    """A program of the user's own."""
    return RunMonitor(plan("mine.py"))


def test_who_is_lost_is_named_before_who_waits_for_it(watch):
    watch.handle(HostMessage("b", Unreachable("no answer"), 0.0))
    take(watch, "a", beats=(RankHeartbeat(0, "a", 5, 0.0, 7, Phase.TRAIN, -5.0),), now=1000.0)
    watch.check_hang(Pace(load_s=3540.0, min_hang_s=300.0))
    worst = watch.worst_failure()
    assert (worst.host, worst.cause.kind) == ("b", CauseKind.UNREACHABLE)
    assert watch.is_hung


@pytest.mark.parametrize(("since", "late"), [(None, False), (990.0, False), (400.0, True)])
def test_a_guard_is_told_of_a_save_that_takes_too_long(watch, since, late):
    saved = RunEvent(100.0, "rank-0", EventKind.SAVED, 1, 10, took_s=5.0)  # by an earlier attempt
    assert watch.late_save() == ""
    beat = RankHeartbeat(0, "a", 5, 999.0, 35, Phase.TRAIN, 0.0, save_since=since, save_every_s=900.0)
    take(watch, "a", events=(saved,), beats=(beat,), now=1000.0)
    assert bool(watch.late_save()) is late


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Watch a run on a and b that stands at second 4, with a clock of its own; returns what is known in the end."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow, "time", clock)
    monkeypatch.setattr(follow, "POLL_S", 0.001)

    def until_the_end(hang_after_s, a_until, b_until, a_ends=None):
        def until(watch):
            clock.now += 1
            for rank, (host, heard_until) in enumerate({"a": a_until, "b": b_until}.items()):
                if clock.now < heard_until:
                    beats = (RankHeartbeat(rank, host, 5, min(clock.now, 4.0), 7, Phase.TRAIN, -5.0),)
                    take(watch, host, beats=beats, now=clock.now)
            if a_ends and clock.now == a_until:
                take(watch, "a", node=a_ends)
            return clock.now == 60

        with running_fleet(("a", "b"), followed := plan("-m", "llama405b.train")) as fleet:
            return watch_run(fleet, followed, Pace(load_s=3540.0, min_hang_s=hang_after_s), until)

    return until_the_end


@pytest.mark.parametrize(
    ("a_until", "a_ends"), [(60, None), (15, ended(Cause(CauseKind.LOST_PEER, "a", 0)))], ids=["hangs", "says so"]
)
def test_the_host_whose_link_is_cut_is_named_before_its_connection_notices(watched, a_until, a_ends):
    """From b nothing comes any more; a hangs, or reports that it has lost contact."""
    worst = watched(22.0, a_until, 5, a_ends).worst_failure()
    assert (worst.host, worst.cause.kind) == ("b", CauseKind.UNREACHABLE)


def test_a_run_does_not_hang_because_nothing_is_heard_of_it(watched):
    """The guard's own network is away for a while."""
    assert watched(10.0, 5, 5).failures == []


def test_a_rank_whose_heartbeat_stands_does_not_hang_while_steps_are_taken(watch):
    """Its disk may be full; a restart would cost what was computed since the last checkpoint."""
    now = 1000.0
    for step_age_s, hangs in ((20.0, False), (400.0, True)):
        last = dataclasses.replace(metrics(50, 3.0, 2), time=now - step_age_s)
        take(
            watch,
            "a",
            metrics=(last,),
            beats=(RankHeartbeat(0, "a", 50, now - step_age_s, 50, Phase.TRAIN, 0.0),),
            now=now,
        )
        take(watch, "b", beats=(RankHeartbeat(1, "b", 5, 0.0, 7, Phase.TRAIN, -5.0),), now=now)
        watch.check_hang(Pace(load_s=3540.0, min_hang_s=300.0))
        assert watch.is_hung is hangs


def test_a_host_that_is_only_lost_is_no_failure(watch):
    watch.handle(HostMessage("b", Unreachable("no answer"), 0.0))
    assert watch.worst_failure() is None
    assert len(watch.handle(HostMessage("b", Unreachable("no answer"), 0.0))) == 0  # said once
    assert len(take(watch, "b", end=True)) == 1  # and that it is back


def test_a_host_back_without_its_files_was_started_once(watch):
    take(watch, "b", node=NodeUpdate(False, None, ""))
    assert (watch.worst_failure().host, watch.worst_failure().cause.kind) == ("b", CauseKind.FILES_GONE)


def test_where_the_failure_began_is_named_whoever_ends_first(watch):
    take(watch, "a", node=ended(Cause(CauseKind.LOST_PEER, "a", 0)))
    take(watch, "b", node=ended(Cause(CauseKind.RANK_KILLED, "b", 1, signal=9)))
    assert (watch.worst_failure().host, [*watch.ended_at]) == ("b", ["a", "b"])


def test_the_newest_step_is_of_this_attempt(watch):
    take(watch, "a", metrics=(metrics(1, 5.0, 1), metrics(3, 4.0, 1)))
    assert watch.newest_step == 0
    take(watch, "a", metrics=(metrics(2, 4.5, 2),))
    assert (watch.newest_step, [each.step for each in watch.metrics]) == (2, [1, 2])


def test_what_was_saved_is_an_event_of_this_attempt(watch):
    take(watch, "a", events=(RunEvent(0.0, "rank-0", EventKind.SAVED, 1, 4, "/old"),))
    assert watch.saved == ""
    take(watch, "a", events=(RunEvent(0.0, "rank-0", EventKind.SAVED, 2, 8, "/new"),))
    assert watch.saved == "/new"


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(CauseKind.REFUSED, True), (CauseKind.FOLLOWED, True), (CauseKind.RANK_EXIT, False), (CauseKind.HUNG, False)],
)
def test_a_refusal_is_known_by_its_kind(kind, refused):
    assert Ending(EndKind.FAILED, Failure("a", Cause(kind))).would_fail_again is refused


def test_exit_codes():
    codes = {EndKind.WELL: 0, EndKind.FAILED: 1, EndKind.STOPPED: 1, EndKind.RESTART: 1, EndKind.LEFT: 130}
    assert {kind: Ending(kind).code for kind in EndKind} == codes
