"""Build the parts of a run, each from its own settings: data, model, updater and what watches them."""

import base64
import contextlib
import dataclasses
import functools
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from llama405b.contract.checkpoints import MANIFEST, read_manifest
from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import Phase
from llama405b.data.batch import IGNORE_INDEX
from llama405b.data.batches import (
    Batches,
    SkippedRange,
    describe_held_out,
    describe_skipped,
    end_token_warnings,
    mask_skipped,
    open_batches,
    read_skips,
)
from llama405b.data.chat_template import add_template_date
from llama405b.data.demo_model import make_demo
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import TokenizeRecord
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank, bind_cores, describe_memory_nodes, ranks_per_host
from llama405b.formats.corpus import TOKENIZED, is_tokenized
from llama405b.model import fused, llama
from llama405b.model.attention import AttentionChoice, choose_attention
from llama405b.model.host_inputs import HostInputs, offload_inputs
from llama405b.model.llama import add_adapters, checkpoint_activations, compute_dtype, read_hf_config
from llama405b.optim.build_updater import build_updater
from llama405b.optim.offload import pin_for_gradients
from llama405b.optim.optimizer import master_model
from llama405b.optim.updater import Updater
from llama405b.parallel import fsdp, load_weights
from llama405b.parallel.busy import BusyMeter
from llama405b.parallel.fsdp import UnitTracker
from llama405b.parallel.passes import ForwardBackward
from llama405b.parallel.split import shard_layout_of, split_model
from llama405b.predict.estimate import Cluster
from llama405b.predict.hardware import match_gpu, read_gpus
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import find_model_shape, resolve_auto
from llama405b.settings.axes import MicrobatchSplit, Recompute
from llama405b.settings.config import DEMO_MODEL
from llama405b.settings.rules import check_groups
from llama405b.settings.schema import Config, Data, Evaluation, Model, Parallel
from llama405b.spec import models
from llama405b.spec.adapters import adapter_label, bytes_per_parameter, lora_shapes, n_adapter_parameters, read_peft
from llama405b.spec.rules import rounding_note
from llama405b.training.context import RankContext
from llama405b.training.evaluate import Evaluator, Prompts
from llama405b.training.journal import unit_label


def resolve_config(config: Config, preset: str, rank: Rank) -> Config:
    """Return the configuration with "auto" settings resolved for these ranks. All ranks must call it.

    Rank 0 resolves them, as it has the model's files.

    Raises:
        UserError: The model's shape is unknown, or the model cannot be split this way.
        PeerFailedError: Rank 0 raised that error.
    """
    if not config.auto_setting:
        return config
    n_per_host = ranks_per_host()
    with collectives.raise_on_all_ranks():
        if rank.is_rank0:
            config = _resolve_on_rank0(config, preset, rank, n_per_host)
    return collectives.broadcast_object(config)


def _resolve_on_rank0(config: Config, preset: str, rank: Rank, n_per_host: int) -> Config:
    llama = find_model_shape(config, preset)
    if llama is None:
        raise UserError(
            f"{config.auto_setting}: this needs the model's shape, but {config.model.path} has no config.json; download it first, add "
            "--preset, or set another value"
        )
    gpu = None
    if rank.on_gpu:
        properties = torch.cuda.get_device_properties(rank.device)
        gpu = match_gpu(properties.name, properties.total_memory, read_gpus())
    return resolve_auto(config, llama, rank.world_size, n_per_host, Cluster(gpu) if gpu else None)


def with_template_date(config: Config, files: Path, checkpoint: Path | None, context: RankContext) -> Config:
    """Return the configuration with the date for a chat template that asks for one: from a checkpoint of the run, else today.

    ``files``: the tokenizer's directory; ``checkpoint``: the newest that this rank sees. All ranks must call it.
    """
    data, step_and_date = config.data, (0, "")
    with contextlib.suppress(OSError, MalformedError):  # reported later, where a checkpoint is chosen
        manifest = read_manifest((checkpoint / MANIFEST).read_bytes())[0] if checkpoint else None
        if manifest and manifest.identity:
            step_and_date = (manifest.step, str(manifest.identity.settings.get("data.template_date", "")))
    saved_date = max(collectives.all_gather_objects(step_and_date, tuple[int, str]))[1]
    with collectives.raise_on_all_ranks():
        if context.rank.is_rank0:
            tokenized_records = [
                read_record(TokenizeRecord, Path(part.paths[0]) / TOKENIZED)
                for part in data.sources
                if is_tokenized(part.paths)
            ]
            data = add_template_date(
                data,
                read_tokenizer(files),
                saved_date or next((record.template_date for record in tokenized_records if record), ""),
            )
    return dataclasses.replace(config, data=collectives.broadcast_object(data))


def open_data(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> tuple[Batches, Batches | None]:
    """Return the training data and the evaluation data (None without evaluation); ``files``: the tokenizer's directory.

    Raises:
        UserError: The data cannot be used.
    """
    batches = _open_data(data, files, context)
    with collectives.raise_on_all_ranks():
        for line in end_token_warnings(data, batches, files) if context.rank.is_rank0 else ():
            context.journal.log(line)
    if not evaluation.is_enabled:
        return batches, None
    if evaluation.paths:
        return batches, _open_evaluation_data(data, evaluation, files, context)
    return _hold_out(batches, data, evaluation, context)


def open_held_out(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> Batches:
    """Return the evaluation data; training data is read only to hold out a part of it.

    Raises:
        UserError: The data cannot be used.
    """
    if evaluation.paths:
        return _open_evaluation_data(data, evaluation, files, context)
    return _hold_out(_open_data(data, files, context), data, evaluation, context)[1]


def _open_data(data: Data, files: Path, context: RankContext, option: str = "--data.paths") -> Batches:
    cache = context.run.path.parent / ".cache"
    batches = open_batches(
        data, files, cache, context.rank, context.heartbeat.record_progress, context.journal.log, option
    )
    if not data.skip:
        return batches
    skips: tuple[SkippedRange, ...] = ()
    with collectives.raise_on_all_ranks():
        if context.rank.is_rank0:
            skips = read_skips(Path(data.skip))
    skips = collectives.broadcast_object(skips, tuple[SkippedRange, ...])
    context.journal.log(describe_skipped(skips))
    return dataclasses.replace(batches, mixture=mask_skipped(batches.mixture, skips))


def _open_evaluation_data(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> Batches:
    """Return the data of ``evaluation.paths``."""
    evaluation_data = dataclasses.replace(data, paths=evaluation.paths, weights=(), max_bytes=0, skip="")
    return _check_targets(_open_data(evaluation_data, files, context, "--evaluation.paths"))


def _hold_out(batches: Batches, data: Data, evaluation: Evaluation, context: RankContext) -> tuple[Batches, Batches]:
    """Hold out a fraction of the training data; return both parts."""
    batches, held_out = batches.hold_out(evaluation.fraction)
    for line in describe_held_out(data, held_out):
        context.journal.log(line)
    return batches, _check_targets(held_out)


def _check_targets(held_out: Batches) -> Batches:
    """Return the data; raise UserError if it has no target token."""
    if not any((held_out.read_unshuffled([i]).targets_BS != IGNORE_INDEX).any() for i in range(held_out.n_sequences)):
        raise UserError("[evaluation]: the held-out data has no target token; use other data or a larger fraction")
    return held_out


class _BuiltModel(NamedTuple):
    module: nn.Module  # runs the forward and backward
    master: nn.Module  # its parameters are the stored weights that updates change
    origin: str  # where the weights come from, for the log


def build_model(
    config: Config, files: Path, context: RankContext, *, from_checkpoint: bool, is_trained: bool = True
) -> tuple[nn.Module, nn.Module]:
    """Build the sharded model and its master; a master that a checkpoint will fill gets only memory.

    ``files``: the directory of the model's small files. ``is_trained``: whether the weights will be updated; only the log depends on it.

    Raises:
        UserError: The configuration does not fit the model or the device.
    """
    hf_config = llama.read_hf_config(files, config.model.layers)
    shape = models.read_llama(files, config.model.layers)
    check_groups(config.optimizer.groups, lora_shapes(shape, config.adapter) or shape.tensors(), config.parallel)
    if config.adapter.path and not from_checkpoint:
        with collectives.raise_on_all_ranks():  # fail before minutes of loading
            if context.rank.is_rank0:
                read_peft(Path(config.adapter.path), shape, config.adapter)
    attention = choose_attention(config, hf_config, context.rank)
    start_s = time.monotonic()
    if config.parallel.is_fsdp1:
        result = _build_fsdp1(config, hf_config, attention, context)
    else:
        result = _build_fsdp2(config, files, hf_config, attention, context, from_checkpoint=from_checkpoint)
    if not from_checkpoint:
        load_weights.check_weights_finite(result.master, Path(config.model.path), Path(config.adapter.path))
    if config.model.compile:
        with collectives.raise_on_all_ranks():
            if reason := llama.compile_unsupported_reason(context.rank.device):
                raise UserError(f"--model.compile: {reason}; install it, or remove the setting")
        llama.compile_layers(result.module)
    kernels = _fuse_kernels(result.module, config, hf_config, context) if config.fuses(shape.is_fusible) else []
    checkpoint_activations(result.module, Recompute.parse(config.model.activation_checkpointing))
    origin = f"{result.origin}, {time.monotonic() - start_s:.1f} s"
    for line in [*_describe_model(config, attention, context, shape, origin, is_trained=is_trained), *kernels]:
        context.journal.log(line)
    return result.module, result.master


def _fuse_kernels(module: nn.Module, config: Config, hf_config: PreTrainedConfig, context: RankContext) -> list[str]:
    """Fuse the kernels that every rank has verified; return lines for the log."""
    lines = []
    for name in fused.FORWARDS:
        reason = "its linear layers have adapters" if name == "SwiGLU" and config.adapter.is_enabled else ""
        reason = reason or fused.unsupported_reason(
            name, hf_config, context.rank.device, llama.compute_dtype(config.parallel.numerics)
        )
        reasons = list(filter(None, collectives.all_gather_objects(reason)))
        if not reasons:
            fused.fuse(module, name)
        lines.append(
            f"{name}: " + (f"transformers' own ({reasons[0]})" if reasons else "fused; verified on this device")
        )
    if context.rank.on_gpu:
        torch.cuda.empty_cache()  # half a gigabyte of the check, of a model as wide as 405B
    return lines


def _build_fsdp1(
    config: Config, hf_config: PreTrainedConfig, attention: AttentionChoice, context: RankContext
) -> _BuiltModel:
    if not context.rank.on_gpu:
        raise UserError("--parallel.strategy: torch does not support fsdp1 on CPU; use fsdp2")
    directory = None if config.model.weights == "random" else Path(config.model.path)
    module = fsdp.load_fsdp1(directory, hf_config, attention.name, config.parallel, context.rank)
    return _BuiltModel(module, module, "rank 0 broadcast the weights")


def _convert_to_fp8(full_model: nn.Module, config: Config, context: RankContext) -> None:
    rank = context.rank
    with collectives.raise_on_all_ranks():
        if reason := llama.fp8_unsupported_reason(rank.device):
            raise UserError(f"--parallel.numerics fp8: {reason}, or use fp32-master")
    slower = "" if config.model.compile else "; slower than BF16 unless layers are compiled (--model.compile true)"
    n_converted = llama.convert_to_fp8(full_model, rank.device, rank.axes.tp)
    context.journal.log(f"{n_converted} linear layers compute in FP8{slower}")


def _build_fsdp2(
    config: Config,
    files: Path,
    hf_config: PreTrainedConfig,
    attention: AttentionChoice,
    context: RankContext,
    *,
    from_checkpoint: bool,
) -> _BuiltModel:
    parallel, rank = config.parallel, context.rank
    adapter, shard_dtype = config.adapter, fsdp.shard_dtype(parallel)
    frozen_dtype = llama.compute_dtype(parallel.numerics)  # frozen weights need no FP32 copy
    full_model = llama.build_on_meta(hf_config, attention.name, frozen_dtype if adapter.is_enabled else shard_dtype)
    llama.freeze(full_model, config.optimizer.groups, freeze_all=adapter.is_enabled)
    if parallel.numerics == "fp8":
        _convert_to_fp8(full_model, config, context)
    shard_layout = shard_layout_of(full_model, parallel, rank)
    adapt = functools.partial(add_adapters, adapter=adapter, dtype=shard_dtype, groups=config.optimizer.groups)
    module = split_model(full_model, parallel, rank, adapt if adapter.is_enabled else None)
    if (
        rank.on_gpu
        and parallel.offload == "none"
        and MicrobatchSplit.from_training(config.training, rank.dp.size).grad_accum_steps == 1
    ):
        fsdp.allocate_grads_on_compute_stream(module)
    master, offload = master_model(module, parallel), parallel.offload != "none"
    if parallel.offload == "all":
        if rank.on_gpu:
            context.heartbeat.enter_phase(Phase.PIN)
        load_weights.materialize(module, rank, offload=True, on_pin_progress=context.heartbeat.record_progress)
        context.heartbeat.enter_phase(Phase.LOAD)
    elif master is not module:
        load_weights.materialize(module, rank)
    if from_checkpoint and not adapter.is_enabled:
        load_weights.materialize(master, rank, offload=offload)
        return _BuiltModel(module, master, "weights come from the checkpoint")
    shape, on_progress = models.read_llama(files, config.model.layers), context.heartbeat.record_progress
    origin = load_weights.load(
        master,
        Path(config.model.path),
        config.model.load,
        rank,
        on_progress,
        offload=offload,
        random_shape=shape if config.model.weights == "random" else None,
        shard_layout=shard_layout,
        vocab=shape.vocab if config.model.resize_vocabulary else 0,
    )
    if adapter.is_enabled:
        adapter_origin = "come from the checkpoint"
        if not from_checkpoint:
            adapter_origin = load_weights.load_adapter(
                master, shape, adapter, config.training.seed, rank, shard_layout, on_progress
            )
        origin += f"; adapters {adapter_origin}"
    return _BuiltModel(module, master, origin)


def _describe_model(
    config: Config,
    attention: AttentionChoice,
    context: RankContext,
    shape: models.Llama,
    origin: str,
    *,
    is_trained: bool,
) -> list[str]:
    """Return lines for the log about the model; with training also bytes per parameter, update timing and the cost of rounding."""
    parallel, rank = config.parallel, context.rank
    size = f" at {sum(bytes_per_parameter(shape, config)):.3g} bytes per parameter" if is_trained else ""
    parameters = f"{shape.parameters:,} parameters"
    if config.adapter.is_enabled:
        parameters += (
            f", frozen, plus {n_adapter_parameters(shape, config.adapter):,} of {adapter_label(config.adapter)}"
        )
    updates = _describe_update(parallel) if is_trained else ""
    recompute = f"activation checkpointing: {config.model.activation_checkpointing}"
    recompute += ", layers compiled" * config.model.compile
    note = rounding_note(parallel, config.optimizer) if is_trained else ""
    return [
        f"{parallel.strategy} on {rank.world_size} x {rank.device.type} ({rank.axes}): {parameters}, {parallel.numerics}{size}; {origin}",
        f"attention: {attention.name} ({attention.reason}); {recompute}; cpu offload: {parallel.offload}{updates}",
        *attention.log_lines,
        *filter(None, [note]),
    ]


def _describe_update(parallel: Parallel) -> str:
    """Return when the weights are updated, for the log; '' without offload."""
    if parallel.offload == "none":
        return ""
    if parallel.hides_update:
        return ", updated under the next forward"
    return ", updated between the steps" + " (fsdp1 cannot hide that)" * parallel.is_fsdp1


def distribute_model_files(model: Model, data: Data, context: RankContext, *, needs_all: bool) -> Path:
    """Copy the model's small files from rank 0 to every host; return their directory.

    ``needs_all``: the files must hold the full model, not one host's rows. ``data``: its sequence length and template must fit.

    Raises:
        UserError: On every rank, if rank 0's directory is not a complete Llama checkpoint that fits the sequences.
    """
    rank, target = context.rank, context.run.model(context.rank.host)
    small_files: dict[str, str] = {}
    with collectives.raise_on_all_ranks():
        if rank.is_rank0:
            small_files = _read_small_files(model, data, context, needs_all=needs_all)
    for name, content in collectives.broadcast_object(small_files, dict[str, str]).items():
        if rank.local_rank == 0 and models.is_small_file(name):
            target.mkdir(parents=True, exist_ok=True)
            partial = target / f".{name}.{os.getpid()}"
            partial.write_bytes(base64.b64decode(content))
            partial.replace(target / name)
    # No rank may read before the files of its host are complete.
    dist.barrier()
    return target


def _read_small_files(model: Model, data: Data, context: RankContext, *, needs_all: bool) -> dict[str, str]:
    """Return the small files of a complete checkpoint by name, in base64; create the demo model if it is missing."""
    directory = Path(model.path)
    if directory == Path(DEMO_MODEL) and not directory.exists():
        context.journal.log(f"making the demo's model and tokenizer in {directory}")
        make_demo(directory)
    random = model.weights == "random"
    resize = model.resize_vocabulary
    llama = models.check_checkpoint(
        directory, data.seq_len, model.layers, random=random, needs_all=needs_all, resize=resize
    )
    read_hf_config(directory)  # raises what transformers would raise, before anything else reads it
    if resize and (vocab := models.grow_vocabulary(directory, llama.vocab)) > llama.vocab:
        context.journal.log(
            f"model: added {vocab - llama.vocab} embeddings to {llama.vocab} to match its tokenizer; each is the mean of the old ones"
        )
    contents = models.read_small_files(directory, data.chat_template, resize=resize)
    return {name: base64.b64encode(content).decode() for name, content in contents.items()}


def bind_to_numa_node(parallel: Parallel, context: RankContext) -> None:
    """Bind this rank's threads to cores near its GPU, unless the settings forbid it."""
    if parallel.numa == "auto" and (message := bind_cores(context.rank)):
        context.journal.log(message)


def check_numa_memory(parallel: Parallel, context: RankContext) -> None:
    """Log whether the ranks' memory, states and gradients by now, is near their GPUs, where updates run on CPUs."""
    if parallel.numa == "auto" and parallel.updates_on_cpu and (message := describe_memory_nodes(context.rank)):
        context.journal.log(message)


def watch_units(parallel: Parallel, module: nn.Module, context: RankContext) -> BusyMeter | None:
    """Show in shared memory which unit this rank is in, and measure its busy time (``build_busy_meter``)."""
    show_unit = context.heartbeat.live_progress.show_unit
    UnitTracker(lambda name, direction: functools.partial(show_unit, unit_label(name, direction))).attach(module)
    return build_busy_meter(parallel, module, context)


def build_busy_meter(parallel: Parallel, module: nn.Module, context: RankContext) -> BusyMeter | None:
    """Build the meter of this rank's busy time; None if it cannot be measured.

    It needs FSDP2, a torch with the methods that the meter wraps, and no tp, cp or pp: there ranks wait for each other within a forward
    or between stages.
    """
    axes = context.rank.axes
    if parallel.is_fsdp1 or axes.tp * axes.cp * axes.pp > 1:
        return None
    meter = BusyMeter(context.rank.device)
    try:
        meter.attach(module)
    except AttributeError as error:
        context.journal.log(f"busy time is off: this version of torch differs ({error})")
        return None
    return meter


def build_host_inputs(
    config: Config, module: nn.Module, llama: models.Llama, context: RankContext
) -> HostInputs | None:
    """Make layers keep their inputs in CPU memory (pinned with a GPU), if the settings say so."""
    if config.model.activations == "device":
        return None
    rank = context.rank
    if rank.on_gpu:
        context.heartbeat.enter_phase(Phase.PIN)
    dtype = compute_dtype(config.parallel.numerics)
    stage = rank.axes.coordinate(rank.index, ("pp",)).rank
    run = PredictedRun.from_config(llama, config, rank.world_size, axes=rank.axes)
    return offload_inputs(
        module, run.inputs_on_host(stage), run.input_shape, dtype, rank.device, context.heartbeat.record_progress
    )


def build_pinned_updater(config: Config, module: nn.Module, master: nn.Module, context: RankContext) -> Updater:
    """Build the updater of the weights; with a GPU, first pin the CPU memory that it needs."""
    parallel = config.parallel
    heartbeat = context.heartbeat
    device = context.rank.device
    if context.rank.on_gpu and parallel.updates_on_cpu:
        context.heartbeat.enter_phase(Phase.PIN)
        if parallel.offload == "all":
            is_accumulating = MicrobatchSplit.from_training(config.training, context.rank.dp.size).grad_accum_steps > 1
            pin_for_gradients(module, 1 + (is_accumulating and parallel.updates_by_unit), heartbeat.record_progress)
    return build_updater(
        module, config.optimizer, parallel, device, heartbeat.record_update_wait, master, heartbeat.record_progress
    )


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
    forward_backward: ForwardBackward,
    held_out: Batches | None,
    prompts: Prompts | None,
    context: RankContext,
    epoch_steps: Fraction = Fraction(1),
) -> Evaluator | None:
    """Build the evaluator of held-out data; None if there is none. ``epoch_steps``: see ``Evaluation.is_due``."""
    if held_out is None:
        return None
    micro_batch_size = config.training.micro_batch_size
    return Evaluator(config.evaluation, micro_batch_size, forward_backward, held_out, context, prompts, epoch_steps)
