"""The user's command for each checkpoint: once, in order, again after a failure and in the next attempt. With real processes."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from llama405b.checkpoint import replication
from llama405b.checkpoint.replication import AfterSave
from llama405b.contract.paths import RunDir
from ops_rig import wait_for

NOTE = "echo $LLAMA405B_STEP $LLAMA405B_RUN ${LLAMA405B_CHECKPOINT##*/} >>notes"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replication, "RETRY_S", (0.1,))
    found = RunDir.from_name("r")
    (found.path / "status").mkdir(parents=True)
    return found


def checkpoint(run, step):
    path = run.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def notes(run):
    path = run.path.parent.parent / "notes"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def started(run, command, *steps, digest="d", limit_s=600):
    said = []
    found = AfterSave(command, run, "a", said.append, limit_s)
    found.begin({checkpoint(run, step): f"{digest}{step}" for step in steps})
    return found, said


def done(found):
    """As the end of a run waits for it."""
    found.retry_now()
    wait_for(lambda: not found.has_work)
    found.close()


def test_the_command_may_be_ended_where_the_rank_has_sigterm_blocked(run, monkeypatch):
    """As under Slurm: `timeout` in the command would end nothing. With bash, which other sites have as sh: dash has a mask of its own."""
    spawn = os.posix_spawn
    monkeypatch.setattr(os, "posix_spawn", lambda _, argv, *more, **rest: spawn("/bin/bash", argv, *more, **rest))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        found, _ = started(run, "grep SigBlk /proc/self/status >notes", 2)
        done(found)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert int((run.path.parent.parent / "notes").read_text().split()[1], 16) == 0


def test_once_for_each_oldest_first(run):
    found, _ = started(run, NOTE, 2, 4)
    found.enqueue(checkpoint(run, 6), "d6")
    done(found)
    assert notes(run) == [2, 4, 6]
    assert [step for step, _ in found.pop_successes()] == [2, 4, 6]
    assert found.pop_successes() == []
    assert (run.path.parent.parent / "notes").read_text().splitlines()[0] == "2 r step-00000002"


def test_what_fails_holds_up_what_follows_and_nothing_is_lost(run):
    found, said = started(run, f"test -e go || exit 7; {NOTE}", 2)
    wait_for(lambda: found.fault == "exit code 7")
    found.enqueue(checkpoint(run, 4), "d4")
    assert found.pending_steps == {2, 4}
    Path("go").touch()
    wait_for(lambda: notes(run) == [2, 4])
    done(found)
    assert found.pending_steps == frozenset()
    assert found.fault == ""
    assert said == ["after-save: step-00000002 on a: exit code 7; will retry"] * found.failures


def test_the_tries_of_each_checkpoint_are_its_own(run):
    found, _ = started(run, "test $LLAMA405B_STEP = 2 && test -e tried || { touch tried; exit 7; }", 2, 4)
    wait_for(lambda: found.failures > 1)
    found.close()
    assert (found.failures - found.tries, found.pending_steps) == (1, {4})  # the first failure was of step 2


def test_the_next_attempt_does_what_this_one_did_not(run):
    found, _ = started(run, f"test $LLAMA405B_STEP = 2 && {NOTE}", 2, 4)
    wait_for(lambda: found.fault)
    found.close()
    again, _ = started(run, NOTE, 2, 4)
    done(again)
    assert notes(run) == [2, 4]


def test_a_step_that_was_saved_anew_is_another_checkpoint(run):
    done(started(run, NOTE, 2)[0])
    done(started(run, NOTE, 2)[0])
    assert notes(run) == [2]
    done(started(run, NOTE, 2, digest="other")[0])
    assert notes(run) == [2, 2]


def test_what_was_deleted_meanwhile_is_passed_over(run):
    path = checkpoint(run, 2)
    found = AfterSave(NOTE, run, "a", print, 600)
    path.rmdir()
    found.begin({path: "d2"})
    found.enqueue(checkpoint(run, 4), "d4")
    done(found)
    assert notes(run) == [4]


def test_the_end_waits_for_it_and_gives_up_after_three_failures(run):
    found, _ = started(run, f"sleep 0.5; {NOTE}", 2)
    done(found)
    assert notes(run) == [2]
    failing, said = started(run, "exit 3", 2, 4)
    done(failing)
    assert len(said) >= 3
    assert failing.describe_pending() == "runs/r/checkpoints/step-00000004 on a (exit code 3)"


def test_later_tries_wait_longer_until_training_is_over(run, monkeypatch):
    monkeypatch.setattr(replication, "RETRY_S", (1.0, 2.0, 3.0))
    found, waits = AfterSave("exit 3", run, "a", lambda _: None, 600), []
    wait = found.wake_up.wait

    def wait_less(timeout):
        waits.append(timeout)
        return wait(0.01)

    monkeypatch.setattr(found.wake_up, "wait", wait_less)
    found.begin({checkpoint(run, 2): "d2"})
    wait_for(lambda: len(waits) >= 5)
    found.retry_now()
    n_before = len(waits) + 1  # one may have begun meanwhile
    wait_for(lambda: not found.has_work)
    found.close()
    assert waits[:5] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert set(waits[n_before:]) == {1.0}


@pytest.mark.slow
def test_a_command_that_hangs_is_told_once_others_wait_for_it_and_is_ended_at_its_limit(run, monkeypatch):
    monkeypatch.setattr(replication, "JOIN_TIMEOUT_S", 0.3)
    found, said = started(run, f"test -e go || sleep 600; {NOTE}", 2)
    wait_for(lambda: found.pid)
    told = []
    for step in (4, 6):
        found.enqueue(checkpoint(run, step), f"d{step}")
        told.append(found.fault)
    assert re.fullmatch("still running after [0-9]+ s, and 2 checkpoints wait for it", told[1]), told
    assert told[0] == ""
    found.close()
    found, said = started(run, f"test -e go || {{ touch go; sleep 600; }}; {NOTE}", 2, limit_s=1)
    wait_for(lambda: found.fault)
    assert found.fault == "killed after 1 s (checkpoint.after_save_limit)"
    done(found)
    assert notes(run) == [2]
    assert said == ["after-save: step-00000002 on a: killed after 1 s (checkpoint.after_save_limit); will retry"]


def test_what_failed_before_the_end_is_tried_three_times_more(run):
    found, _ = started(run, "exit 3", 2)
    wait_for(lambda: found.failures >= replication.MAX_FINAL_FAILURES)
    found.retry_now()
    assert found.has_work
    done(found)
    assert found.failures >= 2 * replication.MAX_FINAL_FAILURES


def test_a_filesystem_that_fails_is_a_failure_like_others(run, monkeypatch):
    found = AfterSave(NOTE, run, "a", print, 600)
    path, real, faults = checkpoint(run, 2), Path.exists, [OSError(116, "Stale file handle")] * 2

    def exists(self):
        if self == path and faults:
            raise faults.pop()
        return real(self)

    monkeypatch.setattr(Path, "exists", exists)
    found.begin({path: "d2"})
    wait_for(lambda: found.failures == 1)
    assert found.fault == "Stale file handle"
    done(found)
    assert notes(run) == [2]


def test_a_stop_does_not_wait_long_and_leaves_no_process(run, monkeypatch):
    monkeypatch.setattr(replication, "JOIN_TIMEOUT_S", 0.3)
    found, _ = started(run, "echo $$ >pid; trap '' TERM; sleep 600; sleep 600", 2)
    pid_file = run.path.parent.parent / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    found.close()
    assert wait_for(lambda: found.fault) == "killed by signal 9"
    pid = int(pid_file.read_text())
    wait_for(lambda: not in_group(pid))


def in_group(group):
    """The processes of a group that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            found += [path.parent.name] * (int(its_group) == group and state != "Z")
    return found
