"""Which values of settings are possible, and possible together: each rule yields the setting that is wrong, and what to do. Pure."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence

from llama405b.contract.checkpoints import LEAST_KEPT
from llama405b.contract.errors import UserError
from llama405b.contract.groups import Group
from llama405b.contract.phrases import counted, last_of
from llama405b.contract.resuming import ALL, CHANGES
from llama405b.contract.schema import (
    FP32_MASTERS,
    TARGETS,
    TRACKERS,
    Adapter,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Parallel,
    Tracking,
    Training,
    fields,
)
from llama405b.contract.suggestions import suggestion

MAX_BETA_BF16 = 0.99  # 1 - beta2 must be above half of BF16's step of 2^-7; at 0.999 the demo's loss was 2 % higher
ABOVE_ZERO = (  # other numbers may be 0
    "adapter.rank", "adapter.alpha",
    "data.seq_len", "training.micro_batch_size", "optimizer.lr", "optimizer.eps", "timeouts.load", "timeouts.step",
    "checkpoint.mtbf", "checkpoint.after_save_limit",
)  # fmt: skip
# What only fsdp1 takes, with what each is by default.
OF_FSDP1 = [
    (name, getattr(Parallel(), name)) for name in ("sharding_strategy", "backward_prefetch", "limit_all_gathers")
]
Fault = tuple[str, str]  # the setting, and a message that follows its name


def faults_of(config: Config) -> Iterator[Fault]:
    """Yield what is wrong with a configuration, before any rank is started."""
    yield from _out_of_range(config)
    yield from _of_model(config.model, config.parallel)
    yield from _of_adapter(config.adapter, config.parallel)
    yield from _of_kernels(config.model, config.parallel)
    yield from _of_data(config.data)
    yield from _of_training(config.training, config.optimizer)
    yield from _of_saving(config)
    yield from _of_evaluation(config)
    yield from _of_tracking(config.tracking)
    yield from _of_parallel(config.parallel)
    yield from _of_moments(config.parallel, config.optimizer)


def _out_of_range(config: Config) -> Iterator[Fault]:
    for key, type_, _, _ in fields():
        value = operator.attrgetter(key)(config)
        if type_ in (int, float) and value <= 0 and key in ABOVE_ZERO:
            yield key, f"{key} is {value}; it must be above 0"
        elif type_ in (int, float) and value < 0:
            yield key, f"{key} is {value}; it must be at least 0"


def _of_model(model: Model, parallel: Parallel) -> Iterator[Fault]:
    if not model.path:
        yield "model.path", "no model given; name a checkpoint directory or a preset"
    if model.attention not in ("auto", "sdpa", "eager") and parallel.numerics == "fp32":
        yield "model.attention", f"{model.attention} computes in BF16 only; use sdpa, or numerics other than fp32"
    if model.activations == "host" and model.activation_checkpointing == "none":
        yield "model.activations", "without activation checkpointing it would have no effect; leave it out, or use full"


def _of_kernels(model: Model, parallel: Parallel) -> Iterator[Fault]:
    if parallel.numerics == "fp8" and (parallel.by_fsdp1 or parallel.tp > 1):
        yield "parallel.numerics", "fp8 is for layers that FSDP2 alone shards; use fp32-master, or fsdp2 and tp 1"
    if parallel.numerics == "fp8" and model.fused:
        yield "model.fused", "it would compute the MLP in BF16; leave it out: with fp8, compile fuses the layers"
    if model.fused and parallel.tp > 1:
        yield "model.fused", "modules that tp splits stay as they are; leave it out, or use tp 1"
    if not model.compile:
        return
    if model.fused:
        yield "model.compile", "a compiled layer is fused as a whole; leave out fused or compile"
    if model.activation_checkpointing == "auto" or model.activation_checkpointing.startswith("operators"):
        yield (
            "model.compile",
            "in a compiled layer torch cannot tell operators apart; use activation_checkpointing full, every:N or none",
        )
    if parallel.by_fsdp1 or "LlamaDecoderLayer" not in parallel.wrap:
        yield (
            "model.compile",
            "FSDP's units must be whole layers; use fsdp2 and wrap LlamaDecoderLayer,Embedding, or leave it out",
        )
    if split := [name for name in ("tp", "cp") if getattr(parallel, name) > 1]:
        yield "model.compile", f"layers that {split[0]} splits are not compiled; leave it out, or use {split[0]} 1"


def _of_adapter(adapter: Adapter, parallel: Parallel) -> Iterator[Fault]:
    if not adapter.trains:
        for name, default in dataclasses.asdict(Adapter()).items():
            if getattr(adapter, name) != default:
                yield (
                    f"adapter.{name}",
                    "without an adapter it would have no effect; add --adapter.kind lora, or leave it out",
                )
        return
    if unknown := [name for name in adapter.targets if name not in TARGETS]:
        near = suggestion(unknown[0], TARGETS)
        yield (
            "adapter.targets",
            f"{unknown[0]!r} is no matrix of a decoder layer{near}; choose from {', '.join(TARGETS)}",
        )
    if not adapter.targets or len({*adapter.targets}) < len(adapter.targets):
        yield "adapter.targets", "there are none, or one is named twice; name each matrix once"
    if parallel.by_fsdp1:
        yield "adapter.kind", "fsdp1 keeps a unit's parameters in one piece, of which none is frozen alone; use fsdp2"
    if parallel.numerics == "fp8":
        yield "adapter.kind", "what FP8 computes has no adapters; use numerics fp32-master"
    if parallel.offload == "optimizer":
        yield (
            "parallel.offload",
            "of adapters there is little to keep in CPU memory; use none, or all, which keeps the frozen weights there, too",
        )


def _of_data(data: Data) -> Iterator[Fault]:
    if not data.paths:
        yield "data.paths", "no data given; name files, folders or globs"
    if data.fields and not _names_a_document(data.fields):
        yield (
            "data.fields",
            "fields name no document; write text=FIELD, or prompt=FIELD,completion=FIELD, or messages=FIELD[,tools=FIELD]",
        )
    if data.weights and len(data.weights) != len(data.paths):
        counts = f"{counted(len(data.weights), 'weight')} for {counted(len(data.paths), 'path')}"
        yield "data.weights", f"{counts}; give one for each"
    if not all(weight > 0 for weight in data.weights):
        yield "data.weights", "each weight must be above 0; leave that path out"
    if data.packing == "concatenated":
        one_text = "with packing concatenated documents are one text, which is split; leave it out, or use isolated"
        if data.documents == "whole":
            yield "data.documents", one_text
        if data.long_documents == "truncate":
            yield "data.long_documents", one_text


def _of_training(training: Training, optimizer: Optimizer) -> Iterator[Fault]:
    factor, betas = training.loss_spike_factor, list(optimizer.betas)
    if factor <= 1:
        yield "training.loss_spike_factor", f"training.loss_spike_factor is {factor:g}; use more than 1"
    if not (training.max_steps or training.epochs):
        yield "training.epochs", "max_steps and epochs are both 0; set one of them"
    if optimizer.min_lr > optimizer.lr:
        yield "optimizer.min_lr", f"min_lr {optimizer.min_lr} is above lr {optimizer.lr}; lower it"
    if optimizer.decay_steps and optimizer.decay != "wsd":
        yield "optimizer.decay_steps", f"with decay {optimizer.decay} it would have no effect; leave it out, or use wsd"
    if 0 < training.max_steps < optimizer.decay_steps:
        yield "optimizer.decay_steps", f"{optimizer.decay_steps} is more than max_steps, {training.max_steps}; lower it"
    for text in optimizer.groups:
        try:
            Group.read(text)
        except UserError as fault:
            yield "optimizer.groups", str(fault)
    if not all(0 <= beta < 1 for beta in betas):
        yield "optimizer.betas", f"betas are {betas}; each must be at least 0 and below 1"


def _of_saving(config: Config) -> Iterator[Fault]:
    saving = config.checkpoint
    saves = saving.cadence.saves
    if saves and saving.keep < LEAST_KEPT:
        yield (
            "checkpoint.keep",
            f"checkpoint.keep is {saving.keep}; keep at least {LEAST_KEPT}, so that one always verifies",
        )
    if saving.keep_best and not (config.evaluation.every and saves):
        yield (
            "checkpoint.keep_best",
            "nothing would be evaluated, or nothing saved; set evaluation.every and checkpoint.every",
        )
    if saving.after_save and not saves:
        yield "checkpoint.after_save", "checkpoint.every is 0, so nothing is saved; set it, or leave this out"
    if saving.delete_unsent and not saving.after_save:
        yield "checkpoint.delete_unsent", "without after_save it would have no effect; leave it out"
    if unknown := [name for name in saving.allow_changes if name not in (*CHANGES, ALL)]:
        near = suggestion(last_of(unknown), CHANGES)
        names = ", ".join((*CHANGES, ALL))
        yield "checkpoint.allow_changes", f"{last_of(unknown)!r} is not what a resume compares{near}; use {names}"
    if saving.replicas > 1:
        yield "checkpoint.replicas", "checkpoint.replicas is above 1; use 0 or 1"


def _of_evaluation(config: Config) -> Iterator[Fault]:
    evaluation = config.evaluation
    if evaluation.every and not (evaluation.paths or evaluation.fraction):
        yield "evaluation.every", "no data to evaluate on; set evaluation.paths or evaluation.fraction"
    if evaluation.paths and not evaluation.every:
        yield (
            "evaluation.every",
            "evaluation.every is 0, so evaluation.paths would not be used; set it to a number of steps",
        )
    if evaluation.prompts:
        if not evaluation.every:
            yield "evaluation.prompts", "evaluation.every is 0, so they would not be used; set it to a number of steps"
        if split := [name for name in ("tp", "cp", "pp") if getattr(config.parallel, name) > 1]:
            yield (
                "evaluation.prompts",
                f"they are continued where ranks have whole layers; leave them out, or use {split[0]} 1",
            )
        if not all(evaluation.prompts):
            yield "evaluation.prompts", "one is empty; remove it"
    elif evaluation.prompt_tokens != Evaluation().prompt_tokens:
        yield "evaluation.prompt_tokens", "without evaluation.prompts it would have no effect; leave it out"
    if evaluation.fraction > 0.5:
        yield "evaluation.fraction", f"fraction is {evaluation.fraction:g}; use at most 0.5"


def _of_tracking(tracking: Tracking) -> Iterator[Fault]:
    if unknown := [name for name in tracking.to if name not in TRACKERS]:
        yield (
            "tracking.to",
            f"{unknown[0]!r} is no tracker that is known{suggestion(unknown[0], TRACKERS)}; use {', '.join(TRACKERS)}",
        )
    for name, default in dataclasses.asdict(Tracking()).items():
        if name != "to" and "wandb" not in tracking.to and getattr(tracking, name) != default:
            yield f"tracking.{name}", "without W&B it would have no effect; add --tracking.to wandb, or leave it out"


def _of_parallel(parallel: Parallel) -> Iterator[Fault]:
    if parallel.by_fsdp1 and parallel.device == "cpu":
        yield "parallel.strategy", "torch does not support fsdp1 on CPU; use fsdp2"
    if parallel.offload == "optimizer" and parallel.by_fsdp1:
        yield "parallel.offload", "optimizer needs fsdp2; use it, or all"
    if parallel.offload == "optimizer" and parallel.numerics not in FP32_MASTERS:
        yield (
            "parallel.offload",
            "optimizer keeps FP32 weights in CPU memory and BF16 ones on the GPU; use all, or numerics fp32-master",
        )
    if parallel.by_fsdp1 and parallel.numerics == "bf16-stochastic":
        yield "parallel.numerics", "with fsdp1 weights have no elements to number; use fsdp2, or pure-bf16"
    yield from _of_axes(parallel)
    yield from _of_units(parallel)
    if not parallel.by_fsdp1:
        if parallel.forward_prefetch:
            yield "parallel.forward_prefetch", "with FSDP2 it would have no effect; use --parallel.prefetch 1, or fsdp1"
        for name, default in OF_FSDP1:
            if getattr(parallel, name) != default:
                yield f"parallel.{name}", "with FSDP2 it would have no effect; leave it out, or use fsdp1"


def _of_units(parallel: Parallel) -> Iterator[Fault]:
    """Of when FSDP gathers its units, and over which ranks it keeps them gathered."""
    for name in ("prefetch", "reshard_after_forward"):
        if getattr(parallel, name) and (parallel.by_fsdp1 or parallel.of_strategy.keeps_weights):
            yield (
                f"parallel.{name}",
                f"with strategy {parallel.strategy} it would have no effect; leave it out, or use fsdp2",
            )
    # Of units within a layer torch gathers ahead in the recomputation, too, and never frees that.
    if parallel.prefetch and "LlamaDecoderLayer" not in parallel.wrap:
        yield (
            "parallel.prefetch",
            "units within a layer would stay gathered; leave it out, or use wrap LlamaDecoderLayer,Embedding",
        )
    if parallel.prefetch and parallel.chunks > 1 and parallel.pp > 1:
        yield (
            "parallel.prefetch",
            "with the interleaved schedule the next unit is not the next to be used; leave it out, or use 1f1b",
        )
    if parallel.reshard_after_forward == 1:
        yield "parallel.reshard_after_forward", "one rank would keep all weights; use zero2, or at least 2"
    if parallel.reshard_after_forward and (split := [name for name in ("tp", "pp") if getattr(parallel, name) > 1]):
        yield (
            "parallel.reshard_after_forward",
            f"torch cannot reshard a model that {split[0]} splits; leave it out, or use {split[0]} 1",
        )


def _of_axes(parallel: Parallel) -> Iterator[Fault]:
    sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp")}
    if parallel.of_strategy.chosen:
        for name in ("dp_replicate", *sizes):
            if getattr(parallel, name) != getattr(Parallel(), name):
                yield (
                    f"parallel.{name}",
                    f"strategy {parallel.strategy} chooses it; leave it out, or use strategy fsdp2",
                )
    if parallel.pp == 1 and parallel.pp_schedule != Parallel().pp_schedule:
        yield "parallel.pp_schedule", "with pp 1 it would have no effect; leave it out, or use more stages"
    for name, size in sizes.items():
        if size < 1:
            yield f"parallel.{name}", f"parallel.{name} is {size}; it must be at least 1"
    if parallel.by_fsdp1 and (several := [name for name in ("dp_replicate", *sizes) if getattr(parallel, name) > 1]):
        yield f"parallel.{several[0]}", "with fsdp1 it would have no effect; leave it out, or use fsdp2"
    if parallel.offload != "none" and (parallel.dp_replicate > 1 or parallel.of_strategy.copies != "one"):
        yield (
            "parallel.offload",
            "with copies of the model torch may corrupt gradients that are offloaded (known bugs); use none, or strategy fsdp2 without "
            "dp_replicate",
        )


def _of_moments(parallel: Parallel, optimizer: Optimizer) -> Iterator[Fault]:
    if parallel.moments != "bf16":
        return
    key, beta2 = "parallel.moments", optimizer.betas[1]
    if not parallel.updates_on_cpu:
        yield key, "bf16 moments need offload optimizer or all, and FSDP2; set them, or use fp32"
    if parallel.in_bf16:
        yield (
            key,
            f"with numerics {parallel.numerics} the moments are BF16 already; leave it at fp32, or use numerics fp32-master",
        )
    if beta2 > MAX_BETA_BF16:
        what = f"a step changes second moments by less than BF16 resolves where beta2 is {beta2:g}"
        yield key, f"{what}; use fp32, or at most {MAX_BETA_BF16}"


def _names_a_document(names: Sequence[str]) -> bool:
    """Whether ``data.fields`` names all that a document needs, each once."""
    ours = sorted(name.partition("=")[0].strip() for name in names if name.partition("=")[2])
    return len(ours) == len(names) and ours in (
        ["text"],
        ["completion", "prompt"],
        ["messages"],
        ["messages", "tools"],
    )
