"""When this run saves, and what is told of it. Knows the clock, the journal and the requests; not how a checkpoint is made."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b.checkpoint.saving import Saved, Saving
from llama405b.contract.cadence import best_interval
from llama405b.contract.checkpoints import Reached, RunIdentity
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.events import EventKind
from llama405b.contract.phrases import counted
from llama405b.contract.records import Phase, RunRequest
from llama405b.contract.schema import Checkpoint
from llama405b.optim.updater import Updater
from llama405b.training.heartbeat import HeartbeatWriter
from llama405b.training.journal import Journal


class SaveSchedule:
    """When the next checkpoint is due, by this rank's clock."""

    def __init__(self, config: Checkpoint, world: int, restart_s: float) -> None:
        self.cadence, self.restart_s, self.mtbf_s = config.cadence, restart_s, config.mtbf * 3600 / world
        self.most_failures = config.max_failures
        self.began_at = time.monotonic()
        self.cost_s: float | None = None

    def due(self, step: int) -> bool:
        """Return whether to save after this step."""
        best_s = best_interval(self.cost_s, self.restart_s, self.mtbf_s)
        return self.cadence.due(step, time.monotonic() - self.began_at, best_s)

    def began(self) -> None:
        """Begin to count anew."""
        self.began_at = time.monotonic()


class Checkpointer:
    """Saves beside training, one checkpoint at a time; all ranks call it alike."""

    def __init__(
        self,
        saving: Saving,
        updater: Updater,
        identity: RunIdentity,
        clock: SaveSchedule,
        journal: Journal,
        pulse: HeartbeatWriter,
    ) -> None:
        self.saving, self.updater, self.identity = saving, updater, identity
        self.clock, self.journal, self.pulse = clock, journal, pulse
        self.saves, self.most_failures = clock.cadence.saves, clock.most_failures
        self.step = 0  # of the save that is under way; 0: none is
        self.put_off = False  # a save that was due while another was under way
        self.asked: list[RunRequest] = []  # answered with the save that is under way
        self.waiting: list[RunRequest] = []  # answered with the next one
        self.best_loss = math.inf  # the least evaluation loss that was saved
        self.evaluated = math.inf  # that of the save that is under way
        self.failed = 0  # saves in a row

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing, or deleting."""
        return self.saving.busy

    def after_step(
        self,
        step: int,
        *,
        due: bool,
        busy: bool,
        ending: bool,
        requests: Sequence[RunRequest],
        reached: Reached,
        step_s: float | None = None,
        best: bool = False,
    ) -> None:
        """Save if that is due or requested; at the end wait for it.

        ``due``: alike on all ranks, as is ``busy``, whether any of them is still writing: then the next save is put off until the
        first step after that. ``best``: alike as well; then the save that is under way is waited for.
        ``reached``: where training is; ``step_s``: what a step takes.

        Raises:
            UserError: Another run has taken the directory over.
            RunError: The last checkpoint of the run could not be written, or too many in a row.
        """
        self.waiting += requests
        self.put_off = self.put_off or due
        if self.step and (ending or best or not busy):
            why = self.finish()
            if self.most_failures and self.failed >= self.most_failures and not ending:
                raise RunError(
                    f"{counted(self.failed, 'save')} in a row have failed, so the run ends before it loses more steps: {why}"
                )
        if ending or best or (self.put_off and not busy):
            self.begin(step, reached, None if ending else step_s)
        if ending:
            failed = self.finish()
            self.tidy()
            if failed:
                raise RunError(str(failed))

    def begin(self, step: int, reached: Reached, next_update_s: float | None) -> None:
        """Begin to save, once older checkpoints are deleted."""
        self.tidy()
        self.put_off = False
        self.asked, self.waiting = self.waiting, []
        self.step = step
        self.clock.began()
        self.evaluated = math.inf if reached.evaluation_loss is None else reached.evaluation_loss
        self.saving.begin(step, self.updater, self.identity, reached, next_update_s)

    def finish(self) -> UserError | None:
        """Wait for the save that is under way, and report it; returns why it failed.

        Raises:
            UserError: Another run has taken the directory over.
        """
        if self.busy:
            self.pulse.phase(Phase.CHECKPOINT)
        outcome, step, self.step = self.saving.finish(), self.step, 0
        if isinstance(outcome, Saved):
            self.failed = 0
            self.clock.cost_s = outcome.blocked_s
            self.best_loss = min(self.best_loss, self.evaluated)
            self.journal.log(
                f"saved {outcome.path} in {outcome.took_s:.1f} s; training waited {outcome.blocked_s:.1f} s"
            )
            self.journal.event(
                EventKind.SAVED, step=step, path=outcome.path, digest=outcome.digest,
                took_s=outcome.took_s, blocked_s=outcome.blocked_s,
            )  # fmt: skip
            self.answer(step, outcome.path, "")
        elif outcome:
            self.failed += 1
            self.journal.log(f"step {step} was not saved: {outcome}; earlier checkpoints are untouched")
            self.journal.event(EventKind.NOT_SAVED, step=step, detail=str(outcome))
            self.answer(step, None, str(outcome))
        self.pulse.phase(Phase.TRAIN)
        return outcome if isinstance(outcome, UserError) else None

    def tidy(self) -> None:
        """Wait until older checkpoints are deleted, and report if one cannot be: the run goes on, and tries again."""
        why = self.saving.pruned()
        if why and not self.failed:  # else the save has failed for that
            self.journal.log(f"{why}; that is tried again after the next save")

    def answer(self, step: int, path: Path | None, why: str) -> None:
        """Report for all requests of this save that they were carried out, or why not."""
        for request in self.asked:
            self.journal.event(EventKind.ANSWERED, step=step, path=path, request=request.id, detail=why)
