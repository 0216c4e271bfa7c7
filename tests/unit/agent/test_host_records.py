"""What an agent keeps on its host: why an attempt failed, once, and what the run's guard last said."""

import concurrent.futures
import dataclasses
import errno
import os

import pytest

from llama405b.contract import reader
from llama405b.contract.files import append_line, read_records, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind, FailureRecord, GuardState
from llama405b.spec.plan import Node, Plan
from llama405b_tools.agent import processes
from llama405b_tools.agent.describe import status
from llama405b_tools.agent.evidence import evidence
from llama405b_tools.agent.processes import machine_id, note, record_failure
from llama405b_tools.agent.starting import stop
from llama405b_tools.run import query

PLAN = Plan("r", 2, 5.0, "r-2-x", "a:1", ("-m", "mine"), (), (Node("a", 1, 0, "/w", "/py", "", "", {}),))
HUNG = Cause(CauseKind.HUNG, "b", 1, phase="train", step=7, age_s=301.5)
GUARD = GuardState("r", 7, 8, "laptop x y", 5, command="--restart 5 --run r --resume auto")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(RunDir.from_name("r").plan, PLAN)
    return RunDir.from_name("r")


def told():
    return status("a", "r").runs[0]


def test_a_guard_that_died_here_is_known_at_once_wherever_the_operator_is(run):
    """Its last beat is seconds old, and another host may have heard a later one."""
    lives = dataclasses.replace(
        GUARD, machine=machine_id(), pid=os.getpid(), pid_start=processes.start_time(os.getpid())
    )
    before_boot = dataclasses.replace(lives, machine=" ".join([*machine_id().split()[:-1], "another-boot"]))
    for guard, gone in ((dataclasses.replace(lives, pid=2**22 + 1), True), (before_boot, True), (lives, False)):
        note("r", "a", "r-2-x", guard)
        found = query.guard_of_hosts("r", [*query.guard_reports([told()]), (0.1, guard)], 1000.0)
        assert (found.is_gone, found.is_guarding) == (gone, not gone)


def test_a_host_whose_disk_is_full_still_tells_how_full_it_is(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(processes, "write_json", full)
    [disk] = note("r", "a", "r-2-x", GUARD)
    assert (disk.path, 0 <= disk.free_bytes <= disk.total_bytes) == (str(run.path.absolute()), True)


def test_the_first_who_decides_why_an_attempt_failed_is_kept(run):
    for blame in (
        FailureRecord(1, "b", HUNG),
        FailureRecord(2, "a", HUNG),
        FailureRecord(2, "c", Cause(CauseKind.LOST_PEER, "c", 2)),
    ):
        record_failure(run, "a", blame)
    assert read_records(FailureRecord, run.blames("a"), 9) == [FailureRecord(1, "b", HUNG), FailureRecord(2, "a", HUNG)]
    assert told().blames == (FailureRecord(1, "b", HUNG), FailureRecord(2, "a", HUNG))


def test_the_last_records_are_those_in_a_file_s_last_bytes(run):
    blames = [FailureRecord(attempt, "b", HUNG) for attempt in (1, 2, 3)]
    for blame in blames:
        append_line(run.blames("a"), reader.dumps(blame))
    size = run.blames("a").stat().st_size // 3
    assert [read_records(FailureRecord, run.blames("a"), 9, size * n // 2) for n in (1, 3, 9)] == [
        [],
        blames[2:],
        blames,
    ]


def test_a_look_at_the_ranks_leaves_no_thread_waiting_for_more(run, monkeypatch):
    pools = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, *words):
            super().__init__(*words)
            pools.append(self)

    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
    assert evidence("r", "a", 0.0).ranks[0].rank == 0
    for pool in pools:
        with pytest.raises(RuntimeError, match="shutdown"):
            pool.submit(int)


def test_ending_a_launch_records_why_and_ending_another_does_not(run):
    for only, known in (("r-1-x", 0), ("r-2-x", 1)):
        stop("r", "a", only=only, blame=FailureRecord(2, "b", HUNG))
        assert len(told().blames) == known


def test_a_guard_is_heard_by_the_launch_that_it_guards_until_somebody_stops_it(run):
    note("r", "a", "r-1-x", GUARD)
    assert told().guard is None
    note("r", "a", "r-2-x", GUARD)
    heard = told()
    assert (heard.guard.pid, heard.guard.command) == (GUARD.pid, GUARD.command)
    assert 0 <= heard.now - heard.guard.time < 60  # by the host's own clock
    stop("r", "a", by="me@here")
    note("r", "a", "r-2-x", GUARD)  # it has not heard of the stop yet
    assert told().guard is None
