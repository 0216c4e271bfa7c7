"""Prepare data, model and optimizer for the first step, in the order in which the data flows."""

import base64
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from llama405b.capacity.estimate import Load
from llama405b.checkpoint.compatibility import Beginning, beginning, changes_at
from llama405b.checkpoint.replication import Replication
from llama405b.checkpoint.resume import Resume
from llama405b.checkpoint.saving import Saving
from llama405b.checkpoint.store import CheckpointView, Store
from llama405b.checkpoint.verified import DamagedError
from llama405b.contract import weights
from llama405b.contract.config import DEMO_MODEL, check_world, on_ranks, to_toml
from llama405b.contract.errors import UserError
from llama405b.contract.events import EventKind
from llama405b.contract.files import write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted
from llama405b.contract.records import Phase
from llama405b.contract.rounding import rounding_note
from llama405b.contract.schema import Config, Parallel
from llama405b.data.batches import Batches, described, described_as_held_out, open_batches
from llama405b.data.demo_model import make_demo
from llama405b.data.reader import Reader
from llama405b.distributed import collectives
from llama405b.distributed.numa import bind
from llama405b.distributed.ranks import Rank
from llama405b.model import llama as model
from llama405b.model.attention import choose_attention
from llama405b.model.batch import IGNORE_INDEX
from llama405b.optim.build_updater import build_updater
from llama405b.optim.fp32_masters import master_model
from llama405b.optim.offload_all import fill_for_fsdp
from llama405b.optim.updater import Updater
from llama405b.parallel import fsdp1, fsdp2, load_weights
from llama405b.training.checkpointer import Checkpointer, SaveSchedule
from llama405b.training.heartbeat import HeartbeatWriter
from llama405b.training.inbox import Inbox
from llama405b.training.journal import Journal
from llama405b.training.loop import StopSignal, Trainer
from llama405b.training.loss_spikes import SpikeDetector


def prepare(config: Config, run: RunDir, resume: str, me: Rank, pulse: HeartbeatWriter, stop: StopSignal) -> Trainer:
    """Prepare data, model and optimizer for the first step, from the model's weights or from a checkpoint.

    Raises:
        UserError: The model, the data or a checkpoint cannot be used.
    """
    began = time.monotonic()
    config = on_ranks(config, me.dp.size)
    accumulate = check_world(config, me.dp.size)
    journal = Journal(run, me)
    if config.parallel.numa == "auto" and (bound := bind(me)):
        journal.log(bound)
    files = bring_model_files(config, run, me, journal)
    pulse.phase(Phase.DATA)
    cache = run.path.parent / ".cache"
    batches = open_batches(config.data, files, cache, me, pulse.loaded, journal.log)
    batches, held_out = held_out_of(config, batches, files, cache, me, pulse, journal.log)
    llama = weights.read_llama(files, config.model.layers)
    each_bytes = Load.of(llama, config, me.world).checkpoint_bytes
    begins = functools.partial(beginning, config=config, files=files, batches=batches)
    check = functools.partial(say_changes, begins=begins, allowed=config.checkpoint.allow_changes, journal=journal)
    saving, chosen = open_checkpoints(config, run, resume, each_bytes, me, journal, check)
    if saving.store.keeps:
        write_atomic(run.config, to_toml(config))
    pulse.phase(Phase.LOAD)
    module, kept = build_module(config, files, me, pulse, journal, from_checkpoint=chosen.found is not None)
    if me.on_gpu and config.parallel.updates_on_cpu:
        pulse.phase(Phase.PIN)
        if config.parallel.offload == "full":
            fill_for_fsdp(module, 1 + (accumulate > 1 and config.parallel.updates_by_unit), pulse.loaded)
    updater = build_updater(
        module, config.optimizer, config.parallel, me.device, pulse.waits_for_update, kept, pulse.loaded
    )
    torch.manual_seed(config.training.seed + me.rank)
    done = resume_at(chosen, check, module, updater, me, pulse, journal)
    if saving.copies:
        saving.copies.begin(done)
    training = config.training
    begin = begins(chosen.found)
    position, steps = begin.position, begin.steps
    reader = Reader(batches, me, training.global_batch_size, training.micro_batch_size, position, config.data.workers)
    say_what_is_read(config, batches, steps, accumulate, me, journal)
    journal.resumed_at(done, steps, anew=chosen.wanted == "no")
    is_first = chosen.found is None and not collectives.broadcast_object(journal.began_evaluated)
    usual = SpikeDetector.after(training.spike, journal.losses if position else (), always=training.on_spike == "warn")
    spikes = SpikeDetector(training.spike, collectives.broadcast_object(tuple(usual.losses), tuple[float, ...]))
    clock = SaveSchedule(config.checkpoint, me.world, time.monotonic() - began)
    saver = Checkpointer(saving, updater, begin.identity, clock, journal, pulse)
    if config.checkpoint.keep_best:
        saver.best_loss = saving.store.best_loss()
    return Trainer(
        config, run, me, module, updater, reader, saving.store, saver, range(done + 1, steps + 1), journal, pulse, stop,
        Inbox(run, me), journal.tokens, llama.flops_per_token(config.data.seq_len), held_out, spikes, evaluates_first=is_first,
    )  # fmt: skip


def say_what_is_read(config: Config, batches: Batches, steps: int, accumulate: int, me: Rank, journal: Journal) -> None:
    """Log what an epoch has, and what a step reads of it."""
    for line in described(config.data, batches):
        journal.log(line)
    shape = f"{config.training.global_batch_size} x {config.data.seq_len} tokens"
    micro = f"{counted(accumulate, 'micro-batch', 'micro-batches')} on each of {counted(me.world, 'rank')}"
    journal.log(
        f"{counted(steps, 'step')} of {shape} ({micro}), {counted(batches.n_sequences, 'sequence')} in an epoch"
    )


def held_out_of(
    config: Config,
    batches: Batches,
    files: Path,
    cache: Path,
    me: Rank,
    pulse: HeartbeatWriter,
    say: Callable[[str], None],
) -> tuple[Batches, Batches | None]:
    """Return what is trained on, and what is evaluated on, if anything.

    Raises:
        UserError: The data to evaluate on cannot be used.
    """
    evaluation = config.evaluation
    if not evaluation.every:
        return batches, None
    if evaluation.paths:
        held_out = batches_apart(config, files, cache, me, pulse, say)
    else:
        batches, held_out = batches.hold_out(evaluation.fraction)
        for line in described_as_held_out(config.data, held_out):
            say(line)
    refuse_without_targets(held_out)
    return batches, held_out


def batches_apart(
    config: Config, files: Path, cache: Path, me: Rank, pulse: HeartbeatWriter, say: Callable[[str], None]
) -> Batches:
    """Open the data of ``evaluation.paths``.

    Raises:
        UserError: It cannot be used.
    """
    data = dataclasses.replace(config.data, paths=config.evaluation.paths, weights=(), max_bytes=0)
    return open_batches(data, files, cache, me, pulse.loaded, say, "--evaluation.paths")


def refuse_without_targets(held_out: Batches) -> None:
    """Refuse data of which nothing would be evaluated."""
    if not any((held_out.in_order([i]).targets_BS != IGNORE_INDEX).any() for i in range(held_out.n_sequences)):
        raise UserError("[evaluation]: the held-out data has no target to learn; name other data, or a larger fraction")


def say_changes(
    chosen: Resume, *, begins: Callable[[CheckpointView | None], Beginning], allowed: Sequence[str], journal: Journal
) -> None:
    """Log what changes with a resume.

    Raises:
        UserError: Something changes, and is not allowed to.
    """
    if chosen.found and (changed := changes_at(chosen.found, begins(chosen.found).identity, allowed)):
        journal.log(changed)


def resume_at(
    chosen: Resume,
    check: Callable[[Resume], None],
    module: torch.nn.Module,
    updater: Updater,
    me: Rank,
    pulse: HeartbeatWriter,
    journal: Journal,
) -> int:
    """Load the chosen checkpoint, or an older one if it is damaged; returns the steps that are done."""
    if chosen.found is None:
        journal.event(EventKind.STARTED, step=0)
        if chosen.wanted == "auto":
            journal.log("no checkpoint yet; starting from the model's weights")
        return 0
    done, start = load_chosen(chosen, check, module, updater, me, pulse, journal)
    for each in chosen.passed_over:
        journal.log(f"ignored {each}; renamed to …aside")
        journal.event(EventKind.PASSED_OVER, path=each.path, detail=each.why)
    journal.log(f"resumed from {start}")
    journal.event(EventKind.RESUMED, step=done, path=start)
    return done


def load_chosen(
    chosen: Resume,
    check: Callable[[Resume], None],
    module: torch.nn.Module,
    updater: Updater,
    me: Rank,
    pulse: HeartbeatWriter,
    journal: Journal,
) -> tuple[int, Path]:
    """Load the chosen checkpoint, or what else will do if it is damaged; returns its step and path.

    Raises:
        UserError: None can be used.
    """
    pulse.phase(Phase.RESUME)
    while True:
        assert chosen.found
        start = chosen.found.path
        try:
            done = chosen.load(module, updater, me, pulse.loaded)
            break
        except DamagedError as fault:
            journal.log(str(fault))
            check(chosen)
    load_weights.refuse_not_finite(updater.kept, start)
    return done, start


def open_checkpoints(
    config: Config,
    run: RunDir,
    resume: str,
    each_bytes: int,
    me: Rank,
    journal: Journal,
    check: Callable[[Resume], None],
) -> tuple[Saving, Resume]:
    """Take the directory of checkpoints, and choose the one to resume from; ``check`` may refuse it.

    Raises:
        UserError: The directory or the checkpoint cannot be used.
    """
    root = Path(config.checkpoint.dir or run.checkpoints)
    settings, shared = config.checkpoint, config.checkpoint.place == "shared"
    checkpoints = Store(
        root,
        settings.keep,
        me,
        config.timeouts.load,
        run=run,
        say=journal.log,
        shared=shared,
        keep_best=settings.keep_best,
    )
    if not shared:
        what = counted(len(checkpoints.keepers), "directory", "directories")
        then = "and the next host a copy" if settings.copies else "if a host is lost, so are they"
        journal.log(f"checkpoints: each host keeps its part, {what} in all; {then}")
    try:
        if settings.cadence.saves:
            checkpoints.take()
            checkpoints.check_room(each_bytes, settings.copies)
        chosen = Resume(checkpoints, resume)
        check(chosen)
        copies = Replication(checkpoints) if settings.copies and settings.cadence.saves else None
    except UserError:
        checkpoints.close()
        raise
    return Saving(checkpoints, settings.staging_bytes, copies), chosen


def bring_model_files(config: Config, run: RunDir, me: Rank, journal: Journal) -> Path:
    """Give every host the model's small files (configuration, tokenizer); only rank 0's host needs the directory.

    Raises:
        UserError: On every rank, if rank 0's directory is not a complete Llama checkpoint that fits the sequences.
    """
    directory, random = Path(config.model.path), config.model.weights == "random"
    small: dict[str, str] = {}  # in base64
    with collectives.raise_on_all_ranks():
        if me.leads:
            if directory == Path(DEMO_MODEL) and not directory.exists():
                journal.log(f"making the demo's model and tokenizer in {directory}")
                make_demo(directory)
            whole = config.parallel.fsdp == "fsdp1"
            weights.check_checkpoint(directory, config.data.seq_len, config.model.layers, random=random, whole=whole)
            model.read_hf_config(directory)  # refuses what transformers would, before anything else reads it
            present = weights.small_files(directory, config.data.chat_template)
            small = {name: base64.b64encode(path.read_bytes()).decode() for name, path in present.items()}
    target = run.model(me.host)
    for name, content in collectives.broadcast_object(small, dict[str, str]).items():
        if me.local_rank == 0 and name in weights.SMALL_FILES:
            target.mkdir(parents=True, exist_ok=True)
            partial = target / f".{name}.{os.getpid()}"
            partial.write_bytes(base64.b64decode(content))
            partial.replace(target / name)
    dist.barrier()
    return target


def build_module(
    config: Config,
    files: Path,
    me: Rank,
    pulse: HeartbeatWriter,
    journal: Journal,
    *,
    from_checkpoint: bool,
    trains: bool = True,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Build the sharded model, and the weights as they are kept (or only their memory, if a checkpoint will fill it).

    ``trains``: whether they will be updated, which is then said of them.

    Raises:
        UserError: The configuration does not fit the model or the device.
    """
    parallel, weights_in = config.parallel, Path(config.model.path)
    hf_config = model.read_hf_config(files, config.model.layers)
    attention, why, checked = choose_attention(config, hf_config, me)
    llama = weights.read_llama(files, config.model.layers)
    random = config.model.weights == "random"
    began = time.monotonic()
    if parallel.fsdp == "fsdp1":
        if not me.on_gpu:
            raise UserError("--parallel.fsdp: torch does not support fsdp1 on CPU; use fsdp2")
        module = fsdp1.load_wrapped(None if random else weights_in, hf_config, attention, parallel, me)
        kept, how = module, "rank 0 broadcast the weights"
    else:
        module = model.build_on_meta(hf_config, attention, fsdp2.shard_dtype(parallel))
        fsdp2.shard(module, parallel, me.device, fsdp2.device_mesh(me.axes, me.device.type))
        kept, offload = master_model(module, parallel), parallel.offload != "none"
        if kept is not module:
            load_weights.materialise(module, me, offload=parallel.offload == "full")
        if from_checkpoint:
            load_weights.materialise(kept, me, offload=offload)
            how = "weights come from the checkpoint"
        else:
            made_up = llama if random else None
            how = load_weights.load(
                kept, weights_in, config.model.load, me, pulse.loaded, offload=offload, random=made_up
            )
    if not from_checkpoint:
        load_weights.refuse_not_finite(kept, weights_in)
    if config.model.activation_checkpointing:
        fsdp2.checkpoint_activations(module)
    size, updates, note = _of_training(config) if trains else ("", "", "")
    what = f"{llama.parameters:,} parameters, {parallel.numerics}{size}"
    journal.log(f"{parallel.fsdp} on {me.world} x {me.device.type}: {what}; {how}, {time.monotonic() - began:.1f} s")
    recompute = f"activation checkpointing: {config.model.activation_checkpointing}"
    journal.log(f"attention: {attention} ({why}); {recompute}; cpu offload: {parallel.offload}{updates}")
    for line in (*checked, note):
        if line:
            journal.log(line)
    return module, kept


def _of_training(config: Config) -> tuple[str, str, str]:
    """Say of weights that are trained how many bytes they take, when they are updated, and what rounding costs them."""
    size = f" at {sum(config.parallel.state_bytes)} bytes per parameter"
    return size, _update_words(config.parallel), rounding_note(config.parallel, config.optimizer)


def _update_words(parallel: Parallel) -> str:
    """Say when the weights are updated, with offload."""
    if parallel.offload == "none":
        return ""
    if parallel.hides_update:
        return ", updated under the next forward"
    return ", updated between the steps" + " (fsdp1 cannot hide that)" * (parallel.fsdp == "fsdp1")
