"""Everything up to the first step: builds the parts of a run, each from its own settings, and gives them to a ``Trainer``."""

import functools
import time
from pathlib import Path

import torch
from torch import nn

from llama405b.capacity.run_shape import RunShape
from llama405b.checkpoint.compatibility import Beginning, beginning
from llama405b.checkpoint.saving import Saving
from llama405b.contract import weights
from llama405b.contract.adapters import flops_per_token
from llama405b.contract.config import on_ranks, to_toml
from llama405b.contract.dealing import Dealing, waste_note
from llama405b.contract.files import write_atomic
from llama405b.contract.mesh_rules import check_mesh
from llama405b.contract.phrases import counted
from llama405b.contract.records import Phase
from llama405b.contract.schema import Config, Parallel, Training
from llama405b.data.batches import Batches, describe_reading
from llama405b.data.reader import Reader
from llama405b.distributed import collectives
from llama405b.distributed.numa import bind
from llama405b.distributed.ranks import ranks_per_host
from llama405b.model.host_inputs import HostInputs, keep_on_host
from llama405b.model.llama import compute_dtype
from llama405b.optim.build_updater import build_updater
from llama405b.optim.offload_all import pin_for_gradients
from llama405b.optim.updater import Updater
from llama405b.parallel.build_passes import build_passes
from llama405b.parallel.busy import BusyMeter
from llama405b.parallel.passes import Passes
from llama405b.parallel.units import UnitTracker
from llama405b.tracking.start import Trackers, check_packages
from llama405b.training.bad_steps import BadSteps
from llama405b.training.budget import Budget
from llama405b.training.build_data import open_data
from llama405b.training.build_model import build_model
from llama405b.training.checkpointer import Checkpointer
from llama405b.training.context import RankContext
from llama405b.training.evaluate import Evaluator
from llama405b.training.loop import Trainer
from llama405b.training.loss_spikes import SpikeDetector
from llama405b.training.model_files import bring_model_files
from llama405b.training.open_checkpoints import log_changes, open_checkpoints, resume_run
from llama405b.training.prompts import Prompts
from llama405b.training.rank_memory import unit_label
from llama405b.training.requests import Requests, StopSignal


def build_trainer(config: Config, resume: str, context: RankContext, stop: StopSignal) -> Trainer:
    """Prepare data, model and optimizer for the first step, from the model's weights or from a checkpoint.

    Raises:
        UserError: The model, the data or a checkpoint cannot be used.
    """
    began = time.monotonic()
    config = on_ranks(config, context.me.axes)
    with collectives.raise_on_all_ranks():
        budget = Budget(config.training.gpu_hours, context, began)
    bind_to_numa_node(config.parallel, context)
    files = bring_model_files(config.model, config.data, context, whole=config.parallel.by_fsdp1)
    with collectives.raise_on_all_ranks():
        if context.me.is_rank0:
            check_packages(config.tracking)
    context.phase(Phase.DATA)
    batches, held_out = open_data(config.data, config.evaluation, files, context)
    llama = weights.read_llama(files, config.model.layers)
    check_mesh(context.me.axes, config.parallel, llama, config.data.seq_len, ranks_per_host())
    begin = functools.partial(beginning, config=config, files=files, batches=batches)
    check = functools.partial(log_changes, begin=begin, allowed=config.checkpoint.allow_changes, context=context)
    n_bytes = RunShape.of(llama, config, context.me.world).checkpoint_bytes
    budget.saves(n_bytes * ranks_per_host() / context.me.world)
    saving, chosen = open_checkpoints(config.checkpoint, config.timeouts.load, resume, n_bytes, context, check)
    if saving.store.is_owner:
        write_atomic(context.run.config, to_toml(config))
    context.phase(Phase.LOAD)
    module, master = build_model(config, files, context, from_checkpoint=chosen.found is not None)
    updater = build_update(config, module, master, context)
    passes = build_passes(config.parallel, module, context.me)
    torch.manual_seed(config.training.seed + context.me.rank)
    done = resume_run(chosen, check, module, updater, context)
    allocate_staging(config, saving, updater, context)
    saving.resumed(done)
    start = begin(chosen.found)
    log_reading(config, batches, start, context)
    context.journal.resumed_at(done, start.steps, anew=chosen.wanted == "no")
    reader = build_reader(config.training, config.data.workers, batches, start, context)
    detector = build_spike_detector(config.training, start, context)
    return Trainer(
        config=config,
        context=context,
        passes=passes,
        updater=updater,
        reader=reader,
        steps=range(done + 1, start.steps + 1),
        flops_per_token=flops_per_token(llama, config.adapter, config.data.seq_len),
        bad_steps=BadSteps(config.training, detector, reader, context.journal, done + 1),
        checkpointer=Checkpointer(
            saving, updater, start.identity, config.checkpoint, context, restart_s=time.monotonic() - began
        ),
        requests=Requests(context, stop),
        evaluator=build_evaluator(config, passes, held_out, files, context),
        busy=watch_units(config.parallel, module, context),
        host_inputs=build_host_inputs(config, module, llama, context),
        evaluates_first=chosen.found is None and not collectives.broadcast_object(context.journal.began_evaluated),
        tokens=context.journal.tokens,
        budget=budget,
        trackers=Trackers(config.tracking.to if context.me.is_rank0 else (), context.run, context.log),
    )


def bind_to_numa_node(parallel: Parallel, context: RankContext) -> None:
    """Have this rank's threads run near its GPU, unless the settings forbid it."""
    if parallel.numa == "auto" and (bound := bind(context.me)):
        context.log(bound)


def watch_units(parallel: Parallel, module: nn.Module, context: RankContext) -> BusyMeter | None:
    """Have this rank's memory show which unit it is in, and measure its own computing (``build_busy_meter``)."""
    show = context.heartbeat.memory.unit
    UnitTracker(lambda name, way: functools.partial(show, unit_label(name, way))).attach(module)
    return build_busy_meter(parallel, module, context)


def build_busy_meter(parallel: Parallel, module: nn.Module, context: RankContext) -> BusyMeter | None:
    """Measure this rank's own computing, where torch has the parts of FSDP2 that are to be left out; FSDP1 has none.

    Not where ranks wait for each other within a forward, or between those of pipeline stages.
    """
    axes = context.me.axes
    if parallel.by_fsdp1 or axes.tp * axes.cp * axes.pp > 1:
        return None
    meter = BusyMeter(context.me.device)
    try:
        meter.attach(module)
    except AttributeError as error:
        context.log(f"how long each rank itself computes is not measured: torch has changed ({error})")
        return None
    return meter


def build_host_inputs(
    config: Config, module: nn.Module, llama: weights.Llama, context: RankContext
) -> HostInputs | None:
    """Have layers keep their inputs in CPU memory, if the settings say so; on a GPU, pin it.

    Raises:
        UserError: CUDA cannot pin as much memory as this needs.
    """
    if config.model.activations == "device":
        return None
    me = context.me
    if me.on_gpu:
        context.phase(Phase.PIN)
    dtype = compute_dtype(config.parallel.numerics)
    stage = me.axes.place(me.rank, ("pp",)).rank
    run = RunShape.of(llama, config, me.world, me.axes)
    return keep_on_host(module, run, stage, dtype, me.device, context.heartbeat.progress)


def build_update(config: Config, module: nn.Module, master: nn.Module, context: RankContext) -> Updater:
    """Build what updates the weights; with a GPU, pin the CPU memory that it needs.

    Raises:
        UserError: CUDA cannot pin as much memory as this needs.
    """
    parallel = config.parallel
    heartbeat = context.heartbeat
    device = context.me.device
    if context.me.on_gpu and parallel.updates_on_cpu:
        context.phase(Phase.PIN)
        if parallel.offload == "all":
            accumulates = Dealing.of(config.training, context.me.dp.size).rounds > 1
            pin_for_gradients(module, 1 + (accumulates and parallel.updates_by_unit), heartbeat.progress)
    return build_updater(
        module, config.optimizer, parallel, device, heartbeat.waits_for_update, master, heartbeat.progress
    )


def allocate_staging(config: Config, saving: Saving, updater: Updater, context: RankContext) -> None:
    """Pin the memory for copies of what is saved, if that is on a GPU; else there is time for it at the first save.

    Raises:
        UserError: CUDA cannot pin that much.
    """
    if (
        config.checkpoint.cadence.saves and context.me.on_gpu and config.parallel.offload == "none"
    ):  # alike on all ranks
        context.phase(Phase.PIN)
        saving.allocate_staging(updater, context.heartbeat.progress)


def build_reader(training: Training, workers: int, batches: Batches, start: Beginning, context: RankContext) -> Reader:
    """Build what reads this rank's micro-batches, from where the run goes on; ``workers``: processes that read ahead."""
    return Reader(
        batches,
        context.me,
        Dealing.of(training, context.me.dp.size),
        training.micro_batch_size,
        start.position,
        workers,
    )


def build_spike_detector(training: Training, start: Beginning, context: RankContext) -> SpikeDetector:
    """Build it with the losses before a resume; of other data they say nothing."""
    before = context.journal.losses if start.position else ()
    detector = SpikeDetector.replay(training.loss_spike_factor, before, always=training.on_loss_spike == "warn")
    losses = collectives.broadcast_object(tuple(detector.losses), tuple[float, ...])
    return SpikeDetector(training.loss_spike_factor, losses)


def build_evaluator(
    config: Config, passes: Passes, held_out: Batches | None, files: Path, context: RankContext
) -> Evaluator | None:
    """Build what evaluates on what is held out; None if nothing is. ``files``: the directory of the tokenizer.

    Raises:
        UserError: A prompt cannot be continued.
    """
    if held_out is None:
        return None
    evaluation = config.evaluation
    prompts = Prompts(evaluation, files, config.data.seq_len, context) if evaluation.prompts else None
    return Evaluator(evaluation, config.training.micro_batch_size, passes, held_out, context, prompts)


def log_reading(config: Config, batches: Batches, start: Beginning, context: RankContext) -> None:
    """Log what an epoch has, and what a step reads of it."""
    for line in describe_reading(config.data, batches):
        context.log(line)
    shape = f"{config.training.global_batch_size} x {config.data.seq_len} tokens"
    dp = context.me.dp.size
    n_micro = counted(Dealing.of(config.training, dp).rounds, "micro-batch", "micro-batches")
    micro = f"{n_micro} on each of {counted(dp, 'rank')}"
    context.log(
        f"{counted(start.steps, 'step')} of {shape} ({micro}), {counted(batches.n_sequences, 'sequence')} in an epoch"
    )
    if note := waste_note(config.training, dp):
        context.log(note)
