"""Evaluate a model or a checkpoint on held-out data without training.

Allocates no optimizer states and saves nothing.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from llama405b.checkpoint.compatibility import model_of
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.store import Store
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics, Phase
from llama405b.distributed import collectives
from llama405b.optim.adamw import build_optimizer
from llama405b.optim.build_updater import Sequential
from llama405b.optim.updater import Updater
from llama405b.parallel.passes import Passes, build_passes
from llama405b.settings.config import to_toml
from llama405b.settings.schema import Config
from llama405b.spec.models import describe
from llama405b.spec.rules import accept_changes
from llama405b.training.build import (
    bind_to_numa_node,
    bring_model_files,
    build_evaluator,
    build_model,
    load_checkpoint,
    open_held_out,
    open_prompts,
    with_template_date,
)
from llama405b.training.context import RankContext
from llama405b.training.journal import read_metrics


def evaluate_only(config: Config, resume: str, context: RankContext) -> None:
    """Evaluate the model, or the checkpoint at the path ``resume`` (no: none), and log the loss as a run's first evaluation.

    Raises:
        UserError: The model, the data or the checkpoint cannot be used.
    """
    bind_to_numa_node(config.parallel, context)
    whole = config.parallel.by_fsdp1
    files = bring_model_files(config.model, config.data, context, whole=whole)
    chosen = choose_checkpoint(config, resume, files, context)
    context.phase(Phase.DATA)
    found = chosen.found if chosen else None
    config = with_template_date(config, files, found.path if found else None, context)
    held_out = open_held_out(config.data, config.evaluation, files, context)
    prompts = open_prompts(config, files, held_out, context)
    write_settings(config, context)
    context.phase(Phase.LOAD)
    weights = look_at_weights(config, chosen, files, context)
    evaluator = build_evaluator(config, weights.passes, held_out, prompts, context)
    assert evaluator  # of what is held out
    loss, words = evaluator.evaluate()
    context.log(f"evaluation of {weights.what}: {words}")
    context.journal.resumed_at(weights.step, weights.step, anew=True)
    context.journal.evaluation(weights.step, loss)
    if context.journal.lost.count:
        raise RunError(f"the evaluation could not be recorded: {context.journal.lost.detail}")
    evaluator.continue_prompts(weights.step)


class Weights(NamedTuple):
    """A model on its ranks, for reading only."""

    passes: Passes
    updater: Updater  # never updates, so it allocates no moments
    what: str  # path, for messages
    step: int  # after which the weights were saved; 0: none


def look_at_weights(config: Config, chosen: Resume | None, files: Path, context: RankContext) -> Weights:
    """Build the model with its own weights or those of a checkpoint."""
    module, master = build_model(config, files, context, from_checkpoint=chosen is not None, trains=False)
    updater = Sequential(module, master, build_optimizer(master, config.optimizer))
    updater.sync_weights()
    passes = build_passes(config.parallel, module, context.me)
    if chosen is None:
        return Weights(passes, updater, config.model.path, 0)
    done, path = load_checkpoint(chosen, lambda _: None, module, updater, context)
    return Weights(passes, updater, str(path), done)


def write_settings(config: Config, context: RankContext) -> None:
    """Write the settings of a run that takes no steps (rank 0)."""
    if context.me.is_rank0:
        training = dataclasses.replace(config.training, max_steps=0)  # cluster-top would wait for steps
        write_atomic(context.run.config, to_toml(dataclasses.replace(config, training=training)))


def refuse_trained(run: RunDir) -> None:
    """Refuse the directory of a run that trained, before any of its files changes."""
    if any(isinstance(line, Metrics) for line in read_metrics(run.metrics)):
        raise UserError(f"--run-dir: {run.path} is the directory of a run that trained; name another one")


def choose_checkpoint(config: Config, resume: str, files: Path, context: RankContext) -> Resume | None:
    """Return the checkpoint at the path ``resume``; None for the model itself. Takes no lease, as nothing is written there."""
    if resume == "no":
        return None
    if not any(collectives.all_gather_objects(Path(resume).is_dir())):
        raise UserError(f"--resume: no host has the directory {resume}; name a checkpoint by its path on the hosts")
    store = Store(
        Path(resume).parent,
        0,
        context.me,
        config.timeouts.load,
        run=context.run,
        say=context.log,
        shared=config.checkpoint.storage == "shared",
    )
    chosen = Resume(store, resume, weights_only=True)
    refuse_another_model(chosen, config, files, context)
    return chosen


def refuse_another_model(chosen: Resume, config: Config, files: Path, context: RankContext) -> None:
    """Refuse a checkpoint of another model or adapter; its other settings do not matter for reading."""
    assert chosen.found
    manifest, path = chosen.found.manifest, str(chosen.found.path)
    if manifest.identity:
        now = dataclasses.replace(manifest.identity, model=model_of(config, files), adapter=describe(config.adapter))
        if changed := accept_changes(path, manifest.identity, now, config.checkpoint.allow_changes):
            context.log(changed)
