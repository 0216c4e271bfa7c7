"""The loss of a model, or of a checkpoint, on data that is held out, without training: no moments are made, and nothing is saved."""

import dataclasses
from pathlib import Path

from llama405b.checkpoint.compatibility import model_of
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.store import Store
from llama405b.contract.config import to_toml
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics, Phase
from llama405b.contract.resuming import accept_changes
from llama405b.contract.schema import Config
from llama405b.data.batches import Batches, open_batches
from llama405b.distributed import collectives
from llama405b.distributed.numa import bind
from llama405b.distributed.ranks import Rank
from llama405b.optim.adamw import build_optimizer
from llama405b.optim.sequential import Sequential
from llama405b.training.build import (
    batches_apart,
    bring_model_files,
    build_module,
    held_out_of,
    load_chosen,
    refuse_without_targets,
)
from llama405b.training.heartbeat import HeartbeatWriter
from llama405b.training.journal import Journal, read_metrics
from llama405b.training.loop import evaluate_weights


def evaluate_only(config: Config, run: RunDir, resume: str, me: Rank, pulse: HeartbeatWriter) -> None:
    """Evaluate the model, or the checkpoint at the path ``resume`` (no: none), and report the loss as a run's first evaluation.

    Raises:
        UserError: The model, the data or the checkpoint cannot be used.
    """
    journal = Journal(run, me)
    if config.parallel.numa == "auto" and (bound := bind(me)):
        journal.log(bound)
    files = bring_model_files(config, run, me, journal)
    chosen = choose(config, run, resume, files, me, journal)
    pulse.phase(Phase.DATA)
    held_out = open_held_out(config, run, files, me, pulse, journal)
    if me.leads:
        training = dataclasses.replace(config.training, max_steps=0)  # which cluster-top would wait for
        write_atomic(run.config, to_toml(dataclasses.replace(config, training=training)))
    pulse.phase(Phase.LOAD)
    what, done = config.model.path, 0
    module, kept = build_module(config, files, me, pulse, journal, from_checkpoint=chosen is not None, trains=False)
    updater = Sequential(module, kept, build_optimizer(kept, config.optimizer))  # without an update it makes no moments
    updater.publish()
    if chosen:
        done, path = load_chosen(chosen, lambda _: None, module, updater, me, pulse, journal)
        what = str(path)
    loss, words = evaluate_weights(config, module, held_out, me, pulse)
    journal.log(f"evaluation of {what}: {words}")
    journal.resumed_at(done, done, anew=True)
    journal.evaluation(done, loss)


def refuse_trained(run: RunDir) -> None:
    """Refuse the directory of a run that trains, before any of its files is changed.

    Raises:
        UserError: It is one.
    """
    if any(isinstance(line, Metrics) for line in read_metrics(run.metrics)):
        raise UserError(f"--run-dir: {run.path} is the directory of a run that trained; name another one")


def choose(config: Config, run: RunDir, resume: str, files: Path, me: Rank, journal: Journal) -> Resume | None:
    """Return the checkpoint at the path ``resume``; None for the model itself. Its directory is not taken, as nothing is written there.

    Raises:
        UserError: It is missing or incomplete, or of another model, and that is not allowed.
    """
    if resume == "no":
        return None
    if not any(collectives.all_gather_objects(Path(resume).is_dir())):
        raise UserError(f"--resume: {resume} is a directory on no host; name a checkpoint as the hosts see it")
    shared = config.checkpoint.place == "shared"
    store = Store(Path(resume).parent, 0, me, config.timeouts.load, run=run, say=journal.log, shared=shared)
    chosen = Resume(store, resume, weights_only=True)
    refuse_another_model(chosen, config, files, journal)
    return chosen


def open_held_out(
    config: Config, run: RunDir, files: Path, me: Rank, pulse: HeartbeatWriter, journal: Journal
) -> Batches:
    """Open the data to evaluate on; data to train on is read only to hold out a part of it.

    Raises:
        UserError: It cannot be used.
    """
    cache = run.path.parent / ".cache"
    if config.evaluation.paths:
        held_out = batches_apart(config, files, cache, me, pulse, journal.log)
        refuse_without_targets(held_out)
        return held_out
    batches = open_batches(config.data, files, cache, me, pulse.loaded, journal.log)
    _, part = held_out_of(config, batches, files, cache, me, pulse, journal.log)
    assert part
    return part


def refuse_another_model(chosen: Resume, config: Config, files: Path, journal: Journal) -> None:
    """Refuse a checkpoint of a model of another shape; what else it was trained with does not matter here.

    Raises:
        UserError: It is of another, and that is not allowed.
    """
    assert chosen.found
    manifest, path = chosen.found.manifest, str(chosen.found.path)
    if manifest.identity:
        now = dataclasses.replace(manifest.identity, model=model_of(config, files))
        if changed := accept_changes(path, manifest.identity, now, config.checkpoint.allow_changes):
            journal.log(changed)
