"""Evaluate a model or a checkpoint on held-out data without training.

Allocates no optimizer states and saves nothing.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from llama405b.checkpoint.compatibility import model_fingerprint
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.store import Store
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics, Phase
from llama405b.distributed import collectives
from llama405b.optim.build_updater import OnDeviceUpdate
from llama405b.optim.optimizer import build_optimizer
from llama405b.optim.updater import Updater
from llama405b.parallel.passes import ForwardBackward, build_forward_backward
from llama405b.settings.config import to_toml
from llama405b.settings.schema import Config
from llama405b.spec.models import adapter_label
from llama405b.spec.rules import check_resume_changes
from llama405b.training.build import (
    bind_to_numa_node,
    build_evaluator,
    build_model,
    distribute_model_files,
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
    full = config.parallel.is_fsdp1
    files = distribute_model_files(config.model, config.data, context, needs_all=full)
    checkpoint = choose_checkpoint(config, resume, files, context)
    context.enter_phase(Phase.DATA)
    saved = checkpoint.checkpoint if checkpoint else None
    config = with_template_date(config, files, saved.path if saved else None, context)
    held_out = open_held_out(config.data, config.evaluation, files, context)
    prompts = open_prompts(config, files, held_out, context)
    write_settings(config, context)
    context.enter_phase(Phase.LOAD)
    weights = load_model(config, checkpoint, files, context)
    evaluator = build_evaluator(config, weights.passes, held_out, prompts, context)
    assert evaluator  # of what is held out
    loss, summary = evaluator.evaluate()
    context.log(f"evaluation of {weights.label}: {summary}")
    context.journal.resume_after(weights.step, weights.step, restart=True)
    context.journal.write_evaluation(weights.step, loss)
    if context.journal.not_written.count:
        raise RunError(f"the evaluation could not be recorded: {context.journal.not_written.detail}")
    evaluator.continue_prompts(weights.step)


class LoadedModel(NamedTuple):
    """A model on its ranks, for reading only."""

    passes: ForwardBackward
    updater: Updater  # never updates, so it allocates no moments
    label: str  # path, for messages
    step: int  # after which the weights were saved; 0: none


def load_model(config: Config, checkpoint: Resume | None, files: Path, context: RankContext) -> LoadedModel:
    """Build the model with its own weights or those of a checkpoint."""
    module, master = build_model(config, files, context, from_checkpoint=checkpoint is not None, is_trained=False)
    updater = OnDeviceUpdate(module, master, build_optimizer(master, config.optimizer))
    updater.sync_weights()
    passes = build_forward_backward(config.parallel, module, context.rank, config.model.loss)
    if checkpoint is None:
        return LoadedModel(passes, updater, config.model.path, 0)
    step, path = load_checkpoint(checkpoint, lambda _: None, module, updater, context)
    return LoadedModel(passes, updater, str(path), step)


def write_settings(config: Config, context: RankContext) -> None:
    """Write the settings of a run that takes no steps (rank 0)."""
    if context.rank.is_rank0:
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
        context.rank,
        config.timeouts.load,
        run=context.run,
        say=context.log,
        shared=config.checkpoint.storage == "shared",
    )
    checkpoint = Resume(store, resume, weights_only=True)
    refuse_another_model(checkpoint, config, files, context)
    return checkpoint


def refuse_another_model(checkpoint: Resume, config: Config, files: Path, context: RankContext) -> None:
    """Refuse a checkpoint of another model or adapter; its other settings do not matter for reading."""
    assert checkpoint.checkpoint
    manifest, path = checkpoint.checkpoint.manifest, str(checkpoint.checkpoint.path)
    if manifest.identity:
        current = dataclasses.replace(
            manifest.identity, model=model_fingerprint(config, files), adapter=adapter_label(config.adapter)
        )
        if changes := check_resume_changes(path, manifest.identity, current, config.checkpoint.allow_changes):
            context.log(changes)
