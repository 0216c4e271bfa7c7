"""Prepare a run for its first step: one order of events for training, evaluation and blame. All ranks do the same things.

Of each part ``training.build`` knows how it is made.
"""

import dataclasses
import enum
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from llama405b.checkpoint.compatibility import (
    StartPoint,
    check_changes,
    describe_version_changes,
    model_fingerprint,
    start_point,
)
from llama405b.checkpoint.format import DamagedError
from llama405b.checkpoint.replication import AfterSave, Replication
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.saving import CheckpointSaver
from llama405b.checkpoint.store import CheckpointView, Store
from llama405b.contract.checkpoints import find_newest_complete
from llama405b.contract.errors import UserError, pluralize
from llama405b.contract.files import write_atomic
from llama405b.contract.records import EventKind, Phase
from llama405b.data.batches import Batches, BatchLoader, describe_epoch
from llama405b.data.preview import N_SHOWN, format_preview, preview_sequences
from llama405b.data.tokenizer import read_tokenizer
from llama405b.distributed import collectives
from llama405b.distributed.ranks import ranks_per_host
from llama405b.optim.build_updater import OnDeviceUpdate
from llama405b.optim.optimizer import build_optimizer
from llama405b.optim.updater import Updater
from llama405b.parallel.load_weights import check_weights_finite
from llama405b.parallel.passes import ForwardBackward, build_forward_backward, check_user_loss
from llama405b.predict.run_shape import checkpoint_bytes
from llama405b.settings.axes import MicrobatchSplit, idle_rank_note
from llama405b.settings.config import to_toml, with_global_batch
from llama405b.settings.schema import Checkpoint, Config, Tracking, Training
from llama405b.spec import models
from llama405b.spec.adapters import adapter_flops, adapter_label
from llama405b.spec.rules import check_mesh, check_resume_changes
from llama405b.tracking.uploads import TrackerProcesses, check_packages
from llama405b.training.build import (
    bind_to_numa_node,
    build_evaluator,
    build_host_inputs,
    build_model,
    build_pinned_updater,
    check_numa_memory,
    distribute_model_files,
    open_data,
    open_held_out,
    open_prompts,
    watch_units,
    with_template_date,
)
from llama405b.training.checkpointer import Checkpointer
from llama405b.training.context import RankContext
from llama405b.training.evaluate import Prompts
from llama405b.training.guards import BadSteps, Budget, SpikeDetector
from llama405b.training.loop import Trainer
from llama405b.training.requests import Requests, StopSignal

CheckCheckpoint = Callable[[CheckpointView], None]  # raises UserError if a checkpoint must not be resumed from


class Purpose(enum.Enum):
    """What a run is prepared for."""

    TRAIN = enum.auto()
    EVALUATE = enum.auto()
    BLAME = enum.auto()  # of a document, for what a step did


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What a run starts with, before its model is built."""

    config: Config  # with all that was left to the run
    files: Path  # the directory of the model's small files
    llama: models.Llama
    batches: Batches | None  # to train on; None: only to evaluate
    held_out: Batches | None
    prompts: Prompts | None
    checkpoint: Resume | None  # None: the model's own weights, and no checkpoint will be written
    saving: CheckpointSaver | None = None  # None: nothing will be saved

    @property
    def saved(self) -> CheckpointView | None:
        """The checkpoint to load; None: the model's own weights."""
        return self.checkpoint.checkpoint if self.checkpoint else None

    def point(self, saved: CheckpointView | None) -> StartPoint:
        """Return the start point that a checkpoint gives."""
        assert self.batches
        return start_point(saved, self.config, self.files, self.batches)

    def check(self, saved: CheckpointView, context: RankContext) -> None:
        """Refuse to train on from a checkpoint of another run, and log what changes."""
        changes = check_changes(saved, self.point(saved).identity, self.config.checkpoint.allow_changes)
        for line in filter(None, (describe_version_changes(saved), changes)):
            context.journal.log(line)


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """A run that is ready: its model has weights."""

    start: Start
    module: nn.Module
    updater: Updater
    forward_backward: ForwardBackward
    step: int  # after which the weights were saved; 0: none
    weights: str  # where they come from, for messages


def prepare(
    config: Config,
    resume: str,
    context: RankContext,
    purpose: Purpose,
    check_start: Callable[[Start], None] = lambda _: None,
) -> Setup:
    """Prepare a run: the model's own weights, or those of the checkpoint that ``resume`` names.

    ``check_start``: called before the model is built.

    Raises:
        UserError: The model, the data or a checkpoint cannot be used.
    """
    trains = purpose is Purpose.TRAIN
    start = _open_start(config, resume, context, purpose)
    check_start(start)
    config = start.config
    if start.saving.store.is_owner if start.saving else context.rank.is_rank0:
        training = config.training if trains else dataclasses.replace(config.training, max_steps=0)
        # Without steps, cluster-top does not wait for any.
        write_atomic(context.run.config, to_toml(dataclasses.replace(config, training=training)))

    context.heartbeat.enter_phase(Phase.LOAD)
    module, master = build_model(
        config, start.files, context, from_checkpoint=start.saved is not None, is_trained=trains
    )
    if trains:
        updater = build_pinned_updater(config, module, master, context)
        check_numa_memory(config.parallel, context)
    else:
        updater = OnDeviceUpdate(module, master, build_optimizer(master, config.optimizer), has_moments=False)
        updater.sync_weights()
    isolated = config.data.packing == "isolated"
    forward_backward = build_forward_backward(config.parallel, module, context.rank, config.model, isolated=isolated)
    torch.manual_seed(config.training.seed + context.rank.index)

    step, weights = 0, config.model.path
    if trains:
        assert start.checkpoint
        check = functools.partial(start.check, context=context)
        step = resume_run(start.checkpoint, check, module, updater, context)
    elif start.checkpoint:  # which was compared when it was chosen
        step, path = load_checkpoint(start.checkpoint, lambda _: None, module, updater, context)
        weights = str(path)
    return Setup(start, module, updater, forward_backward, step, weights)


def _open_start(config: Config, resume: str, context: RankContext, purpose: Purpose) -> Start:
    """Open the model's files, the data and the checkpoints, in an order that refuses early."""
    trains, rank = purpose is Purpose.TRAIN, context.rank
    check_user_loss(config, rank.axes)
    if purpose is not Purpose.EVALUATE:  # which accumulates nothing
        config = with_global_batch(config, rank.axes)
    bind_to_numa_node(config.parallel, context)
    files = distribute_model_files(config.model, config.data, context, needs_all=config.parallel.is_fsdp1)
    with collectives.raise_on_all_ranks():
        if rank.is_rank0 and trains:
            check_packages(config.tracking)
    checkpoint = None if trains else choose_checkpoint(config, resume, files, context)

    context.heartbeat.enter_phase(Phase.DATA)
    saved = checkpoint.checkpoint.path if checkpoint and checkpoint.checkpoint else None
    if trains and resume != "no":
        saved = find_newest_complete(Path(config.checkpoint.dir or context.run.checkpoints))
    config = with_template_date(config, files, saved, context)
    batches, held_out = _open_data(config, files, context, purpose)
    # Before weights are loaded: a prompt may be too long.
    prompts = open_prompts(config, files, None if purpose is Purpose.BLAME else held_out, context)

    llama = models.read_llama(files, config.model.layers)
    check_mesh(rank.axes, config.parallel, llama, config.data.seq_len, ranks_per_host())
    start = Start(config, files, llama, batches, held_out, prompts, checkpoint)
    if not trains:
        return start
    check = functools.partial(start.check, context=context)
    n_bytes = checkpoint_bytes(llama, config)
    saving, checkpoint = open_checkpoints(config.checkpoint, config.timeouts.load, resume, n_bytes, context, check)
    return dataclasses.replace(start, checkpoint=checkpoint, saving=saving)


def _open_data(
    config: Config, files: Path, context: RankContext, purpose: Purpose
) -> tuple[Batches | None, Batches | None]:
    """Return the data to train on and what is held out; None for what the purpose does not need."""
    if purpose is Purpose.EVALUATE:
        return None, open_held_out(config.data, config.evaluation, files, context)
    data = config.data if purpose is Purpose.TRAIN else dataclasses.replace(config.data, skip="")
    return open_data(data, config.evaluation, files, context)


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
        say=context.journal.log,
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
            context.journal.log(changes)


def open_checkpoints(
    settings: Checkpoint, timeout_s: int, resume: str, n_bytes: int, context: RankContext, check: CheckCheckpoint
) -> tuple[CheckpointSaver, Resume]:
    """Lock the checkpoint directory, and choose the checkpoint to resume from.

    ``timeout_s``: of collectives that run in the background; ``n_bytes``: size of each checkpoint.
    """
    shared = settings.storage == "shared"
    store = Store(
        Path(settings.dir or context.run.checkpoints),
        settings.keep,
        context.rank,
        timeout_s,
        run=context.run,
        say=context.journal.log,
        shared=shared,
        keep_best=settings.keep_best,
    )
    if not shared:
        n_directories = pluralize(n := len(store.owners), "directory", "directories")
        copies_note = (
            "the next host keeps a copy" if settings.copies and n > 1 else "losing a host loses all checkpoints"
        )
        context.journal.log(f"checkpoints: each host keeps its part, {n_directories} in all; {copies_note}")
    try:
        if settings.cadence.is_enabled:
            store.acquire()
            store.check_disk_space(n_bytes, settings.copies)
        checkpoint_choice = Resume(store, resume)
        if checkpoint_choice.checkpoint:
            check(checkpoint_choice.checkpoint)
        is_copied = settings.copies and settings.cadence.is_enabled and len(store.owners) > 1
        replication = Replication(store) if is_copied else None
    except UserError:
        store.close()
        raise
    after_save = None
    if settings.after_save and store.is_owner:
        say, limit_s = functools.partial(print, flush=True), settings.after_save_limit
        after_save = AfterSave(settings.after_save, context.run, context.rank.host, say, limit_s)
    saving = CheckpointSaver(
        store, settings.staging_bytes, replication, after_save, delete_unsent=settings.delete_unsent
    )
    return saving, checkpoint_choice


def resume_run(
    checkpoint_choice: Resume, check: CheckCheckpoint, module: nn.Module, updater: Updater, context: RankContext
) -> int:
    """Load the chosen checkpoint, or an older one if it is damaged, and report it; return the number of finished steps."""
    journal = context.journal
    if checkpoint_choice.checkpoint is None:
        journal.write_event(EventKind.STARTED, step=0)
        if checkpoint_choice.requested == "auto":
            journal.log("no checkpoint yet; starting from the model's weights")
        return 0
    step, path = load_checkpoint(checkpoint_choice, check, module, updater, context)
    for candidate in checkpoint_choice.rejected:
        journal.log(f"skipped {candidate}; renamed to …aside")
        journal.write_event(EventKind.PASSED_OVER, path=candidate.path, detail=candidate.why)
    journal.log(f"resumed from {path}")
    journal.write_event(EventKind.RESUMED, step=step, path=path)
    return step


def load_checkpoint(
    checkpoint_choice: Resume, check: CheckCheckpoint, module: nn.Module, updater: Updater, context: RankContext
) -> tuple[int, Path]:
    """Load the chosen checkpoint, or the next usable one if it is damaged; return its step and path.

    Raises:
        UserError: No checkpoint can be used.
    """
    context.heartbeat.enter_phase(Phase.RESUME)
    while True:
        assert checkpoint_choice.checkpoint
        path = checkpoint_choice.checkpoint.path
        try:
            step = checkpoint_choice.load(module, updater, context.heartbeat.record_progress)
            break
        except DamagedError as error:
            context.journal.log(str(error))
            check(checkpoint_choice.checkpoint)
    check_weights_finite(updater.master, path)
    return step, path


def build_trainer(config: Config, resume: str, context: RankContext, stop: StopSignal) -> Trainer:
    """Prepare data, model and optimizer for the first step, from the model's weights or from a checkpoint.

    Raises:
        UserError: The model, the data or a checkpoint cannot be used.
    """
    start_s = time.monotonic()
    with collectives.raise_on_all_ranks():
        budget = Budget(config.training.gpu_hours, context, start_s)
    setup = prepare(config, resume, context, Purpose.TRAIN)
    begun, updater, forward_backward = setup.start, setup.updater, setup.forward_backward
    config, batches, saving = begun.config, begun.batches, begun.saving
    assert batches
    assert saving
    assert begun.checkpoint
    n_bytes = checkpoint_bytes(begun.llama, config)
    budget.set_save_size(n_bytes * ranks_per_host() / context.rank.world_size)
    allocate_staging(config, saving, updater, context)
    if config.checkpoint.cadence.is_enabled:
        saving.plan(updater)
    saving.start_background_work(setup.step)
    start = begun.point(begun.saved)
    log_reading(config, batches, start, setup.step, context)
    show_sequences(batches, start, begun.files, context)
    context.journal.resume_after(setup.step, start.steps, restart=begun.checkpoint.requested == "no")
    reader = build_reader(config.training, config.data.workers, batches, start, context)
    epoch_steps = batches.steps_per_epoch(config.training.global_batch_size)
    return Trainer(
        config=config,
        context=context,
        forward_backward=forward_backward,
        updater=updater,
        reader=reader,
        steps=range(setup.step + 1, start.steps + 1),
        flops_per_token=adapter_flops(begun.llama, config.adapter, config.data.seq_len),
        bad_steps=build_bad_steps(config.training, start, reader, setup.step + 1, context),
        checkpointer=Checkpointer(
            saving, updater, start.identity, config.checkpoint, context, restart_s=time.monotonic() - start_s
        ),
        requests=Requests(context, stop),
        evaluator=build_evaluator(config, forward_backward, begun.held_out, begun.prompts, context, epoch_steps),
        busy_meter=watch_units(config.parallel, setup.module, context),
        host_inputs=build_host_inputs(config, setup.module, begun.llama, context),
        evaluate_first=begun.saved is None and not collectives.broadcast_object(context.journal.evaluated_at_start),
        tokens=context.journal.tokens,
        budget=budget,
        trackers=start_trackers(config.tracking, begun.checkpoint.requested, setup.step, context),
    )


def allocate_staging(config: Config, saving: CheckpointSaver, updater: Updater, context: RankContext) -> None:
    """Pin staging memory for saves of state that is on a GPU; otherwise the first save allocates it."""
    if (
        config.checkpoint.cadence.is_enabled and context.rank.on_gpu and config.parallel.offload == "none"
    ):  # alike on all ranks
        context.heartbeat.enter_phase(Phase.PIN)
        saving.allocate_staging(updater, context.heartbeat.record_progress)


def build_reader(
    training: Training, workers: int, batches: Batches, start: StartPoint, context: RankContext
) -> BatchLoader:
    """Build the loader of this rank's micro-batches from the start point; ``workers``: number of processes that read ahead."""
    return BatchLoader(
        batches,
        context.rank,
        MicrobatchSplit.from_training(training, context.rank.dp.size),
        training.micro_batch_size,
        start.position,
        workers,
    )


def build_bad_steps(
    training: Training, start: StartPoint, reader: BatchLoader, first_step: int, context: RankContext
) -> BadSteps:
    """Build the check of steps from ``first_step`` on; it starts with the losses before a resume, unless the data is new."""
    previous_losses = context.journal.losses if start.position else ()
    detector = SpikeDetector.from_losses(
        training.loss_spike_factor, previous_losses, count_spikes=training.on_loss_spike == "warn"
    )
    losses = collectives.broadcast_object(tuple(detector.losses), tuple[float, ...])
    return BadSteps(training, SpikeDetector(training.loss_spike_factor, losses), reader, context.journal, first_step)


def start_trackers(tracking: Tracking, resume: str, step: int, context: RankContext) -> TrackerProcesses:
    """Start the trackers on rank 0; ``resume``: the setting, ``step``: the step of the loaded checkpoint."""
    resumed_step = None if resume in ("no", "auto") else step
    return TrackerProcesses(
        tracking.to if context.rank.is_rank0 else (), context.run, context.journal.log, resumed_step
    )


def show_sequences(batches: Batches, start: StartPoint, files: Path, context: RankContext) -> None:
    """Show the run's first sequences, decoded, in its log and its directory; ``files``: the tokenizer's directory.

    A run that continues from a checkpoint shows them only if its directory has none, as for a run that starts from another one's.
    """
    if not context.rank.is_rank0 or (start.position and context.run.sequences.is_file()):
        return
    indices = range(start.position, start.position + min(N_SHOWN, batches.n_sequences))
    previews = list(preview_sequences(batches, indices, read_tokenizer(files).decode))
    context.journal.write_sequences(previews, functools.partial(format_preview, n_sequences=batches.n_sequences))


def log_reading(config: Config, batches: Batches, start: StartPoint, done_steps: int, context: RankContext) -> None:
    """Log the size of an epoch and of a step, and whether any step is left to take."""
    for line in describe_epoch(config.data, batches):
        context.journal.log(line)
    shape = f"{config.training.global_batch_size} x {config.data.seq_len} tokens"
    dp = context.rank.dp.size
    n_micro = pluralize(
        MicrobatchSplit.from_training(config.training, dp).grad_accum_steps, "micro-batch", "micro-batches"
    )
    micro_words = f"{n_micro} on each of {pluralize(dp, 'rank')}"
    context.journal.log(
        f"{pluralize(start.steps, 'step')} of {shape} ({micro_words}), {pluralize(batches.n_sequences, 'sequence')} in an epoch"
    )
    if note := idle_rank_note(config.training, dp):
        context.journal.log(note)
    if done_steps >= start.steps:
        message = f"nothing to train: {done_steps} of {start.steps} steps are done"
        context.journal.log(f"{message}; to continue, raise training.max_steps or .epochs")
