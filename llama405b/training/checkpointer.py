"""Decide when a run saves, and report saves. ``checkpoint.saving`` makes the checkpoints."""

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from llama405b.checkpoint.saving import CheckpointSaver, SavedCheckpoint
from llama405b.contract.checkpoints import RunIdentity, TrainedSoFar
from llama405b.contract.errors import RunError, UserError, pluralize
from llama405b.contract.records import EventKind, Phase, RequestKind, RunRequest
from llama405b.distributed import collectives
from llama405b.optim.updater import Updater
from llama405b.settings.schema import Checkpoint, best_interval_s
from llama405b.training.context import RankContext
from llama405b.training.requests import AfterStepActions

STOP_PATIENCE_S = 10.0  # fits into the shortest grace period of a stop
POLL_S = 0.5
TYPICAL_STEPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class AfterSaveStatus:
    """State of one rank while it waits for ``after_save``; the maximum over all ranks counts."""

    is_waiting: int
    failed_rank: int  # as in ``AfterStepActions``
    gives_up: int


class Checkpointer:
    """Saves in the background, one checkpoint at a time; all ranks call its methods in the same order."""

    def __init__(
        self,
        saving: CheckpointSaver,
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
        self.last_save_start_s = time.monotonic()  # start of the last save; at first, start of this attempt
        self.blocked_s: float | None = None  # how long the last save blocked training
        self.save_s = 0.0  # duration of the last save
        self.saving_step = 0  # step of the save in progress; 0: none
        self.is_deferred = False  # a save became due while another was in progress
        self.requests_in_save: list[RunRequest] = []  # answered when the save in progress ends
        self.pending_requests: list[RunRequest] = []  # answered by the next save
        self.best_loss = (
            saving.store.best_loss() if settings.keep_best else math.inf
        )  # lowest evaluation loss that was saved
        self.saving_loss = math.inf  # evaluation loss of the save in progress
        self.new_checkpoints: list[Path] = []  # complete checkpoints that were not yet reported to the user's module
        self.n_failed = 0  # failed saves in a row
        self.typical_steps_s = deque[float](
            maxlen=TYPICAL_STEPS
        )  # durations of the last steps without a save in the background
        self.slowdown_s = 0.0  # total slowdown of steps by the save in progress
        self.failed_rank = 0  # number, from 1, of the rank whose ``after_save`` failed at the last report; 0: none

    @property
    def local_failed_rank(self) -> int:
        """The number of this rank, from 1, if its ``after_save`` is failing; else 0."""
        after_save = self.saving.after_save
        return self.context.rank.index + 1 if after_save and after_save.fault else 0

    def close(self) -> None:
        """Release the checkpoint directory for the next run."""
        if self.saving.after_save:
            self.saving.after_save.close()
        self.saving.store.close()

    def report_after_save(self, failed_rank: int) -> None:
        """Report the checkpoints for which ``after_save`` succeeded, and the rank (number from 1; 0: none) whose command fails."""
        after_save = self.saving.after_save
        succeeded = after_save.pop_successes() if after_save else []
        for step, took_s in succeeded:
            self.context.journal.write_event(EventKind.AFTER_SAVE, step=step, took_s=took_s)
        if failed_rank and (succeeded or not self.failed_rank):
            host = self.saving.store.hosts[failed_rank - 1]
            reason = after_save.fault if after_save and after_save.fault else "its log says why"
            self.context.journal.write_event(EventKind.AFTER_SAVE_FAILED, detail=f"{host}: {reason}")
        elif self.failed_rank and not (failed_rank or succeeded):
            self.context.journal.write_event(EventKind.AFTER_SAVE, detail="it no longer fails")
        self.failed_rank = failed_rank

    def wait_for_after_save(self, limit_s: float, should_stop: Callable[[], bool]) -> None:
        """Wait on all ranks until ``after_save`` has succeeded for all kept checkpoints; no rank may leave before the others.

        ``limit_s``: how long at most; ``should_stop``: whether somebody asks to stop.
        """
        if not (self.settings.after_save and self.cadence.is_enabled):
            return
        after_save, deadline = self.saving.after_save, time.monotonic() + limit_s
        if after_save:
            after_save.retry_now()
        self.context.heartbeat.enter_phase(Phase.CHECKPOINT)
        while True:
            local = AfterSaveStatus(
                int(bool(after_save and after_save.has_work)),
                self.local_failed_rank,
                int(should_stop() or time.monotonic() > deadline),
            )
            combined = collectives.all_reduce_max_fields(local)
            self.context.heartbeat.record_alive()
            if not combined.is_waiting or combined.gives_up:
                break
            time.sleep(POLL_S)
        self.report_after_save(combined.failed_rank)
        if after_save and after_save.queue and combined.gives_up:
            print(
                f"after_save still to run for {after_save.describe_pending()}; the next attempt will run it", flush=True
            )
        elif after_save and after_save.queue:
            raise RunError(
                f"checkpoint.after_save failed for {after_save.describe_pending()}; fix it and resume the run: only "
                f"after_save is left to run"
            )

    def is_due(self, step: int) -> bool:
        """Return whether a save is due after this step; True only on rank 0, whose clock decides for all."""
        elapsed_s = time.monotonic() - self.last_save_start_s
        return self.context.rank.is_rank0 and self.cadence.is_due(step, elapsed_s, self._interval_s())

    def _interval_s(self) -> float:
        """Return the configured interval between saves in seconds; 0: unknown."""
        best_s = best_interval_s(
            self.blocked_s, self.restart_s, self.settings.mtbf * 3600 / self.context.rank.world_size
        )
        return self.cadence.interval_s(statistics.median(self.typical_steps_s or [0.0]), best_s)

    def is_best(self, evaluation_loss: float | None) -> bool:
        """Return whether to save because this evaluation loss is the lowest so far."""
        return self.settings.keep_best and evaluation_loss is not None and evaluation_loss < self.best_loss

    def after_step(
        self,
        step: int,
        actions: AfterStepActions,
        requests: Sequence[RunRequest],
        progress: TrainedSoFar,
        *,
        ending: bool,
        step_s: float | None = None,
    ) -> None:
        """Start a save if one is due or requested; at the end of the run wait for it.

        While any rank is still writing, the next save is deferred until that is finished. For the best weights so far, wait for the
        save in progress instead. ``progress``: what was trained so far; ``step_s``: duration of the step.
        """
        save_requests = [request for request in requests if request.kind is RequestKind.SAVE]
        if not self.cadence.is_enabled:
            self._answer(save_requests, step, None, "checkpoint.every is 0: this run saves no checkpoints")
            return
        self.pending_requests += save_requests
        self.is_deferred = self.is_deferred or bool(actions.save)
        if step_s and self.saving_step and self.typical_steps_s:
            self.slowdown_s += step_s - statistics.median(self.typical_steps_s)
        elif step_s and not self.saving_step:
            self.typical_steps_s.append(step_s)
        if self.saving_step and (ending or actions.save_best or not actions.still_saving):
            self._give_up_after_failures(self.finish(), ending=ending)
        if ending or actions.save_best or self.is_deferred:
            self.context.heartbeat.record_save(self._interval_s())
        if ending or actions.save_best or (self.is_deferred and not actions.still_saving):
            self._begin(step, progress, None if ending else step_s)
        if ending:
            error = self.finish()
            self._wait_for_deletion()
            if error:
                raise RunError(str(error))

    def finish(self) -> UserError | None:
        """Wait for the save in progress and report it; return the error if it failed."""
        if self.saving.is_busy:
            self.context.heartbeat.enter_phase(Phase.CHECKPOINT)
        outcome, self.slowdown_s = self.saving.finish(self.slowdown_s), 0.0
        step, self.saving_step = self.saving_step, 0
        self.context.heartbeat.record_save(None)
        journal = self.context.journal
        if isinstance(outcome, SavedCheckpoint):
            self.n_failed = self.failed_rank = (
                0  # a failing after_save is reported again, so that it is among the last events
            )
            self.new_checkpoints.append(outcome.path)
            self.blocked_s, self.save_s = outcome.blocked_s, outcome.elapsed_s
            self.best_loss = min(self.best_loss, self.saving_loss)
            journal.log(f"saved {outcome.path} in {outcome.elapsed_s:.1f} s; training waited {outcome.blocked_s:.1f} s")
            journal.write_event(
                EventKind.SAVED, step=step, path=outcome.path, digest=outcome.digest,
                took_s=outcome.elapsed_s, blocked_s=outcome.blocked_s,
            )  # fmt: skip
            self._answer(self.requests_in_save, step, outcome.path)
        elif outcome:
            self.n_failed += 1
            journal.log(f"step {step} was not saved: {outcome}; earlier checkpoints are untouched")
            journal.write_event(EventKind.NOT_SAVED, step=step, detail=str(outcome))
            self._answer(self.requests_in_save, step, None, str(outcome))
        self.context.heartbeat.enter_phase(Phase.TRAIN)
        return outcome if isinstance(outcome, UserError) else None

    def _begin(self, step: int, progress: TrainedSoFar, next_update_s: float | None) -> None:
        """Start a save after older checkpoints are deleted."""
        self._wait_for_deletion()
        self.is_deferred = False
        self.requests_in_save, self.pending_requests = self.pending_requests, []
        self.saving_step, self.last_save_start_s = step, time.monotonic()
        self.saving_loss = math.inf if progress.evaluation_loss is None else progress.evaluation_loss
        self.saving.begin(step, self.updater, self.identity, progress, next_update_s)

    def _give_up_after_failures(self, error: UserError | None, *, ending: bool) -> None:
        max_failures = self.settings.max_failures
        if max_failures and self.n_failed >= max_failures and not ending:
            raise RunError(
                f"{pluralize(self.n_failed, 'save')} in a row failed; the run ends before it loses more steps: {error}"
            )

    def _wait_for_deletion(self) -> None:
        """Wait until older checkpoints are deleted; log a failure, which is retried after the next save."""
        error = self.saving.finish_pruning()
        if error and not self.n_failed:  # otherwise the failed save already reported it
            self.context.journal.log(f"{error}; retrying after the next save")

    def _answer(self, requests: Sequence[RunRequest], step: int, path: Path | None, reason: str = "") -> None:
        for request in requests:
            self.context.journal.write_event(
                EventKind.ANSWERED, step=step, path=path, request=request.id, detail=reason
            )
