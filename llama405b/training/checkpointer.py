"""When a run saves, and what is reported of it. How a checkpoint is made is ``checkpoint.saving``'s."""

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

HURRY_S = 10.0  # within the least grace of a stop
POLL_S = 0.5
USUAL_STEPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class AtEnd:
    """What one rank says while ``after_save`` is waited for; the greatest of all ranks' counts."""

    waits: int
    unsent: int  # as in ``AfterStep``
    leaves: int


class Checkpointer:
    """Saves beside training, one checkpoint at a time; all ranks call it alike."""

    def __init__(
        self,
        saving: Saving,
        updater: Updater,
        identity: RunIdentity,
        settings: Checkpoint,
        context: RankContext,
        restart_s: float,
    ) -> None:
        """``restart_s``: what it takes to come as far as the first step, for ``auto``."""
        self.saving = saving
        self.updater = updater
        self.identity = identity
        self.settings = settings
        self.context = context
        self.restart_s = restart_s
        self.cadence = settings.cadence
        self.last_began = time.monotonic()  # the last save; at first, this attempt
        self.cost_s: float | None = None  # what the last save made training wait
        self.took_s = 0.0  # the last save
        self.step = 0  # of the save that is under way; 0: none is
        self.deferred = False  # a save that was due while another was under way
        self.requests_in_save: list[RunRequest] = []  # answered with the save that is under way
        self.pending_requests: list[RunRequest] = []  # answered with the next one
        self.best_loss = saving.store.best_loss() if settings.keep_best else math.inf  # the least that was saved
        self.loss = math.inf  # the evaluation loss of the save that is under way
        self.landed: list[Path] = []  # checkpoints, until somebody takes them
        self.failed = 0  # saves in a row
        self.usual_s = deque[float](maxlen=USUAL_STEPS)  # of the last steps without a save beside them
        self.slowed_s = 0.0  # by the save that is under way, over all steps beside it
        self.unsent = 0  # the rank, from 1, whose ``after_save`` failed when that was told last

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing, or deleting."""
        return self.saving.busy

    @property
    def own_unsent(self) -> int:
        """This rank's number, from 1, if its ``after_save`` fails now; else 0."""
        after = self.saving.after_save
        return self.context.me.rank + 1 if after and after.fault else 0

    def close(self) -> None:
        """Let the next run write into the directory."""
        if self.saving.after_save:
            self.saving.after_save.close()
        self.saving.store.close()

    def tell_after_save(self, unsent: int) -> None:
        """Report for which checkpoints ``after_save`` has succeeded, and a rank (from 1) for whose it fails."""
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
        """Wait on all ranks, since none may leave before the others, until ``after_save`` has succeeded for all that they keep.

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
            print(f"after-save: not done for {after.left_words()}; the next attempt does it", flush=True)
        elif after and after.waiting:
            raise RunError(
                f"checkpoint.after_save failed for {after.left_words()}; correct it and resume the run: only this is left to do"
            )

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step: rank 0's clock decides for all."""
        since_s = time.monotonic() - self.last_began
        return self.context.me.is_rank0 and self.cadence.due(step, since_s, self._interval_s())

    def _interval_s(self) -> float:
        """Return how long it is from save to save as configured; 0: unknown."""
        best_s = best_interval(self.cost_s, self.restart_s, self.settings.mtbf * 3600 / self.context.me.world)
        return self.cadence.interval_s(statistics.median(self.usual_s or [0.0]), best_s)

    def is_best(self, evaluation_loss: float | None) -> bool:
        """Return whether to save since no evaluation loss was lower."""
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
        """Save if that is wished; at the end wait for it.

        While any rank is still writing, the next save is deferred to the first step after that; but for the best weights so far
        the save that is under way is waited for. ``reached``: where training is; ``step_s``: what a step takes.
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
        """Wait for the save that is under way, and report it; returns why it failed."""
        if self.busy:
            self.context.phase(Phase.CHECKPOINT)
        outcome, self.slowed_s = self.saving.finish(self.slowed_s), 0.0
        step, self.step = self.step, 0
        self.context.heartbeat.save(None)
        journal = self.context.journal
        if isinstance(outcome, Saved):
            self.failed = self.unsent = 0  # what fails is told again, so that it is among the last events
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
        """Begin to save, once older checkpoints are deleted."""
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
                f"{counted(self.failed, 'save')} in a row have failed, so the run ends before it loses more steps: {fault}"
            )

    def _wait_for_deletion(self) -> None:
        """Wait until older checkpoints are deleted, and report if one cannot be: the run goes on, and tries again."""
        fault = self.saving.pruned()
        if fault and not self.failed:  # else the save has failed for that
            self.context.log(f"{fault}; that is tried again after the next save")

    def _answer(self, requests: Sequence[RunRequest], step: int, path: Path | None, why: str = "") -> None:
        for request in requests:
            self.context.journal.event(EventKind.ANSWERED, step=step, path=path, request=request.id, detail=why)
