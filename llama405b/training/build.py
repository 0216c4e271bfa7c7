"""Build everything a run needs before its first step, for training, evaluation and blame; each part from its own settings."""

import base64
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from llama405b.checkpoint.compatibility import Beginning, beginning, changes_at, other_software
from llama405b.checkpoint.replication import AfterSave, Replication
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.saving import Saving
from llama405b.checkpoint.store import CheckpointView, Store
from llama405b.checkpoint.verified import DamagedError
from llama405b.contract.checkpoints import MANIFEST, newest_complete, read_manifest
from llama405b.contract.errors import UserError, counted
from llama405b.contract.files import read_record, write_atomic
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import EventKind, Phase
from llama405b.data.batch import IGNORE_INDEX
from llama405b.data.batches import (
    Batches,
    Reader,
    Skipped,
    describe_held_out,
    describe_reading,
    open_batches,
    read_skips,
    warnings_of_ends,
    without,
    words_of,
)
from llama405b.data.chat_template import dated
from llama405b.data.demo_model import make_demo
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import Tokenized
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank, bind, ranks_per_host
from llama405b.formats.corpus import TOKENIZED, is_tokenized
from llama405b.model import fused, llama
from llama405b.model.attention import Attention, choose_attention
from llama405b.model.host_inputs import HostInputs, keep_on_host
from llama405b.model.llama import add_adapters, checkpoint_activations, compute_dtype, read_hf_config
from llama405b.optim.adamw import master_model
from llama405b.optim.build_updater import build_updater
from llama405b.optim.offload import pin_for_gradients
from llama405b.optim.updater import Updater
from llama405b.parallel import fsdp, load_weights
from llama405b.parallel.busy import BusyMeter
from llama405b.parallel.fsdp import UnitTracker
from llama405b.parallel.load_weights import refuse_not_finite
from llama405b.parallel.passes import Passes, build_passes
from llama405b.parallel.split import holdings_of, split
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import gpu_like, read_gpus
from llama405b.predict.run_shape import RunShape
from llama405b.predict.search import chosen, known_shape
from llama405b.settings.axes import Dealing, Recompute, waste_note
from llama405b.settings.config import DEMO_MODEL, on_ranks, to_toml
from llama405b.settings.rules import check_groups
from llama405b.settings.schema import Checkpoint, Config, Data, Evaluation, Model, Parallel, Tracking, Training
from llama405b.spec import models
from llama405b.spec.models import adapter_bytes, adapter_flops, adapter_parameters, describe, factors, read_peft
from llama405b.spec.rules import check_mesh, rounding_note
from llama405b.tracking.start import Trackers, check_packages
from llama405b.training.checkpointer import Checkpointer
from llama405b.training.context import RankContext
from llama405b.training.evaluate import Evaluator, Prompts
from llama405b.training.guards import BadSteps, Budget, SpikeDetector
from llama405b.training.journal import unit_label
from llama405b.training.loop import Trainer
from llama405b.training.requests import Requests, StopSignal


def choose_for_ranks(config: Config, preset: str, me: Rank) -> Config:
    """Return the configuration with "auto" settings resolved for these ranks. All ranks must call it.

    Rank 0 resolves them, as it has the model's files.

    Raises:
        UserError: The model's shape is unknown, or the model cannot be split this way.
        FollowedError: Rank 0 raised that error.
    """
    if not config.left_to_plan:
        return config
    per_host = ranks_per_host()
    with collectives.raise_on_all_ranks():
        if me.is_rank0:
            config = _chosen(config, preset, me, per_host)
    return collectives.broadcast_object(config)


def _chosen(config: Config, preset: str, me: Rank, per_host: int) -> Config:
    llama = known_shape(config, preset)
    if llama is None:
        raise UserError(
            f"{config.left_to_plan}: this needs the model's shape, but {config.model.path} has no config.json; download it first, add "
            "--preset, or set another value"
        )
    gpu = None
    if me.on_gpu:
        of = torch.cuda.get_device_properties(me.device)
        gpu = gpu_like(of.name, of.total_memory, read_gpus())
    return chosen(config, llama, me.world, per_host, Cluster(gpu) if gpu else None)


def with_template_date(config: Config, files: Path, checkpoint: Path | None, context: RankContext) -> Config:
    """Return the configuration with the date for a chat template that asks for one: from a checkpoint of the run, else today.

    ``files``: the tokenizer's directory; ``checkpoint``: the newest that this rank sees. All ranks must call it.
    """
    data, saved = config.data, (0, "")
    with contextlib.suppress(OSError, MalformedError):  # reported later, where a checkpoint is chosen
        manifest = read_manifest((checkpoint / MANIFEST).read_bytes())[0] if checkpoint else None
        if manifest and manifest.identity:
            saved = (manifest.step, str(manifest.identity.settings.get("data.template_date", "")))
    before = max(collectives.all_gather_objects(saved, tuple[int, str]))[1]
    with collectives.raise_on_all_ranks():
        if context.me.is_rank0:
            made = [
                read_record(Tokenized, Path(part.paths[0]) / TOKENIZED)
                for part in data.by_source
                if is_tokenized(part.paths)
            ]
            data = dated(data, read_tokenizer(files), before or next((each.template_date for each in made if each), ""))
    return dataclasses.replace(config, data=collectives.broadcast_object(data))


def open_data(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> tuple[Batches, Batches | None]:
    """Return the training data and the evaluation data (None without evaluation); ``files``: the tokenizer's directory.

    Raises:
        UserError: The data cannot be used.
    """
    batches = _open(data, files, context)
    with collectives.raise_on_all_ranks():
        for line in warnings_of_ends(data, batches, files) if context.me.is_rank0 else ():
            context.log(line)
    if not evaluation.evaluates:
        return batches, None
    if evaluation.paths:
        return batches, _open_apart(data, evaluation, files, context)
    return _hold_out(batches, data, evaluation, context)


def open_held_out(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> Batches:
    """Return the evaluation data; training data is read only to hold out a part of it.

    Raises:
        UserError: The data cannot be used.
    """
    if evaluation.paths:
        return _open_apart(data, evaluation, files, context)
    return _hold_out(_open(data, files, context), data, evaluation, context)[1]


def _open(data: Data, files: Path, context: RankContext, option: str = "--data.paths") -> Batches:
    cache = context.run.path.parent / ".cache"
    batches = open_batches(data, files, cache, context.me, context.heartbeat.progress, context.log, option)
    if not data.skip:
        return batches
    skips: tuple[Skipped, ...] = ()
    with collectives.raise_on_all_ranks():
        if context.me.is_rank0:
            skips = read_skips(Path(data.skip))
    skips = collectives.broadcast_object(skips, tuple[Skipped, ...])
    context.log(words_of(skips))
    return dataclasses.replace(batches, mixture=without(batches.mixture, skips))


def _open_apart(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> Batches:
    """Return the data of ``evaluation.paths``."""
    apart = dataclasses.replace(data, paths=evaluation.paths, weights=(), max_bytes=0, skip="")
    return _with_targets(_open(apart, files, context, "--evaluation.paths"))


def _hold_out(batches: Batches, data: Data, evaluation: Evaluation, context: RankContext) -> tuple[Batches, Batches]:
    """Hold out a fraction of the training data; return both parts."""
    batches, held_out = batches.hold_out(evaluation.fraction)
    for line in describe_held_out(data, held_out):
        context.log(line)
    return batches, _with_targets(held_out)


def _with_targets(held_out: Batches) -> Batches:
    """Return the data; raise UserError if it has no target token."""
    if not any((held_out.in_order([i]).targets_BS != IGNORE_INDEX).any() for i in range(held_out.n_sequences)):
        raise UserError("[evaluation]: the held-out data has no target token; use other data or a larger fraction")
    return held_out


class _Built(NamedTuple):
    module: nn.Module  # runs the forward and backward
    master: nn.Module  # its parameters are the stored weights that updates change
    origin: str  # where the weights come from, for the log


def build_model(
    config: Config, files: Path, context: RankContext, *, from_checkpoint: bool, trains: bool = True
) -> tuple[nn.Module, nn.Module]:
    """Build the sharded model and its master; a master that a checkpoint will fill gets only memory.

    ``files``: the directory of the model's small files. ``trains``: whether the weights will be updated; only the log depends on it.

    Raises:
        UserError: The configuration does not fit the model or the device.
    """
    hf_config = llama.read_hf_config(files, config.model.layers)
    shape = models.read_llama(files, config.model.layers)
    check_groups(config.optimizer.groups, factors(shape, config.adapter) or shape.tensors(), config.parallel)
    if config.adapter.path and not from_checkpoint:
        with collectives.raise_on_all_ranks():  # fail before minutes of loading
            if context.me.is_rank0:
                read_peft(Path(config.adapter.path), shape, config.adapter)
    attention = choose_attention(config, hf_config, context.me)
    began = time.monotonic()
    if config.parallel.by_fsdp1:
        built = _by_fsdp1(config, hf_config, attention, context)
    else:
        built = _by_fsdp2(config, files, hf_config, attention, context, from_checkpoint=from_checkpoint)
    if not from_checkpoint:
        load_weights.refuse_not_finite(built.master, Path(config.model.path), Path(config.adapter.path))
    if config.model.compile:
        with collectives.raise_on_all_ranks():
            if why := llama.compile_lack(context.me.device):
                raise UserError(f"--model.compile: {why}; install it, or remove the setting")
        llama.compile_layers(built.module)
    kernels = _fuse(built.module, config, hf_config, context) if config.model.fused else []
    checkpoint_activations(built.module, Recompute.read(config.model.activation_checkpointing))
    took = f"{built.origin}, {time.monotonic() - began:.1f} s"
    for line in [*_described(config, attention, context, shape, took, trains=trains), *kernels]:
        context.log(line)
    return built.module, built.master


def _fuse(module: nn.Module, config: Config, hf_config: PreTrainedConfig, context: RankContext) -> list[str]:
    """Fuse the kernels that every rank has verified; return lines for the log."""
    said = []
    for name in fused.FORWARDS:
        why = "its linear layers have adapters" if name == "SwiGLU" and config.adapter.trains else ""
        why = why or fused.lack(name, hf_config, context.me.device, llama.compute_dtype(config.parallel.numerics))
        lacks = list(filter(None, collectives.all_gather_objects(why)))
        if not lacks:
            fused.fuse(module, name)
        said.append(f"{name}: " + (f"transformers' own ({lacks[0]})" if lacks else "fused; verified on this device"))
    return said


def _by_fsdp1(config: Config, hf_config: PreTrainedConfig, attention: Attention, context: RankContext) -> _Built:
    if not context.me.on_gpu:
        raise UserError("--parallel.strategy: torch does not support fsdp1 on CPU; use fsdp2")
    directory = None if config.model.weights == "random" else Path(config.model.path)
    module = fsdp.load_wrapped(directory, hf_config, attention.name, config.parallel, context.me)
    return _Built(module, module, "rank 0 broadcast the weights")


def _by_fsdp2(
    config: Config,
    files: Path,
    hf_config: PreTrainedConfig,
    attention: Attention,
    context: RankContext,
    *,
    from_checkpoint: bool,
) -> _Built:
    parallel, me = config.parallel, context.me
    adapter, kept = config.adapter, fsdp.shard_dtype(parallel)
    frozen = llama.compute_dtype(parallel.numerics)  # frozen weights need no FP32 copy
    whole = llama.build_on_meta(hf_config, attention.name, frozen if adapter.trains else kept)
    llama.freeze(whole, config.optimizer.groups, whole=adapter.trains)
    if parallel.numerics == "fp8":
        with collectives.raise_on_all_ranks():
            if why := llama.fp8_lack(me.device):
                raise UserError(f"--parallel.numerics fp8: {why}, or use fp32-master")
        slower = "" if config.model.compile else "; slower than BF16 unless layers are compiled (--model.compile true)"
        context.log(f"{llama.convert_to_fp8(whole, me.device)} linear layers compute in FP8{slower}")
    holdings = holdings_of(whole, parallel, me)
    adapt = functools.partial(add_adapters, adapter=adapter, dtype=kept, groups=config.optimizer.groups)
    module = split(whole, parallel, me, *[adapt] * adapter.trains)
    if me.on_gpu and parallel.offload == "none" and Dealing.of(config.training, me.dp.size).rounds == 1:
        fsdp.lend_gradients(module)
    master, offload = master_model(module, parallel), parallel.offload != "none"
    if parallel.offload == "all":
        if me.on_gpu:
            context.phase(Phase.PIN)
        load_weights.materialise(module, me, offload=True, pinning=context.heartbeat.progress)
        context.phase(Phase.LOAD)
    elif master is not module:
        load_weights.materialise(module, me)
    if from_checkpoint and not adapter.trains:
        load_weights.materialise(master, me, offload=offload)
        return _Built(module, master, "weights come from the checkpoint")
    shape, progress = models.read_llama(files, config.model.layers), context.heartbeat.progress
    origin = load_weights.load(
        master,
        Path(config.model.path),
        config.model.load,
        me,
        progress,
        offload=offload,
        random=shape if config.model.weights == "random" else None,
        holdings=holdings,
        vocab=shape.vocab if config.model.resize_vocabulary else 0,
    )
    if adapter.trains:
        origin += "; adapters "
        if from_checkpoint:
            origin += "come from the checkpoint"
        else:
            origin += load_weights.load_adapter(master, shape, adapter, config.training.seed, me, holdings, progress)
    return _Built(module, master, origin)


def _described(
    config: Config, attention: Attention, context: RankContext, shape: models.Llama, took: str, *, trains: bool
) -> list[str]:
    """Return lines for the log about the model; with training also bytes per parameter, update timing and the cost of rounding."""
    parallel, me = config.parallel, context.me
    size = f" at {sum(adapter_bytes(shape, config.adapter, parallel)):.3g} bytes per parameter" if trains else ""
    what = f"{shape.parameters:,} parameters"
    if config.adapter.trains:
        what += f", frozen, plus {adapter_parameters(shape, config.adapter):,} of {describe(config.adapter)}"
    updates = _update_words(parallel) if trains else ""
    recompute = f"activation checkpointing: {config.model.activation_checkpointing}"
    recompute += ", layers compiled" * config.model.compile
    note = rounding_note(parallel, config.optimizer) if trains else ""
    return [
        f"{parallel.strategy} on {me.world} x {me.device.type} ({me.axes}): {what}, {parallel.numerics}{size}; {took}",
        f"attention: {attention.name} ({attention.why}); {recompute}; cpu offload: {parallel.offload}{updates}",
        *attention.checked,
        *filter(None, [note]),
    ]


def _update_words(parallel: Parallel) -> str:
    """Return when the weights are updated, for the log; '' without offload."""
    if parallel.offload == "none":
        return ""
    if parallel.hides_update:
        return ", updated under the next forward"
    return ", updated between the steps" + " (fsdp1 cannot hide that)" * parallel.by_fsdp1


def bring_model_files(model: Model, data: Data, context: RankContext, *, whole: bool) -> Path:
    """Copy the model's small files from rank 0 to every host; return their directory.

    ``whole``: the files must hold the full model, not one host's rows. ``data``: its sequence length and template must fit.

    Raises:
        UserError: On every rank, if rank 0's directory is not a complete Llama checkpoint that fits the sequences.
    """
    me, target = context.me, context.run.model(context.me.host)
    small: dict[str, str] = {}
    with collectives.raise_on_all_ranks():
        if me.is_rank0:
            small = _read_checked(model, data, context, whole=whole)
    for name, content in collectives.broadcast_object(small, dict[str, str]).items():
        if me.local_rank == 0 and models.is_small(name):
            target.mkdir(parents=True, exist_ok=True)
            partial = target / f".{name}.{os.getpid()}"
            partial.write_bytes(base64.b64decode(content))
            partial.replace(target / name)
    # No rank may read before the files of its host are complete.
    dist.barrier()
    return target


def _read_checked(model: Model, data: Data, context: RankContext, *, whole: bool) -> dict[str, str]:
    """Return the small files of a complete checkpoint by name, in base64; create the demo model if it is missing."""
    directory = Path(model.path)
    if directory == Path(DEMO_MODEL) and not directory.exists():
        context.log(f"making the demo's model and tokenizer in {directory}")
        make_demo(directory)
    random = model.weights == "random"
    grows = model.resize_vocabulary
    llama = models.check_checkpoint(directory, data.seq_len, model.layers, random=random, whole=whole, resize=grows)
    read_hf_config(directory)  # raises what transformers would raise, before anything else reads it
    if grows and (vocab := models.grown_vocabulary(directory, llama.vocab)) > llama.vocab:
        context.log(
            f"model: added {vocab - llama.vocab} embeddings to {llama.vocab} to match its tokenizer; each is the mean of the old ones"
        )
    contents = models.small_contents(directory, data.chat_template, resize=grows)
    return {name: base64.b64encode(content).decode() for name, content in contents.items()}


Check = Callable[[CheckpointView], None]  # raises UserError if a checkpoint must not be resumed from


def open_checkpoints(
    settings: Checkpoint, timeout_s: int, resume: str, n_bytes: int, context: RankContext, check: Check
) -> tuple[Saving, Resume]:
    """Lock the checkpoint directory, and choose the checkpoint to resume from.

    ``timeout_s``: of collectives that run in the background; ``n_bytes``: size of each checkpoint.
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
        then = "the next host keeps a copy" if settings.copies and n > 1 else "losing a host loses all checkpoints"
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
    """Log what changes with a resume from a checkpoint; ``begin`` returns the start point that a checkpoint gives."""
    for said in filter(None, (other_software(found), changes_at(found, begin(found).identity, allowed))):
        context.log(said)


def resume_run(chosen: Resume, check: Check, module: nn.Module, updater: Updater, context: RankContext) -> int:
    """Load the chosen checkpoint, or an older one if it is damaged, and report it; return the number of finished steps."""
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
    """Load the chosen checkpoint, or the next usable one if it is damaged; return its step and path.

    Raises:
        UserError: No checkpoint can be used.
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
    directory = Path(config.checkpoint.dir or context.run.checkpoints)
    config = with_template_date(config, files, newest_complete(directory) if resume != "no" else None, context)
    batches, held_out = open_data(config.data, config.evaluation, files, context)
    prompts = open_prompts(config, files, held_out, context)  # before weights are loaded: a prompt may be too long
    llama = models.read_llama(files, config.model.layers)
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
    log_reading(config, batches, start, done, context)
    context.journal.resumed_at(done, start.steps, anew=chosen.wanted == "no")
    reader = build_reader(config.training, config.data.workers, batches, start, context)
    epoch_steps = batches.steps_of_epoch(config.training.global_batch_size)
    return Trainer(
        config=config,
        context=context,
        passes=passes,
        updater=updater,
        reader=reader,
        steps=range(done + 1, start.steps + 1),
        flops_per_token=adapter_flops(llama, config.adapter, config.data.seq_len),
        bad_steps=build_bad_steps(config.training, start, reader, done + 1, context),
        checkpointer=Checkpointer(
            saving, updater, start.identity, config.checkpoint, context, restart_s=time.monotonic() - began
        ),
        requests=Requests(context, stop),
        evaluator=build_evaluator(config, passes, held_out, prompts, context, epoch_steps),
        busy=watch_units(config.parallel, module, context),
        host_inputs=build_host_inputs(config, module, llama, context),
        evaluates_first=chosen.found is None and not collectives.broadcast_object(context.journal.began_evaluated),
        tokens=context.journal.tokens,
        budget=budget,
        trackers=start_trackers(config.tracking, chosen.wanted, done, context),
    )


def start_trackers(tracking: Tracking, resume: str, done: int, context: RankContext) -> Trackers:
    """Start the trackers on rank 0; ``resume``: the setting, ``done``: the step of the loaded checkpoint."""
    back_to = None if resume in ("no", "auto") else done
    return Trackers(tracking.to if context.me.is_rank0 else (), context.run, context.log, back_to)


def bind_to_numa_node(parallel: Parallel, context: RankContext) -> None:
    """Bind this rank's threads to cores near its GPU, unless the settings forbid it."""
    if parallel.numa == "auto" and (bound := bind(context.me)):
        context.log(bound)


def watch_units(parallel: Parallel, module: nn.Module, context: RankContext) -> BusyMeter | None:
    """Show in shared memory which unit this rank is in, and measure its busy time (``build_busy_meter``)."""
    show = context.heartbeat.memory.unit
    UnitTracker(lambda name, way: functools.partial(show, unit_label(name, way))).attach(module)
    return build_busy_meter(parallel, module, context)


def build_busy_meter(parallel: Parallel, module: nn.Module, context: RankContext) -> BusyMeter | None:
    """Build the meter of this rank's busy time; None if it cannot be measured.

    It needs FSDP2, a torch with the methods that the meter wraps, and no tp, cp or pp: there ranks wait for each other within a forward
    or between stages.
    """
    axes = context.me.axes
    if parallel.by_fsdp1 or axes.tp * axes.cp * axes.pp > 1:
        return None
    meter = BusyMeter(context.me.device)
    try:
        meter.attach(module)
    except AttributeError as error:
        context.log(f"busy time is off: this version of torch differs ({error})")
        return None
    return meter


def build_host_inputs(
    config: Config, module: nn.Module, llama: models.Llama, context: RankContext
) -> HostInputs | None:
    """Make layers keep their inputs in CPU memory (pinned with a GPU), if the settings say so."""
    if config.model.activations == "device":
        return None
    me = context.me
    if me.on_gpu:
        context.phase(Phase.PIN)
    dtype = compute_dtype(config.parallel.numerics)
    stage = me.axes.place(me.rank, ("pp",)).rank
    run = RunShape.of(llama, config, me.world, me.axes)
    return keep_on_host(
        module, run.inputs_on_host(stage), run.input_shape, dtype, me.device, context.heartbeat.progress
    )


def build_update(config: Config, module: nn.Module, master: nn.Module, context: RankContext) -> Updater:
    """Build the updater of the weights; with a GPU, first pin the CPU memory that it needs."""
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
    """Pin staging memory for saves of state that is on a GPU; otherwise the first save allocates it."""
    if (
        config.checkpoint.cadence.saves and context.me.on_gpu and config.parallel.offload == "none"
    ):  # alike on all ranks
        context.phase(Phase.PIN)
        saving.allocate_staging(updater, context.heartbeat.progress)


def build_reader(training: Training, workers: int, batches: Batches, start: Beginning, context: RankContext) -> Reader:
    """Build the loader of this rank's micro-batches from the start point; ``workers``: number of processes that read ahead."""
    return Reader(
        batches,
        context.me,
        Dealing.of(training, context.me.dp.size),
        training.micro_batch_size,
        start.position,
        workers,
    )


def build_bad_steps(training: Training, start: Beginning, reader: Reader, first: int, context: RankContext) -> BadSteps:
    """Build the check of steps from ``first`` on; it starts with the losses before a resume, unless the data is new."""
    before = context.journal.losses if start.position else ()
    detector = SpikeDetector.replay(training.loss_spike_factor, before, always=training.on_loss_spike == "warn")
    losses = collectives.broadcast_object(tuple(detector.losses), tuple[float, ...])
    return BadSteps(training, SpikeDetector(training.loss_spike_factor, losses), reader, context.journal, first)


def open_prompts(config: Config, files: Path, held_out: Batches | None, context: RankContext) -> Prompts | None:
    """Return the prompts to continue at evaluations (None: no prompts); ``files``: the tokenizer's directory.

    Raises:
        UserError: A prompt cannot be continued.
    """
    if held_out is None or not config.evaluation.prompts:
        return None
    return Prompts(config.evaluation, files, config.data, context)


def build_evaluator(
    config: Config,
    passes: Passes,
    held_out: Batches | None,
    prompts: Prompts | None,
    context: RankContext,
    epoch_steps: Fraction = Fraction(1),
) -> Evaluator | None:
    """Build the evaluator of held-out data; None if there is none. ``epoch_steps``: see ``Evaluation.due``."""
    if held_out is None:
        return None
    micro = config.training.micro_batch_size
    return Evaluator(config.evaluation, micro, passes, held_out, context, prompts, epoch_steps)


def log_reading(config: Config, batches: Batches, start: Beginning, done: int, context: RankContext) -> None:
    """Log the size of an epoch and of a step, and whether any step is left to take."""
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
    if done >= start.steps:
        left = f"nothing to train: {done} of {start.steps} steps are done"
        context.log(f"{left}; to continue, raise training.max_steps or .epochs")
