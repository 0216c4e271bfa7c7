"""What becomes of a run whose saves fail. How one is saved is the test's."""

import time
import types

import pytest
import torch

from llama405b.checkpoint.saving import SavedCheckpoint
from llama405b.contract.checkpoints import TrainedSoFar
from llama405b.contract.errors import EXIT_FAILED, RunError, UserError
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Heartbeat
from llama405b.distributed.ranks import Rank
from llama405b.settings.schema import FIRST_INTERVAL_S, Checkpoint
from llama405b.training.checkpointer import Checkpointer
from llama405b.training.journal import HeartbeatWriter
from llama405b.training.requests import AfterStepActions

FULL = "c: cannot be written (No space left on device)"


class Disk:
    """Saves at once, except after some steps; deletes nothing."""

    is_busy = False

    def __init__(self, fails):
        self.fails, self.step = fails, 0

    def begin(self, step, *_):
        self.step = step

    def finish(self, slowed_s):
        if self.step in self.fails:
            return UserError(FULL)
        return SavedCheckpoint("c", "", 1.0, None, slowed_s)

    def finish_pruning(self):
        return "c: an old checkpoint cannot be deleted" if self.step else ""


def _context(journal, heartbeat=None):
    heartbeat = heartbeat or types.SimpleNamespace(record_save=lambda _: None)
    heartbeat.enter_phase = lambda _: None
    rank = types.SimpleNamespace(world_size=1, is_rank0=True)
    return types.SimpleNamespace(journal=journal, heartbeat=heartbeat, rank=rank)


def _train(fails, last, **more):
    """What is logged, and what ends the run."""
    lines = []
    context = _context(types.SimpleNamespace(log=lines.append, write_event=lambda *_, **__: None))
    saver = Checkpointer(Disk(fails), None, None, Checkpoint(every="1", **more), context, restart_s=1.0)
    for step in range(1, last + 1):
        try:
            saver.after_step(step, AfterStepActions(save=1), [], TrainedSoFar(0), ending=step == last)
        except RunError as ended:
            return lines, step, ended
    return lines, last, None


def test_it_ends_after_five_in_a_row():
    _, step, ended = _train({1, 2, 3, 4, *range(6, 20)}, 19)
    assert step == 11  # which reports that of step 10
    assert str(ended) == f"5 saves in a row failed; the run ends before it loses more steps: {FULL}"
    assert ended.exit_code == EXIT_FAILED


@pytest.mark.parametrize(("most", "until"), [(0, 19), (1, 2)])
def test_it_ends_after_as_many_as_are_asked_for(most, until):
    assert _train(set(range(1, 19)), 19, max_failures=most)[1] == until


def test_a_last_save_that_fails_is_no_refused_input():
    _, step, ended = _train({6}, 6)
    assert (step, str(ended), ended.exit_code) == (6, FULL, EXIT_FAILED)


def test_what_could_not_be_deleted_is_said_unless_the_save_failed_too():
    lines, *_ = _train({2}, 3)
    assert [line.split(" ")[1] for line in lines] == ["c", "an", "2", "c", "an"]


def test_what_steps_lose_beside_a_save_counts_as_waiting():
    events = []
    journal = types.SimpleNamespace(
        log=lambda _: None, write_event=lambda kind, **of: events.append((kind, of["blocked_s"]))
    )
    context = _context(journal)
    saver = Checkpointer(Disk(()), None, None, Checkpoint(every="1"), context, restart_s=1.0)
    for step, (step_s, saves, still_saving) in enumerate(
        [(9.0, 0, 0), (2.0, 0, 0), (2.0, 1, 0), (5.0, 0, 1), (None, 0, 1), (4.0, 1, 0), (1.5, 0, 0), (2.0, 0, 0)], 1
    ):
        wishes = AfterStepActions(save=saves, still_saving=still_saving)
        saver.after_step(step, wishes, [], TrainedSoFar(0), ending=False, step_s=step_s)
    assert events == [("saved", 3.0 + 2.0), ("saved", -0.5)]  # which is less than any wait


@pytest.mark.parametrize(("every", "every_s"), [("4", 8.0), ("10m", 600.0), ("auto", FIRST_INTERVAL_S)])
def test_since_when_a_save_is_due_is_in_the_heartbeat_until_it_is_done(tmp_path, every, every_s):
    heartbeat = HeartbeatWriter(RunDir(tmp_path), Rank(0, 1, 0, "a", torch.device("cpu")))
    journal = types.SimpleNamespace(log=lambda _: None, write_event=lambda *_, **__: None)
    saver = Checkpointer(Disk(()), None, None, Checkpoint(every=every), _context(journal, heartbeat), restart_s=1.0)

    def told():
        found = read_record(Heartbeat, RunDir(tmp_path).heartbeat(0))
        return found.save_since, found.save_every_s

    def step(number, save=0, still_saving=0):
        saver.after_step(
            number,
            AfterStepActions(save=save, still_saving=still_saving),
            [],
            TrainedSoFar(0),
            ending=False,
            step_s=2.0,
        )
        return told()

    assert step(3) == (None, 0.0)
    since = step(4, 1)
    assert since == (pytest.approx(time.time(), abs=60), every_s)
    assert step(5, 0, 1) == since
    assert step(8, 1, 1) == since  # another is due, and the first is still under way
    again = step(9)  # which is begun once the first is done
    assert again > since
    assert step(10) == (None, 0.0)
    waits = step(12, 1, 1)  # for older ones to be deleted
    assert waits > again
    assert step(13, 0, 1) == step(14) == waits
