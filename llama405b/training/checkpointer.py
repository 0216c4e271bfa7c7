"""Decide when a run saves, and report saves. ``checkpoint.saving`` makes the checkpoints."""

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from llama405b.checkpoint.saving import Saved, Saving
from llama405b.contract.checkpoints import Reached, RunIdentity
from llama405b.contract.errors import RunError, UserError, counted
from llama405b.contract.records import EventKind, Phase, RequestKind, RunRequest
from llama405b.distributed import collectives
from llama405b.optim.updater import Updater
from llama405b.settings.schema import Checkpoint, best_interval
from llama405b.training.context import RankContext
from llama405b.training.requests import AfterStep

HURRY_S = 10.0  # fits into the shortest grace period of a stop
POLL_S = 0.5
USUAL_STEPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class AtEnd:
    """State of one rank while it waits for ``after_save``; the maximum over all ranks counts."""

    waits: int
    unsent: int  # as in ``AfterStep``
    leaves: int


class Checkpointer:
    """Saves in the background, one checkpoint at a time; all ranks call its methods in the same order."""

    def __init__(
        self,
        saving: Saving,
        updater: Updater,
        identity: RunIdentity,
        settings: Checkpoint,
        context: RankContext,
        restart_s: float,
    ) -> None:
        """``restart_s``: seconds from start to the first step, for ``auto``."""
        self.saving = saving
        self.updater = updater
        self.identity = identity
        self.settings = settings
        self.context = context
        self.restart_s = restart_s
        self.cadence = settings.cadence
        self.last_began = time.monotonic()  # start of the last save; at first, start of this attempt
        self.cost_s: float | None = None  # how long the last save blocked training
        self.took_s = 0.0  # duration of the last save
        self.step = 0  # step of the save in progress; 0: none
        self.deferred = False  # a save became due while another was in progress
        self.requests_in_save: list[RunRequest] = []  # answered when the save in progress ends
        self.pending_requests: list[RunRequest] = []  # answered by the next save
        self.best_loss = (
            saving.store.best_loss() if settings.keep_best else math.inf
        )  # lowest evaluation loss that was saved
        self.loss = math.inf  # evaluation loss of the save in progress
        self.landed: list[Path] = []  # complete checkpoints that were not yet reported to the user's module
        self.failed = 0  # failed saves in a row
        self.usual_s = deque[float](maxlen=USUAL_STEPS)  # durations of the last steps without a save in the background
        self.slowed_s = 0.0  # total slowdown of steps by the save in progress
        self.unsent = 0  # number, from 1, of the rank whose ``after_save`` failed at the last report; 0: none

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing or deleting a checkpoint."""
        return self.saving.busy

    @property
    def own_unsent(self) -> int:
        """The number of this rank, from 1, if its ``after_save`` is failing; else 0."""
        after = self.saving.after_save
        return self.context.me.rank + 1 if after and after.fault else 0

    def close(self) -> None:
        """Release the checkpoint directory for the next run."""
        if self.saving.after_save:
            self.saving.after_save.close()
        self.saving.store.close()

    def tell_after_save(self, unsent: int) -> None:
        """Report the checkpoints for which ``after_save`` succeeded, and the rank (number from 1; 0: none) whose command fails."""
        after = self.saving.after_save
        succeeded = after.results() if after else []
        for step, took_s in succeeded:
            self.context.journal.event(EventKind.AFTER_SAVE, step=step, took_s=took_s)
        if unsent and (succeeded or not self.unsent):
            host = self.saving.store.hosts[unsent - 1]
            why = after.fault if after and after.fault else "its log says why"
            self.context.journal.event(EventKind.AFTER_SAVE_FAILED, detail=f"{host}: {why}")
        elif self.unsent and not (unsent or succeeded):
            self.context.journal.event(EventKind.AFTER_SAVE, detail="it no longer fails")
        self.unsent = unsent

    def wait_for_after_save(self, limit_s: float, stops: Callable[[], bool]) -> None:
        """Wait on all ranks until ``after_save`` has succeeded for all kept checkpoints; no rank may leave before the others.

        ``limit_s``: how long at most; ``stops``: whether somebody asks to stop.
        """
        if not (self.settings.after_save and self.cadence.saves):
            return
        after, until = self.saving.after_save, time.monotonic() + limit_s
        if after:
            after.hasten()
        self.context.phase(Phase.CHECKPOINT)
        while True:
            mine = AtEnd(int(bool(after and after.goes_on)), self.own_unsent, int(stops() or time.monotonic() > until))
            all_of = collectives.all_reduce_max_fields(mine)
            self.context.heartbeat.alive()
            if not all_of.waits or all_of.leaves:
                break
            time.sleep(POLL_S)
        self.tell_after_save(all_of.unsent)
        if after and after.waiting and all_of.leaves:
            print(f"after_save still to run for {after.left_words()}; the next attempt will run it", flush=True)
        elif after and after.waiting:
            raise RunError(
                f"checkpoint.after_save failed for {after.left_words()}; fix it and resume the run: only after_save is left to run"
            )

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after this step; True only on rank 0, whose clock decides for all."""
        since_s = time.monotonic() - self.last_began
        return self.context.me.is_rank0 and self.cadence.due(step, since_s, self._interval_s())

    def _interval_s(self) -> float:
        """Return the configured interval between saves in seconds; 0: unknown."""
        best_s = best_interval(self.cost_s, self.restart_s, self.settings.mtbf * 3600 / self.context.me.world)
        return self.cadence.interval_s(statistics.median(self.usual_s or [0.0]), best_s)

    def is_best(self, evaluation_loss: float | None) -> bool:
        """Return whether to save because this evaluation loss is the lowest so far."""
        return self.settings.keep_best and evaluation_loss is not None and evaluation_loss < self.best_loss

    def after_step(
        self,
        step: int,
        wishes: AfterStep,
        requests: Sequence[RunRequest],
        reached: Reached,
        *,
        ending: bool,
        step_s: float | None = None,
    ) -> None:
        """Start a save if one is due or requested; at the end of the run wait for it.

        While any rank is still writing, the next save is deferred until that is finished. For the best weights so far, wait for the
        save in progress instead. ``reached``: what was trained so far; ``step_s``: duration of the step.
        """
        asked = [request for request in requests if request.kind is RequestKind.SAVE]
        if not self.cadence.saves:
            self._answer(asked, step, None, "checkpoint.every is 0: this run saves no checkpoints")
            return
        self.pending_requests += asked
        self.deferred = self.deferred or bool(wishes.save)
        if step_s and self.step and self.usual_s:
            self.slowed_s += step_s - statistics.median(self.usual_s)
        elif step_s and not self.step:
            self.usual_s.append(step_s)
        if self.step and (ending or wishes.best or not wishes.still_saving):
            self._give_up_after_failures(self.finish(), ending=ending)
        if ending or wishes.best or self.deferred:
            self.context.heartbeat.save(self._interval_s())
        if ending or wishes.best or (self.deferred and not wishes.still_saving):
            self._begin(step, reached, None if ending else step_s)
        if ending:
            fault = self.finish()
            self._wait_for_deletion()
            if fault:
                raise RunError(str(fault))

    def finish(self) -> UserError | None:
        """Wait for the save in progress and report it; return the error if it failed."""
        if self.busy:
            self.context.phase(Phase.CHECKPOINT)
        outcome, self.slowed_s = self.saving.finish(self.slowed_s), 0.0
        step, self.step = self.step, 0
        self.context.heartbeat.save(None)
        journal = self.context.journal
        if isinstance(outcome, Saved):
            self.failed = self.unsent = 0  # a failing after_save is reported again, so that it is among the last events
            self.landed.append(outcome.path)
            self.cost_s, self.took_s = outcome.blocked_s, outcome.took_s
            self.best_loss = min(self.best_loss, self.loss)
            journal.log(f"saved {outcome.path} in {outcome.took_s:.1f} s; training waited {outcome.blocked_s:.1f} s")
            journal.event(
                EventKind.SAVED, step=step, path=outcome.path, digest=outcome.digest,
                took_s=outcome.took_s, blocked_s=outcome.blocked_s,
            )  # fmt: skip
            self._answer(self.requests_in_save, step, outcome.path)
        elif outcome:
            self.failed += 1
            journal.log(f"step {step} was not saved: {outcome}; earlier checkpoints are untouched")
            journal.event(EventKind.NOT_SAVED, step=step, detail=str(outcome))
            self._answer(self.requests_in_save, step, None, str(outcome))
        self.context.phase(Phase.TRAIN)
        return outcome if isinstance(outcome, UserError) else None

    def _begin(self, step: int, reached: Reached, next_update_s: float | None) -> None:
        """Start a save after older checkpoints are deleted."""
        self._wait_for_deletion()
        self.deferred = False
        self.requests_in_save, self.pending_requests = self.pending_requests, []
        self.step, self.last_began = step, time.monotonic()
        self.loss = math.inf if reached.evaluation_loss is None else reached.evaluation_loss
        self.saving.begin(step, self.updater, self.identity, reached, next_update_s)

    def _give_up_after_failures(self, fault: UserError | None, *, ending: bool) -> None:
        most = self.settings.max_failures
        if most and self.failed >= most and not ending:
            raise RunError(
                f"{counted(self.failed, 'save')} in a row failed; the run ends before it loses more steps: {fault}"
            )

    def _wait_for_deletion(self) -> None:
        """Wait until older checkpoints are deleted; log a failure, which is retried after the next save."""
        fault = self.saving.pruned()
        if fault and not self.failed:  # otherwise the failed save already reported it
            self.context.log(f"{fault}; retrying after the next save")

    def _answer(self, requests: Sequence[RunRequest], step: int, path: Path | None, why: str = "") -> None:
        for request in requests:
            self.context.journal.event(EventKind.ANSWERED, step=step, path=path, request=request.id, detail=why)
