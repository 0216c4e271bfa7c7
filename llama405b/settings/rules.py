"""Rules for settings: which values are possible, alone and together, and hints for unknown names.

Each rule yields the setting that is wrong and what to do about it. Parameter groups (``optimizer.groups``) have a learning rate or
weight decay of their own, or are frozen. Suggestions for unknown flags and settings come from other programs' names, from what is not
supported, and from near misses. Knows settings alone: no model, ranks or files.
"""

import contextlib
import dataclasses
import datetime
import difflib
import fnmatch
import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from llama405b.contract.checkpoints import MIN_KEPT, SETTING_NAMES
from llama405b.contract.errors import UserError, fmt_if, last_or, pluralize
from llama405b.settings.foreign import find_flag
from llama405b.settings.schema import (
    ADAPTER_TARGETS,
    FP32_MASTERS,
    SETTING_TYPES,
    TRACKERS,
    TRAIN_ON_ROLES,
    Adapter,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Parallel,
    Tracking,
    Training,
    setting_fields,
)

GROUP_HINT = (
    'write a name pattern with lr_factor, weight_decay or both, like "model.embed_tokens.* lr_factor=0.1 weight_decay=0", '
    'or with frozen=true, like "model.embed_tokens.* frozen=true"'
)
GROUP_KEYS = ("lr_factor", "weight_decay")


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters whose names in the model's files match a shell pattern."""

    pattern: str
    lr_factor: float = 1.0  # times the learning rate of the step
    weight_decay: float | None = None  # None: the optimizer's, which skips vectors
    frozen: bool = False  # no gradient and no moments

    @classmethod
    def parse(cls, text: str) -> "ParameterGroup":
        """Parse ``PATTERN lr_factor=X weight_decay=Y``, or ``PATTERN frozen=true``.

        Raises:
            UserError: The text has another form.
        """
        pattern, *pairs = text.split() or [""]
        values: dict[str, float] = {}
        if pattern and [pair.lower() for pair in pairs] in (["frozen=true"], ["frozen=1"]):
            return cls(pattern, frozen=True)
        for pair in pairs:
            name, _, number = pair.partition("=")
            values[name] = _parse_number(number)
        if not (
            pattern
            and values.keys() <= {*GROUP_KEYS}
            and values
            and all(0 <= value < math.inf for value in values.values())
        ):
            raise UserError(f"optimizer.groups has {text!r}; {GROUP_HINT}")
        return cls(pattern, values.get("lr_factor", 1.0), values.get("weight_decay"))

    def matches(self, name: str) -> bool:
        """Return whether a parameter belongs to the group."""
        return fnmatch.fnmatchcase(name, self.pattern)


def find_group(groups: Iterable[ParameterGroup], name: str) -> ParameterGroup | None:
    """Return the first group that matches a parameter; None if no group does."""
    return next((group for group in groups if group.matches(name)), None)


def is_frozen(texts: Sequence[str], name: str) -> bool:
    """Return whether the groups, given as texts, freeze a parameter."""
    return bool(texts) and (find_group(map(ParameterGroup.parse, texts), name) or ParameterGroup(name)).frozen


def check_groups(texts: Sequence[str], names: Iterable[str], parallel: Parallel) -> None:
    """Refuse groups that match no parameter of the model, or that cannot be frozen.

    Raises:
        UserError: A group matches no parameter, every parameter is frozen, or FSDP1 would have to freeze some.
    """
    all_names = list(names)
    frozen = [name for name in all_names if is_frozen(texts, name)]
    problem = ""
    if len(frozen) == len(all_names):
        problem = "every parameter is frozen, so nothing would be trained; leave out a pattern"
    elif frozen and parallel.is_fsdp1:
        problem = "fsdp1 flattens a unit's parameters into one tensor and cannot freeze some of them; use fsdp2"
    if problem:
        raise UserError(f"--optimizer.groups: {problem}")
    for group in map(ParameterGroup.parse, texts):
        if not any(map(group.matches, all_names)):
            raise UserError(
                f"--optimizer.groups: {group.pattern!r} matches no parameter; names look like {all_names[0]}, {all_names[-1]}"
            )


def format_group(table: Mapping[str, object]) -> str:
    """Format a table of ``[[optimizer.groups]]`` as ``ParameterGroup.parse`` reads it."""
    return " ".join(
        [str(table.get("names", "")), *(f"{key}={value}" for key, value in table.items() if key != "names")]
    )


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


MIN_SIMILARITY = 0.8  # 0 to 1; below this a suggestion would be a guess
NO_FP16 = "FP16 needs loss scaling or it loses small gradients, and loss scaling is not supported; use fp32-master, which computes in BF16"
NO_QLORA = (
    "FSDP shards matrices by rows, which packed 4-bit blocks do not have, and an adapter trained on quantized weights would be merged "
    "into unquantized ones; use lora, with --parallel.offload all if the BF16 weights do not fit"
)
# Advice for values that a setting does not have.
VALUE_ADVICE = {
    **{f"adapter.kind {name}": NO_QLORA for name in ("qlora", "4bit", "nf4")},
    **{
        f"parallel.strategy {name}": f"use {name.lower()}"
        for name in ("Zero1", "Zero2", "Zero3", "DDP", "FSDP2", "HSDP")
    },
    "parallel.strategy ThreeD": "use 3d",
    **{f"parallel.numerics {name}": NO_FP16 for name in ("fp16", "float16", "half")},
    **{
        f"parallel.numerics {name}": "use fp32-master (BF16 with FP32 weights) or pure-bf16"
        for name in ("bf16", "bfloat16")
    },
}


OWN_NAMES = {key.rpartition(".")[2] for key in SETTING_TYPES}  # last parts of our settings' names


def foreign_advice(name: str) -> str:
    """Return what to use instead of another program's flag or setting, as a clause; '' if unknown."""
    normalized = _normalize(name)
    foreign = None if normalized.rpartition(".")[2] in OWN_NAMES else find_flag(normalized)
    return foreign.why if foreign and foreign.setting in ("", "!") else ""


def suggest_setting(name: str, settings: Collection[str], options: Iterable[str] = ()) -> str:
    """Return `` (did you mean 'optimizer.lr'?)`` for an unknown setting or option, or '' if nothing is near.

    The last part of a name counts more than its section, and an equal name more than a similar one. Similar names are searched only in
    the section of that name, if there is one.
    """
    normalized = _normalize(name)
    section, _, leaf = normalized.rpartition(".")
    by_last: dict[str, list[str]] = {}
    for key in settings:
        by_last.setdefault(key.rpartition(".")[2], []).append(key)
    by_option = {f"--{_normalize(option)}": [option] for option in options}
    foreign = find_flag(normalized)
    matches = (
        by_option.get(f"--{normalized}")
        or by_last.get(leaf)
        or [row.setting for row in [foreign] if row and row.setting in settings]
    )
    if not matches:
        similar = (
            difflib.get_close_matches(f"--{normalized}", by_option, 1, MIN_SIMILARITY) if normalized == leaf else []
        )
        matches = [option for flag in similar for option in by_option[flag]]
    if not matches:
        candidates = [key for key in settings if key.startswith(f"{section}.")] or list(settings)
        similar = difflib.get_close_matches(leaf, [key.rpartition(".")[2] for key in candidates], 1, MIN_SIMILARITY)
        matches = [key for key in candidates if key.rpartition(".")[2] in similar]
    return fmt_if(" (did you mean {}?)", " or ".join(map(repr, matches)))


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


ALL_CHANGES = "all"  # allow every change
STEPS, EPOCHS = "training.max_steps", "training.epochs"
COMPARED_SETTINGS = (
    *(name for name in SETTING_NAMES.values() if name != "adapter"),
    *(f"optimizer.{field.name}" for field in dataclasses.fields(Optimizer) if field.name != "kind"),
    STEPS,
    "data.template_date",
)


MAX_CUDA_CONNECTIONS = 32  # that CUDA takes
MAX_BETA_BF16 = 0.99  # 1 - beta2 must exceed half of BF16's step of 2^-7; at 0.999 the demo's loss was 2 % higher
ABOVE_ZERO = (  # other numbers may be 0
    "adapter.rank", "adapter.alpha",
    "data.seq_len", "training.micro_batch_size", "optimizer.lr", "optimizer.eps", "timeouts.load", "timeouts.step",
    "checkpoint.mtbf", "checkpoint.after_save_limit",
)  # fmt: skip
# Settings of fsdp1 alone, with their defaults.
FSDP1_DEFAULTS = [
    (name, getattr(Parallel(), name)) for name in ("sharding_strategy", "backward_prefetch", "limit_all_gathers")
]
Fault = tuple[str, str]  # the setting, and a message that follows its name


def find_faults(config: Config) -> Iterator[Fault]:
    """Yield every fault of a configuration that can be found without ranks."""
    yield from _check_ranges(config)
    yield from find_step_faults(config)
    yield from _check_data(config.data)
    yield from _check_training(config.training, config.optimizer)
    yield from _check_checkpoint(config)
    yield from _check_evaluation(config)
    yield from _check_tracking(config.tracking)


def find_step_faults(config: Config) -> Iterator[Fault]:
    """Yield the faults of what takes part in a step: model, adapter, optimizer, and how all is split."""
    yield from _check_model(config.model, config.parallel, config.adapter)
    yield from _check_adapter(config.adapter, config.parallel)
    yield from _check_kernels(config.model, config.parallel)
    yield from _check_parallel(config.parallel)
    yield from _check_moments(config.parallel, config.optimizer)
    yield from _check_optimizer(config.optimizer, config.parallel)


def _check_ranges(config: Config) -> Iterator[Fault]:
    for key, type_, _, _ in setting_fields():
        value = operator.attrgetter(key)(config)
        if type_ in (int, float) and value <= 0 and key in ABOVE_ZERO:
            yield key, f"{key} is {value}; it must be above 0"
        elif type_ in (int, float) and value < 0:
            yield key, f"{key} is {value}; it must be at least 0"


def _check_model(model: Model, parallel: Parallel, adapter: Adapter) -> Iterator[Fault]:
    if not model.path:
        yield "model.path", "no model given; name a checkpoint directory or a preset"
    if model.attention not in ("auto", "sdpa", "eager") and parallel.numerics == "fp32":
        yield "model.attention", f"{model.attention} computes in BF16 only; use sdpa, or numerics other than fp32"
    if model.resize_vocabulary and parallel.is_fsdp1:
        yield "model.resize_vocabulary", "fsdp1 loads the model exactly as its files store it; use fsdp2"
    if model.resize_vocabulary and adapter.is_enabled:
        yield (
            "model.resize_vocabulary",
            "adapters do not train embeddings, so new ones would stay untrained; leave one of the two out",
        )
    if model.activations == "host" and model.activation_checkpointing == "none":
        yield "model.activations", "no effect without activation checkpointing; leave it out, or use full"


def _check_kernels(model: Model, parallel: Parallel) -> Iterator[Fault]:
    if parallel.numerics == "fp8" and parallel.is_fsdp1:
        yield "parallel.numerics", "fp8 needs FSDP2; use fsdp2, or fp32-master"
    if parallel.numerics == "fp8" and model.fused == "true":
        yield "model.fused", "a fused MLP computes in BF16, not FP8; leave it out, as compile fuses FP8 layers"
    if not model.compile:
        return
    if model.fused == "true":
        yield "model.compile", "compile already fuses the whole layer; leave out fused or compile"
    if model.activation_checkpointing == "auto" or model.activation_checkpointing.startswith("operators"):
        yield (
            "model.compile",
            "in a compiled layer torch cannot tell operators apart; use activation_checkpointing full, every:N or none",
        )
    if parallel.is_fsdp1 or parallel.fsdp_unit != "layer":
        yield "model.compile", "FSDP's units must be whole layers; use fsdp2 and fsdp_unit layer, or leave it out"


def _check_adapter(adapter: Adapter, parallel: Parallel) -> Iterator[Fault]:
    if not adapter.is_enabled:
        for name, default in dataclasses.asdict(Adapter()).items():
            if getattr(adapter, name) != default:
                yield (
                    f"adapter.{name}",
                    "no effect without an adapter; add --adapter.kind lora, or leave it out",
                )
        return
    if unknown := [name for name in adapter.targets if name not in ADAPTER_TARGETS]:
        hint = suggest_setting(unknown[0], ADAPTER_TARGETS)
        yield (
            "adapter.targets",
            f"{unknown[0]!r} is not a linear layer of a decoder layer{hint}; choose from {', '.join(ADAPTER_TARGETS)}",
        )
    if not adapter.targets or len({*adapter.targets}) < len(adapter.targets):
        yield "adapter.targets", "the list is empty or names a layer twice; name each linear layer once"
    if parallel.is_fsdp1:
        yield (
            "adapter.kind",
            "fsdp1 flattens a unit's parameters into one tensor and cannot freeze some of them; use fsdp2",
        )
    if parallel.numerics == "fp8":
        yield "adapter.kind", "FP8 layers cannot have adapters; use numerics fp32-master"
    if parallel.offload == "optimizer":
        yield (
            "parallel.offload",
            "LoRA's optimizer state is small, so offload optimizer saves nothing; use none, or all, which also offloads the frozen weights",
        )


def _check_data(data: Data) -> Iterator[Fault]:
    if not data.paths:
        yield "data.paths", "no data given; name files, folders or globs"
    if data.fields and not _names_a_document(data.fields):
        yield (
            "data.fields",
            "the fields do not make up a document; write text=FIELD, or prompt=FIELD,completion=FIELD, or messages=FIELD[,tools=FIELD]",
        )
    if unknown := [role for role in data.train_on if role not in TRAIN_ON_ROLES]:
        hint = suggest_setting(unknown[0], TRAIN_ON_ROLES)
        yield "data.train_on", f"{unknown[0]!r} is not a role{hint}; choose from {', '.join(TRAIN_ON_ROLES)}"
    for argument in data.template_arguments:
        if not re.fullmatch(r"\w+=.*", argument, re.DOTALL):
            yield "data.template_arguments", f"{argument!r} has no value; write NAME=VALUE, like enable_thinking=false"
    if data.template_date and not _is_date(data.template_date):
        yield "data.template_date", f"{data.template_date!r} is not a date; write it like 2026-11-28"
    if data.weights and len(data.weights) != len(data.paths):
        counts = f"{pluralize(len(data.weights), 'weight')} for {pluralize(len(data.paths), 'path')}"
        yield "data.weights", f"{counts}; give one for each"
    if not all(weight > 0 for weight in data.weights):
        yield "data.weights", "each weight must be above 0; leave out the paths that should not be read"
    if data.packing == "concatenated":
        one_text = (
            "packing concatenated joins the documents into one text and splits that; leave it out, or use isolated"
        )
        if data.documents == "whole":
            yield "data.documents", one_text
        if data.long_documents == "truncate":
            yield "data.long_documents", one_text


def _is_date(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return datetime.date.fromisoformat(text).isoformat() == text
    return False


def _check_training(training: Training, optimizer: Optimizer) -> Iterator[Fault]:
    factor, betas = training.loss_spike_factor, list(optimizer.betas)
    if optimizer.warmup > 1 and optimizer.warmup % 1:
        yield (
            "optimizer.warmup",
            f"optimizer.warmup is {optimizer.warmup:g}; use whole steps, or a fraction of the run's steps below 1",
        )
    if factor <= 1:
        yield "training.loss_spike_factor", f"training.loss_spike_factor is {factor:g}; use more than 1"
    if not (training.max_steps or training.epochs):
        yield "training.epochs", "max_steps and epochs are both 0; set one of them"
    if optimizer.min_lr > optimizer.lr:
        yield "optimizer.min_lr", f"min_lr {optimizer.min_lr} is above lr {optimizer.lr}; lower it"
    if optimizer.decay_steps and optimizer.decay != "wsd":
        yield "optimizer.decay_steps", f"no effect with decay {optimizer.decay}; leave it out, or use wsd"
    if 0 < training.max_steps < optimizer.decay_steps:
        yield "optimizer.decay_steps", f"{optimizer.decay_steps} is more than max_steps, {training.max_steps}; lower it"
    for text in optimizer.groups:
        try:
            ParameterGroup.parse(text)
        except UserError as fault:
            yield "optimizer.groups", str(fault)
    if not all(0 <= beta < 1 for beta in betas):
        yield "optimizer.betas", f"betas are {betas}; each must be at least 0 and below 1"
    if optimizer.momentum >= 1:
        yield "optimizer.momentum", f"optimizer.momentum is {optimizer.momentum:g}; it must be below 1"


def _check_checkpoint(config: Config) -> Iterator[Fault]:
    checkpoint = config.checkpoint
    is_saving = checkpoint.cadence.is_enabled
    if is_saving and checkpoint.keep < MIN_KEPT:
        yield (
            "checkpoint.keep",
            f"checkpoint.keep is {checkpoint.keep}; keep at least {MIN_KEPT}, so that one always verifies",
        )
    if checkpoint.keep_best and not (config.evaluation.is_enabled and is_saving):
        yield (
            "checkpoint.keep_best",
            "the run would not evaluate, or not save; set evaluation.every and checkpoint.every",
        )
    if checkpoint.after_save and not is_saving:
        yield "checkpoint.after_save", "checkpoint.every is 0, so nothing is saved; set that, or leave after_save out"
    if checkpoint.delete_unsent and not checkpoint.after_save:
        yield "checkpoint.delete_unsent", "no effect without after_save; leave it out"
    if unknown := [name for name in checkpoint.allow_changes if name not in (*COMPARED_SETTINGS, ALL_CHANGES)]:
        hint = suggest_setting(last_or(unknown), COMPARED_SETTINGS)
        names = ", ".join((*COMPARED_SETTINGS, ALL_CHANGES))
        yield (
            "checkpoint.allow_changes",
            f"{last_or(unknown)!r} is not a setting that a resume compares{hint}; use {names}",
        )
    if checkpoint.replicas > 1:
        yield "checkpoint.replicas", "checkpoint.replicas is above 1; use 0 or 1"


def _check_evaluation(config: Config) -> Iterator[Fault]:
    evaluation = config.evaluation
    if evaluation.is_enabled and not (evaluation.paths or evaluation.fraction):
        yield "evaluation.every", "no data to evaluate on; set evaluation.paths or evaluation.fraction"
    if evaluation.paths and not evaluation.is_enabled:
        yield (
            "evaluation.every",
            "evaluation.every is 0, so evaluation.paths would not be used; set it to a number of steps",
        )
    if evaluation.prompts:
        if not evaluation.is_enabled:
            yield (
                "evaluation.prompts",
                "evaluation.every is 0, so prompts would not be used; set it to a number of steps",
            )
        if split := [name for name in ("tp", "cp", "pp") if getattr(config.parallel, name) > 1]:
            yield (
                "evaluation.prompts",
                f"prompts need every layer on every rank; leave them out, or use {split[0]} 1",
            )
        if not all(evaluation.prompts):
            yield "evaluation.prompts", "a prompt is empty; remove it"
    elif evaluation.prompt_tokens != Evaluation().prompt_tokens:
        yield "evaluation.prompt_tokens", "no effect without evaluation.prompts; leave it out"
    if evaluation.fraction > 0.5:
        yield "evaluation.fraction", f"fraction is {evaluation.fraction:g}; use at most 0.5"


def _check_tracking(tracking: Tracking) -> Iterator[Fault]:
    if unknown := [name for name in tracking.to if name not in TRACKERS]:
        yield (
            "tracking.to",
            f"{unknown[0]!r} is not a known tracker{suggest_setting(unknown[0], TRACKERS)}; use {', '.join(TRACKERS)}",
        )
    for name, default in dataclasses.asdict(Tracking()).items():
        if name != "to" and "wandb" not in tracking.to and getattr(tracking, name) != default:
            yield f"tracking.{name}", "no effect without W&B; add --tracking.to wandb, or leave it out"


def _check_parallel(parallel: Parallel) -> Iterator[Fault]:
    if parallel.is_fsdp1 and parallel.device == "cpu":
        yield "parallel.strategy", "torch does not support fsdp1 on CPU; use fsdp2"
    if parallel.offload == "optimizer" and parallel.is_fsdp1:
        yield "parallel.offload", "optimizer needs fsdp2; use it, or all"
    if parallel.offload == "optimizer" and parallel.numerics not in FP32_MASTERS:
        yield (
            "parallel.offload",
            "optimizer keeps FP32 weights in CPU memory and BF16 ones on the GPU; use all, or numerics fp32-master",
        )
    if parallel.is_fsdp1 and parallel.numerics == "bf16-stochastic":
        yield (
            "parallel.numerics",
            "stochastic rounding numbers each weight's elements, which fsdp1 flattens; use fsdp2, or pure-bf16",
        )
    if parallel.cuda_connections > MAX_CUDA_CONNECTIONS:
        yield (
            "parallel.cuda_connections",
            f"parallel.cuda_connections is {parallel.cuda_connections}; use at most {MAX_CUDA_CONNECTIONS}",
        )
    yield from _check_axes(parallel)
    yield from _check_units(parallel)
    if not parallel.is_fsdp1:
        if parallel.forward_prefetch:
            yield "parallel.forward_prefetch", "no effect with FSDP2; use --parallel.prefetch 1, or fsdp1"
        for name, default in FSDP1_DEFAULTS:
            if getattr(parallel, name) != default:
                yield f"parallel.{name}", "no effect with FSDP2; leave it out, or use fsdp1"


def _check_units(parallel: Parallel) -> Iterator[Fault]:
    """Check when FSDP gathers its units, and over which ranks it keeps them gathered."""
    for name in ("prefetch", "reshard_after_forward"):
        if getattr(parallel, name) and (parallel.is_fsdp1 or parallel.strategy_spec.keeps_weights_gathered):
            yield (
                f"parallel.{name}",
                f"no effect with strategy {parallel.strategy}; leave it out, or use fsdp2",
            )
    # torch also prefetches units within a layer during recomputation, and never frees those.
    if parallel.prefetch and parallel.fsdp_unit != "layer":
        yield "parallel.prefetch", "units within a layer would stay gathered; leave it out, or use fsdp_unit layer"
    if parallel.prefetch and parallel.virtual_stages > 1 and parallel.pp > 1:
        yield (
            "parallel.prefetch",
            "the interleaved schedule does not use units in order; leave it out, or use 1f1b",
        )
    if parallel.reshard_after_forward == 1:
        yield "parallel.reshard_after_forward", "one rank would keep all weights; use zero2, or at least 2"
    if parallel.reshard_after_forward and (split := [name for name in ("tp", "pp") if getattr(parallel, name) > 1]):
        yield (
            "parallel.reshard_after_forward",
            f"torch cannot reshard a model that {split[0]} splits; leave it out, or use {split[0]} 1",
        )


def _check_axes(parallel: Parallel) -> Iterator[Fault]:
    sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp")}
    if parallel.strategy_spec.is_auto:
        for name in ("dp_replicate", *sizes):
            if getattr(parallel, name) != getattr(Parallel(), name):
                yield (
                    f"parallel.{name}",
                    f"strategy {parallel.strategy} chooses it; leave it out, or use strategy fsdp2",
                )
    if parallel.pp == 1 and parallel.pp_schedule != Parallel().pp_schedule:
        yield "parallel.pp_schedule", "no effect with pp 1; leave it out, or use more stages"
    for name, size in sizes.items():
        if size < 1:
            yield f"parallel.{name}", f"parallel.{name} is {size}; it must be at least 1"
    if parallel.is_fsdp1 and (split_axes := [name for name in ("dp_replicate", *sizes) if getattr(parallel, name) > 1]):
        yield f"parallel.{split_axes[0]}", "no effect with fsdp1; leave it out, or use fsdp2"
    if parallel.offload != "none" and (parallel.dp_replicate > 1 or parallel.strategy_spec.copies != "one"):
        yield (
            "parallel.offload",
            "torch may corrupt gradients that are offloaded if the model has copies (known bugs); use none, or strategy fsdp2 without "
            "dp_replicate",
        )


def _check_moments(parallel: Parallel, optimizer: Optimizer) -> Iterator[Fault]:
    if parallel.moments != "bf16":
        return
    key, beta2 = "parallel.moments", optimizer.betas[1]
    if not parallel.updates_on_cpu:
        yield key, "bf16 moments need offload optimizer or all, and FSDP2; set them, or use fp32"
    if parallel.is_bf16:
        yield (
            key,
            f"the moments are already BF16 with numerics {parallel.numerics}; use fp32 here, or numerics fp32-master",
        )
    if beta2 > MAX_BETA_BF16:
        reason = f"a step changes second moments by less than BF16 resolves where beta2 is {beta2:g}"
        yield key, f"{reason}; use fp32, or at most {MAX_BETA_BF16}"


def _check_optimizer(optimizer: Optimizer, parallel: Parallel) -> Iterator[Fault]:
    kind = optimizer.kind
    if not optimizer.spec.rest:
        return
    if parallel.tp > 1:
        yield (
            "parallel.tp",
            f"optimizer.kind {kind} needs whole matrices, which tp {parallel.tp} splits; use tp 1, or adamw",
        )
    if parallel.offload != "none":
        yield "parallel.offload", f"optimizer.kind {kind} updates on the device; use none, or adamw"
    if parallel.is_fsdp1:
        yield "parallel.strategy", f"optimizer.kind {kind} needs matrices, which fsdp1 flattens; use fsdp2, or adamw"
    if parallel.numerics == "bf16-stochastic":
        yield "parallel.numerics", f"optimizer.kind {kind} does not round stochastically; use pure-bf16, or adamw"


def _names_a_document(names: Sequence[str]) -> bool:
    """Return whether ``data.fields`` names everything that a document needs, each once."""
    keys = sorted(name.partition("=")[0].strip() for name in names if name.partition("=")[2])
    return len(keys) == len(names) and keys in (
        ["text"],
        ["completion", "prompt"],
        ["messages"],
        ["messages", "tools"],
    )
