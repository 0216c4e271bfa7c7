"""A run's directory of checkpoints at its start: taken, looked through, and loaded from."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from llama405b.checkpoint.after_save import AfterSave
from llama405b.checkpoint.compatibility import Beginning, changes_at, other_software
from llama405b.checkpoint.replication import Replication
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.saving import Saving
from llama405b.checkpoint.store import CheckpointView, Store
from llama405b.checkpoint.verified import DamagedError
from llama405b.contract.errors import UserError
from llama405b.contract.events import EventKind
from llama405b.contract.phrases import counted
from llama405b.contract.records import Phase
from llama405b.contract.schema import Checkpoint
from llama405b.optim.updater import Updater
from llama405b.parallel.load_weights import refuse_not_finite
from llama405b.training.context import RankContext

Check = Callable[[CheckpointView], None]  # raises UserError if a checkpoint must not be resumed from


def open_checkpoints(
    settings: Checkpoint, timeout_s: int, resume: str, n_bytes: int, context: RankContext, check: Check
) -> tuple[Saving, Resume]:
    """Take the directory of checkpoints, and choose the one to resume from.

    ``timeout_s``: of the collectives beside training; ``n_bytes``: of each checkpoint.

    Raises:
        UserError: The directory or the checkpoint cannot be used.
    """
    shared = settings.storage == "shared"
    store = Store(
        Path(settings.dir or context.run.checkpoints),
        settings.keep,
        context.me,
        timeout_s,
        run=context.run,
        say=context.log,
        shared=shared,
        keep_best=settings.keep_best,
    )
    if not shared:
        what = counted(n := len(store.owners), "directory", "directories")
        then = "and the next host a copy" if settings.copies and n > 1 else "if a host is lost, so are they"
        context.log(f"checkpoints: each host keeps its part, {what} in all; {then}")
    try:
        if settings.cadence.saves:
            store.take()
            store.check_room(n_bytes, settings.copies)
        chosen = Resume(store, resume)
        if chosen.found:
            check(chosen.found)
        replication = Replication(store) if settings.copies and settings.cadence.saves else None
    except UserError:
        store.close()
        raise
    after_save = None
    if settings.after_save and store.is_owner:
        say, limit_s = functools.partial(print, flush=True), settings.after_save_limit
        after_save = AfterSave(settings.after_save, context.run, context.me.host, say, limit_s)
    saving = Saving(store, settings.staging_bytes, replication, after_save, delete_unsent=settings.delete_unsent)
    return saving, chosen


def log_changes(
    found: CheckpointView, *, begin: Callable[[CheckpointView], Beginning], allowed: Sequence[str], context: RankContext
) -> None:
    """Log what changes with a resume; ``begin`` tells where the run goes on from a checkpoint."""
    for said in filter(None, (other_software(found), changes_at(found, begin(found).identity, allowed))):
        context.log(said)


def resume_run(chosen: Resume, check: Check, module: nn.Module, updater: Updater, context: RankContext) -> int:
    """Load the chosen checkpoint, or an older one if it is damaged, and report it; returns the steps that are done."""
    journal = context.journal
    if chosen.found is None:
        journal.event(EventKind.STARTED, step=0)
        if chosen.wanted == "auto":
            journal.log("no checkpoint yet; starting from the model's weights")
        return 0
    done, path = load_checkpoint(chosen, check, module, updater, context)
    for each in chosen.passed_over:
        journal.log(f"skipped {each}; renamed to …aside")
        journal.event(EventKind.PASSED_OVER, path=each.path, detail=each.why)
    journal.log(f"resumed from {path}")
    journal.event(EventKind.RESUMED, step=done, path=path)
    return done


def load_checkpoint(
    chosen: Resume, check: Check, module: nn.Module, updater: Updater, context: RankContext
) -> tuple[int, Path]:
    """Load the chosen checkpoint, or what else will do if it is damaged; returns its step and path.

    Raises:
        UserError: None can be used.
    """
    context.phase(Phase.RESUME)
    while True:
        assert chosen.found
        path = chosen.found.path
        try:
            done = chosen.load(module, updater, context.me, context.heartbeat.progress)
            break
        except DamagedError as fault:
            context.log(str(fault))
            check(chosen.found)
    refuse_not_finite(updater.master, path)
    return done, path
