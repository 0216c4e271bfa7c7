"""The sharded model, with weights or with memory for those of a checkpoint, and what is said of it."""

import functools
import time
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from llama405b.contract import weights
from llama405b.contract.adapters import describe, factors, held_bytes, n_parameters, read_peft
from llama405b.contract.dealing import Dealing
from llama405b.contract.errors import UserError
from llama405b.contract.groups import check_groups
from llama405b.contract.recompute import Recompute
from llama405b.contract.records import Phase
from llama405b.contract.rounding import rounding_note
from llama405b.contract.schema import Config, Parallel
from llama405b.distributed import collectives
from llama405b.model import compiling, fp8, fused, llama
from llama405b.model.adapters import add_adapters
from llama405b.model.attention import Attention, choose_attention
from llama405b.model.checkpointing import checkpoint_activations
from llama405b.optim.fp32_masters import master_model
from llama405b.parallel import fsdp1, fsdp2, load_weights
from llama405b.parallel.split import holdings_of, split
from llama405b.training.context import RankContext


class _Built(NamedTuple):
    module: nn.Module  # computes
    master: nn.Module  # its parameters are the weights that are updated
    origin: str  # of the weights, in words


def build_model(
    config: Config, files: Path, context: RankContext, *, from_checkpoint: bool, trains: bool = True
) -> tuple[nn.Module, nn.Module]:
    """Build the sharded model, and what holds its master weights (only their memory, if a checkpoint will fill it).

    ``files``: the directory of the model's small files. ``trains``: whether the weights will be updated, which is then said of them.

    Raises:
        UserError: The configuration does not fit the model or the device.
    """
    hf_config = llama.read_hf_config(files, config.model.layers)
    shape = weights.read_llama(files, config.model.layers)
    check_groups(config.optimizer.groups, factors(shape, config.adapter) or shape.tensors(), config.parallel)
    if config.adapter.path and not from_checkpoint:
        with collectives.raise_on_all_ranks():  # before minutes of loading
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
            if why := compiling.lack(context.me.device):
                raise UserError(f"--model.compile: {why}; install it, or leave the setting out")
        compiling.compile_layers(built.module)
    kernels = _fuse(built.module, config, hf_config, context) if config.model.fused else []
    checkpoint_activations(built.module, Recompute.read(config.model.activation_checkpointing))
    took = f"{built.origin}, {time.monotonic() - began:.1f} s"
    for line in [*_described(config, attention, context, shape, took, trains=trains), *kernels]:
        context.log(line)
    return built.module, built.master


def _fuse(module: nn.Module, config: Config, hf_config: PreTrainedConfig, context: RankContext) -> list[str]:
    """Have modules compute in fewer kernels where every rank finds that right; returns what to say of it."""
    said = []
    for name in fused.FORWARDS:
        why = "its products have adapters" if name == "SwiGLU" and config.adapter.trains else ""
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
    module = fsdp1.load_wrapped(directory, hf_config, attention.name, config.parallel, context.me)
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
    adapter, kept = config.adapter, fsdp2.shard_dtype(parallel)
    frozen = llama.compute_dtype(parallel.numerics)  # which needs no more
    whole = llama.build_on_meta(hf_config, attention.name, frozen if adapter.trains else kept)
    llama.freeze(whole, config.optimizer.groups, whole=adapter.trains)
    if parallel.numerics == "fp8":
        with collectives.raise_on_all_ranks():
            if why := fp8.lack(me.device):
                raise UserError(f"--parallel.numerics fp8: {why}, or use fp32-master")
        slower = "" if config.model.compile else "; slower than BF16 unless layers are compiled (--model.compile true)"
        context.log(f"{fp8.convert(whole, me.device)} linear layers compute in FP8{slower}")
    holdings = holdings_of(whole, parallel, me)
    adapt = functools.partial(add_adapters, adapter=adapter, dtype=kept, groups=config.optimizer.groups)
    module = split(whole, parallel, me, *[adapt] * adapter.trains)
    if me.on_gpu and parallel.offload == "none" and Dealing.of(config.training, me.dp.size).rounds == 1:
        fsdp2.lend_gradients(module)
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
    shape, progress = weights.read_llama(files, config.model.layers), context.heartbeat.progress
    origin = load_weights.load(
        master,
        Path(config.model.path),
        config.model.load,
        me,
        progress,
        offload=offload,
        random=shape if config.model.weights == "random" else None,
        holdings=holdings,
    )
    if adapter.trains:
        origin += "; adapters "
        if from_checkpoint:
            origin += "come from the checkpoint"
        else:
            origin += load_weights.load_adapter(master, shape, adapter, config.training.seed, me, holdings, progress)
    return _Built(module, master, origin)


def _described(
    config: Config, attention: Attention, context: RankContext, shape: weights.Llama, took: str, *, trains: bool
) -> list[str]:
    """Say what was built, and if it is trained how many bytes that takes, when weights are updated, and what rounding costs."""
    parallel, me = config.parallel, context.me
    size = f" at {sum(held_bytes(shape, config.adapter, parallel)):.3g} bytes per parameter" if trains else ""
    what = f"{shape.parameters:,} parameters"
    if config.adapter.trains:
        what += f", frozen, beside {n_parameters(shape, config.adapter):,} of {describe(config.adapter)}"
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
    """Say when the weights are updated, with offload."""
    if parallel.offload == "none":
        return ""
    if parallel.hides_update:
        return ", updated under the next forward"
    return ", updated between the steps" + " (fsdp1 cannot hide that)" * parallel.by_fsdp1
