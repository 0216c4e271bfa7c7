"""Describe a run on some number of ranks: what each rank holds, computes, gathers and shards. Pure.

A rank computes some of the layers, and of each matrix the part that ``tp`` leaves it. The module knows what a parameter takes where, and
what FSDP gathers and shards. Pinned memory: torch rounds blocks up to powers of two, 19 % for 405B's shards on 64 ranks.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Literal

from llama405b.contract.errors import STAGING_SHARE
from llama405b.settings.axes import DP_AXES, FULL_RECOMPUTE, SHARD_AXES, Axes, Recompute
from llama405b.settings.choices import OPTIMIZERS, FsdpUnit, OptimizerName, OptimizerSpec
from llama405b.settings.schema import (
    BF16_NUMERICS,
    COMPUTE_BYTES,
    STATE_BYTES,
    Activations,
    Adapter,
    Checkpoint,
    Config,
    Data,
    LossMode,
    Moments,
    Numerics,
    Offload,
    Parallel,
    PipelineSchedule,
    moment_bytes,
)
from llama405b.spec.adapters import lora_shapes, moments_per_parameter, n_trained_parameters
from llama405b.spec.models import EMBEDDING, HEAD, Llama
from llama405b.spec.rules import InFlight, find_in_flight
from llama405b.spec.tensors import split_layers

NO_ADAPTER = Adapter()
FINAL_NORM = "model.norm.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class StageSpec:
    """What a rank computes in one go: all its layers, or one stage of an interleaved pipeline."""

    llama: Llama  # its layers, and its share of heads, inner features and vocabulary
    has_embedding: bool = True  # whether it begins with that
    has_head: bool = True  # whether it ends with that, and its norm

    @property
    def non_layer_names(self) -> list[str]:
        """Names of the parameters outside layers."""
        return [EMBEDDING] * self.has_embedding + [FINAL_NORM, *[HEAD] * (not self.llama.tied)] * self.has_head


def build_stage_specs(llama: Llama, axes: Axes, stage: int, virtual_stages: int = 1) -> tuple[StageSpec, ...]:
    """Return what a rank of this place along ``pp`` computes, one after the other; ``virtual_stages``: stages of each rank."""
    local = dataclasses.replace(
        llama,
        heads=llama.heads // axes.tp,
        kv_heads=llama.kv_heads // axes.tp,
        intermediate=llama.intermediate // axes.tp,
        vocab=llama.vocab // axes.tp,
    )
    if axes.pp == 1:
        return (StageSpec(local),)
    layers = layers_per_stage(llama, axes.pp * virtual_stages)
    return tuple(
        StageSpec(dataclasses.replace(local, layers=layers[index]), index == 0, index == len(layers) - 1)
        for index in range(stage, len(layers), axes.pp)
    )


@functools.lru_cache(64)
def layers_per_stage(llama: Llama, n_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has."""
    return tuple(len(stage) for stage in split_layers(llama.tensors(), n_stages))


@dataclasses.dataclass(frozen=True, slots=True)
class UnitSizes:
    """Numbers of elements of what FSDP gathers in one piece."""

    attention: int
    mlp: int
    norms: int  # of a layer
    embedding: int
    head: int  # with the last norm; 0: the embedding is the head

    @classmethod
    def from_spec(cls, spec: StageSpec, adapter: Adapter = NO_ADAPTER) -> "UnitSizes":
        """Count the elements of a stage, with its adapters."""
        layer_sizes = {name: math.prod(shape) for name, shape in layer_shapes(spec.llama).items()}
        non_layer_sizes = {name: math.prod(shape) for name, shape in non_layer_shapes(spec).items()}
        tied = spec.llama.tied
        adapter_sizes = cls.from_adapter(spec, adapter)
        return cls(
            attention=adapter_sizes.attention
            + sum(size for name, size in layer_sizes.items() if ".self_attn." in name),
            mlp=adapter_sizes.mlp + sum(size for name, size in layer_sizes.items() if ".mlp." in name),
            norms=sum(size for name, size in layer_sizes.items() if "layernorm" in name),
            embedding=sum(non_layer_sizes.values()) if tied else non_layer_sizes.pop(EMBEDDING, 0),
            head=0 if tied else sum(non_layer_sizes.values()),
        )

    @classmethod
    def from_adapter(cls, spec: StageSpec, adapter: Adapter) -> "UnitSizes":
        """Count the elements of adapters only."""
        layer_sizes = {name: math.prod(shape) for name, shape in layer_adapter_shapes(spec, adapter).items()}
        by_block = {
            block: sum(size for name, size in layer_sizes.items() if f".{block}." in name)
            for block in ("self_attn", "mlp")
        }
        return cls(attention=by_block["self_attn"], mlp=by_block["mlp"], norms=0, embedding=0, head=0)

    @classmethod
    def from_trained(cls, spec: StageSpec, adapter: Adapter) -> "UnitSizes":
        """Count the elements that take gradients."""
        return cls.from_adapter(spec, adapter) if adapter.is_enabled else cls.from_spec(spec)

    @property
    def layer(self) -> int:
        """Elements of a decoder layer."""
        return self.attention + self.mlp + self.norms


@functools.lru_cache(256)
def _one_layer_shapes(llama: Llama) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes, of one layer alone."""
    return dataclasses.replace(llama, layers=1).tensors()


def layer_shapes(llama: Llama) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's parameters."""
    return {name: shape for name, shape in _one_layer_shapes(llama).items() if name.startswith("model.layers.")}


def non_layer_shapes(spec: StageSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters outside layers."""
    return {name: _one_layer_shapes(spec.llama)[name] for name in spec.non_layer_names}


def layer_adapter_shapes(spec: StageSpec, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's adapters."""
    return lora_shapes(dataclasses.replace(spec.llama, layers=1), adapter)


def shard_elements(spec: StageSpec, shards: int) -> int:
    """Return how many elements a rank keeps of all parameters but adapters: FSDP2 shards the first dimension, and pads it."""
    return _sharded_elements(non_layer_shapes(spec).values(), shards) + spec.llama.layers * _sharded_elements(
        layer_shapes(spec.llama).values(), shards
    )


def trained_elements(spec: StageSpec, shards: int, adapter: Adapter) -> int:
    """Return how many elements that take gradients a rank keeps."""
    if not adapter.is_enabled:
        return shard_elements(spec, shards)
    return spec.llama.layers * _sharded_elements(layer_adapter_shapes(spec, adapter).values(), shards)


def _sharded_elements(shapes: Iterable[tuple[int, ...]], shards: int) -> int:
    return sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes)


def norm_elements(spec: StageSpec, shards: int) -> int:
    """Return how many elements a rank keeps of all norms."""
    per_layer = sum(math.ceil(size / shards) for name, (size, *_) in layer_shapes(spec.llama).items() if "norm" in name)
    return spec.llama.layers * per_layer + spec.has_head * math.ceil(spec.llama.hidden / shards)


def rank_elements(llama: Llama, axes: Axes, rank: int, virtual_stages: int = 1) -> int:
    """Return the elements a rank keeps of all parameters, with the rows that FSDP2 pads.

    ``virtual_stages``: see ``build_stage_specs``.
    """
    specs = build_stage_specs(llama, axes, axes.coordinate(rank, ("pp",)).rank, virtual_stages)
    return sum(shard_elements(spec, axes.size(SHARD_AXES)) for spec in specs)


RANKS_PER_HOST = 8
PINNED_FACTOR = 1.19  # gradients, which torch pins in blocks of powers of two; all else is pinned as large as it is
STATE_KINDS = ("parameters", "gradients", "moments")
IN_TRANSFER = "on their way"  # of a unit at a time, gradients and weights
LAYER_INPUTS = "layer inputs"
PINNED_KINDS = {"optimizer": ("gradients", IN_TRANSFER), "all": ("parameters", "gradients")}  # what crosses to GPUs
FP32_NORMS = "norms in FP32"  # their masters, and what their moments take more
SEARCHED_SETTINGS = {  # of fields of ``PredictedRun``
    "offload": "parallel.offload", "numerics": "parallel.numerics", "moments": "parallel.moments",
    "fsdp_unit": "parallel.fsdp_unit", "fsdp_embedding": "parallel.fsdp_embedding", "prefetch": "parallel.prefetch",
    "kept_by": "parallel.reshard_after_forward", "tp": "parallel.tp", "cp": "parallel.cp", "pp": "parallel.pp",
    "pp_schedule": "parallel.pp_schedule", "loss": "model.loss", "activations": "model.activations",
    "compiled": "model.compile", "fused": "model.fused", "seq_len": "data.seq_len",
    "micro_batch": "training.micro_batch_size", "optimizer": "optimizer.kind",
}  # fmt: skip
FIXED_SETTINGS = {
    "global_batch": "training.global_batch_size", "keep": "checkpoint.keep", "attention": "model.attention",
    "packing": "data.packing", "every": "checkpoint.every",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedRun:
    """A run as the predictions take it: a model, its settings and a number of ranks."""

    llama: Llama
    numerics: Numerics
    offload: Offload
    world: int
    seq_len: int = 4096
    micro_batch: int = 1
    global_batch: int = 64
    keep: int = 2
    overlap: bool = True  # with offload: the update runs under the next forward
    moments: Moments = "fp32"
    fsdp_unit: FsdpUnit = "layer"
    fsdp_embedding: bool = True
    ranks_per_host: int = RANKS_PER_HOST
    mtbf_s: float = Checkpoint().mtbf * 3600  # between failures of one rank
    attention: str = "auto"
    packing: str = Data().packing
    every: str = Checkpoint().every
    staging_bytes: int | None = None  # of a host, for copies of what is saved; None: as much as is free
    dp_shard: int = 0  # 0: all ranks that the other axes leave, so one copy of the model; fewer: several
    tp: int = 1
    cp: int = 1
    pp: int = 1
    pp_schedule: PipelineSchedule = Parallel().pp_schedule
    keeps_weights: bool = False  # see ``Strategy``
    reduces_each: bool = True
    loss: LossMode = "full"
    recompute: Recompute = FULL_RECOMPUTE
    activations: Activations = "device"
    compiled: bool = False  # memory is taken as that without
    fused: bool = False  # norms and MLPs
    prefetch: int = 0  # FSDP units that are gathered ahead; 0: one, in the backward
    kept_by: int = 0  # ranks that keep a unit gathered between forward and backward; 0: none do
    adapter: Adapter = NO_ADAPTER  # what alone is trained
    optimizer: OptimizerName = "adamw"

    @classmethod
    def from_config(
        cls, llama: Llama, config: Config, world: int, ranks_per_host: int = RANKS_PER_HOST, axes: Axes | None = None
    ) -> "PredictedRun":
        """Return what a configuration trains on ``world`` ranks; ``axes``: their mesh; None: that of the settings.

        Raises:
            UserError: The settings make no mesh of so many ranks.
        """
        axes, spec = axes or Axes.from_parallel(config.parallel, world, ranks_per_host), config.parallel.strategy_spec
        settings = (SEARCHED_SETTINGS | FIXED_SETTINGS).items()
        return cls(
            llama=llama, world=world, ranks_per_host=ranks_per_host, mtbf_s=config.checkpoint.mtbf * 3600,
            overlap=config.parallel.overlap and not config.parallel.is_fsdp1, staging_bytes=config.checkpoint.staging_bytes,
            dp_shard=axes.dp_shard if axes.dp_replicate > 1 else 0, keeps_weights=spec.keeps_weights_gathered,
            reduces_each=spec.reduces_every_microbatch, adapter=config.adapter,
            recompute=Recompute.parse(config.model.activation_checkpointing),
            **{field: operator.attrgetter(name)(config) for field, name in settings} | {"fused": config.fuses(llama.is_fusible)},
        )  # fmt: skip

    @property
    def axes(self) -> Axes:
        """The mesh of all ranks."""
        data = max(1, self.world // (self.pp * self.cp * self.tp))
        shards = self.dp_shard or data
        return Axes(shards, self.pp, data // shards, self.cp, self.tp)

    def apply_to(self, requested: Config) -> Config:
        """Return the requested settings with those of this run: what the trainer would be given."""
        spec = requested.parallel.strategy_spec
        strategy = requested.parallel.strategy
        is_same = (self.keeps_weights, self.reduces_each) == (
            spec.keeps_weights_gathered,
            spec.reduces_every_microbatch,
        )
        if not is_same or (spec.copies != "one" and self.axes.dp_replicate == 1):
            strategy = "zero2" if self.reduces_each else "zero1"
            if not self.keeps_weights:
                strategy = "fsdp2"
        copies = self.axes.dp_replicate if strategy != "ddp" else 0
        sections: dict[str, dict[str, object]] = collections.defaultdict(dict)
        for field, name in SEARCHED_SETTINGS.items():
            section, _, key = name.partition(".")
            sections[section][key] = getattr(self, field)
        sections["parallel"] |= {"strategy": strategy, "dp_replicate": copies if copies > 1 else 0}
        sections["model"]["activation_checkpointing"] = str(self.recompute)
        sections["model"]["fused"] = "auto"
        changed = {name: dataclasses.replace(getattr(requested, name), **values) for name, values in sections.items()}
        config = dataclasses.replace(requested, adapter=self.adapter, **changed)
        if requested.model.fused == "auto" and config.fuses(self.llama.is_fusible) == self.fused:
            return config
        fused: Literal["true", "false"] = "true" if self.fused else "false"
        return dataclasses.replace(config, model=dataclasses.replace(config.model, fused=fused))

    @property
    def shards(self) -> int:
        """Ranks among which FSDP shards what they all compute."""
        return self.axes.size(SHARD_AXES)

    @property
    def dp(self) -> int:
        """Ranks that split the batch."""
        return self.axes.size(DP_AXES)

    @property
    def is_split(self) -> bool:
        """Whether ranks split more than the batch and the parameters."""
        return self.world != self.dp

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages of each rank."""
        return 2 if self.pp_schedule == "interleaved" else 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch in a rank's matrices: with ``cp`` its part of the sequences."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a micro-batch's hidden states between layers, as a rank has them."""
        return self.compute_bytes * self.tokens // self.tp * self.llama.hidden

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's input, as a rank has it: (B, S, h)."""
        return self.micro_batch, self.seq_len // (self.cp * self.tp), self.llama.hidden

    def inputs_on_host(self, stage: int) -> int:
        """Return how many inputs of layers wait in CPU memory at most, of a rank of this place along ``pp``."""
        if self.activations == "device":
            return 0
        kinds_by_part = [self.recompute.layer_kinds(spec.llama.layers) for spec in self.stage_specs(stage)]
        kept_counts = [sum(kind != "none" for kind in layer_kinds) for layer_kinds in kinds_by_part]
        return max(
            sum(count * n for count, n in zip(state.waiting, kept_counts, strict=True))
            + kept_counts[state.virtual_stage]
            for state in self.in_flight(stage)
        )

    def stage_specs(self, stage: int) -> tuple[StageSpec, ...]:
        """Return the stages that a rank at this place along ``pp`` computes."""
        return build_stage_specs(self.llama, self.axes, stage, self.virtual_stages)

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each pipeline stage; (): there is no pipeline."""
        return layers_per_stage(self.llama, self.pp * self.virtual_stages) if self.pp > 1 else ()

    def in_flight(self, stage: int) -> frozenset[InFlight]:
        """Return which micro-batches wait for their backward there while another is computed."""
        if self.pp > 1:
            return find_in_flight(self.pp_schedule, self.pp, self.virtual_stages, stage, self.grad_accum_steps)
        return frozenset({InFlight(0, (0,), (self.accumulates,))})

    def stage_elements(self, stage: int) -> int:
        """Return how many elements a rank there keeps of all parameters but adapters."""
        return sum(shard_elements(spec, self.shards) for spec in self.stage_specs(stage))

    @property
    def trained_parameters(self) -> int:
        """Parameters that take gradients."""
        return n_trained_parameters(self.llama, self.adapter)

    @property
    def states_bytes(self) -> float:
        """Bytes per model parameter that stay on a GPU between steps."""
        return self.frozen_bytes + sum(self.shard_bytes.values()) * self.trained_parameters / self.llama.parameters

    @property
    def frozen_bytes(self) -> int:
        """Bytes of a GPU that a frozen parameter takes, with adapters."""
        return self.compute_bytes if self.adapter.is_enabled and self.offload != "all" else 0

    @property
    def hosts(self) -> int:
        """Hosts, or one with fewer ranks."""
        return max(1, self.world // self.ranks_per_host)

    @property
    def has_sublayer_units(self) -> bool:
        """Whether attention and MLP are FSDP units, instead of the decoder layer."""
        return self.fsdp_unit == "sublayer"

    @property
    def grad_accum_steps(self) -> int:
        """Forwards of each rank in a step."""
        return max(1, -(-self.global_batch // (self.micro_batch * self.dp)))

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches, so that later ones add to the gradients of earlier ones."""
        return self.grad_accum_steps > 1

    @property
    def reuses_gradient_memory(self) -> bool:
        """Whether the next forward reuses the memory of gradients."""
        return self.offload == "none" and not self.accumulates

    @property
    def has_separate_gradient_sum(self) -> bool:
        """Whether host memory holds the sum of gradients as well as those of the next micro-batch."""
        is_separate = self.overlap or self.moments == "bf16"
        return self.offload == "all" and is_separate and self.accumulates

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation, and of a weight that was gathered."""
        return COMPUTE_BYTES[self.numerics]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient, as it is reduced."""
        return STATE_BYTES[self.numerics]

    @property
    def norm_bytes(self) -> int:
        """Bytes of a GPU that a norm's parameter takes beyond the others'."""
        return self.wider_norm_bytes * (self.offload == "none")

    @property
    def wider_norm_bytes(self) -> int:
        """Bytes of a norm's parameter, wherever it is, beyond the others': its FP32 master, and moments as wide."""
        has_masters = self.numerics in BF16_NUMERICS and not self.adapter.is_enabled
        return (4 + 2 * len(self.vector_optimizer.moments)) * has_masters

    @property
    def vector_optimizer(self) -> OptimizerSpec:
        """What updates norms."""
        spec = OPTIMIZERS[self.optimizer]
        return OPTIMIZERS[spec.rest] if spec.rest else spec

    @property
    def n_moments(self) -> float:
        """Moments of a parameter; where some have more than others, their mean."""
        return moments_per_parameter(self.llama, self.adapter, self.optimizer)

    @property
    def update_flops(self) -> float:
        """FLOPs of an update: of a matrix optimizer, five steps of three products of each matrix of a layer, with one copy of each."""
        if not OPTIMIZERS[self.optimizer].rest:
            return 0.0
        shapes = (layer_adapter_shapes(StageSpec(self.llama), self.adapter) or layer_shapes(self.llama)).values()
        sides = [sorted(shape) for shape in shapes if len(shape) == 2]
        return self.llama.layers * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)

    @property
    def shard_bytes(self) -> dict[str, float]:
        """Bytes per parameter that each kind of state takes on a GPU."""
        sizes = {
            "none": (self.weight_bytes, self.gradient_bytes, self.moment_bytes),
            "optimizer": (2, 0, 0),
            "all": (0, 0, 0),
        }[self.offload]
        return dict(zip(STATE_KINDS, sizes, strict=True))

    @property
    def weight_bytes(self) -> int:
        """Bytes of a parameter as it is kept."""
        return STATE_BYTES[self.numerics]

    @property
    def moment_bytes(self) -> float:
        """Bytes of a parameter's moments."""
        return self.n_moments * moment_bytes(self.numerics, self.moments)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint on disk, over all ranks."""
        master = 2 * (self.wider_norm_bytes > 0)  # a checkpoint has it in place of the weight
        norms = (self.wider_norm_bytes - master) * norm_elements(StageSpec(self.llama), 1)
        return math.ceil((self.weight_bytes + self.moment_bytes) * self.trained_parameters) + norms

    @property
    def host_bytes(self) -> dict[str, float]:
        """Bytes of each kind in a host's memory, as torch pins them."""
        weight, gradient = self.weight_bytes, self.gradient_bytes
        sizes = {
            "none": (0.0, 0.0, 0.0),
            "optimizer": (weight, gradient, self.moment_bytes),
            "all": (weight, gradient * (1 + self.has_separate_gradient_sum) * PINNED_FACTOR, self.moment_bytes),
        }[self.offload]
        share = self.trained_parameters / self.llama.parameters
        by_kind = {
            name: size * share * self.host_elements for name, size in zip(STATE_KINDS, sizes, strict=True) if size
        }
        if self.adapter.is_enabled and self.offload == "all":
            by_kind["parameters"] += self.compute_bytes * self.host_elements
        norms = self.wider_norm_bytes * norm_elements(StageSpec(self.llama), 1) / self.hosts
        inputs = self.hidden_bytes * max(self.inputs_on_host(stage) for stage in range(self.pp))
        ranks = min(self.world, self.ranks_per_host)
        extra = {FP32_NORMS: norms * bool(by_kind), IN_TRANSFER: self.transfer_bytes, LAYER_INPUTS: inputs * ranks}
        return by_kind | {name: size for name, size in extra.items() if size}

    @property
    def host_elements(self) -> float:
        """Parameters, without adapters, that a host's ranks keep; in a pipeline, on the host with the most."""
        ranks = min(self.world, self.ranks_per_host)
        if self.pp > 1:
            return ranks * max(self.stage_elements(stage) for stage in range(self.pp))
        return self.llama.parameters * ranks / self.world

    @property
    def transfer_bytes(self) -> float:
        """Bytes in a host's memory for a unit's incoming gradients, in FP32, and its rounded outgoing weights.

        Each rank has both, for its largest unit (``optim/offload.py``).
        """
        if self.offload != "optimizer":
            return 0.0
        sizes = [UnitSizes.from_spec(spec) for stage in range(self.pp) for spec in self.stage_specs(stage)]
        units = [
            max(unit_sizes.attention, unit_sizes.mlp) if self.has_sublayer_units else unit_sizes.layer
            for unit_sizes in sizes
        ]
        ends = [size for unit_sizes in sizes for size in (unit_sizes.embedding, unit_sizes.head)]
        largest = math.ceil(max(*units, *ends) / self.shards)
        return (self.gradient_bytes + self.compute_bytes) * largest * min(self.world, self.ranks_per_host)

    def max_staging_bytes(self, ram_bytes: float) -> float:
        """Return the bytes of a host's memory that checkpoint copies may take; ``ram_bytes``: of a host; 0: unknown."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        return STAGING_SHARE * max(0.0, ram_bytes - sum(self.host_bytes.values())) if ram_bytes else math.inf

    @property
    def update_bytes_per_parameter(self) -> float:
        """Bytes that an update reads and writes."""
        bf16_copy = 2 * (self.offload == "optimizer")
        return 2 * (self.weight_bytes + self.moment_bytes) + self.gradient_bytes + bf16_copy


def checkpoint_bytes(llama: Llama, config: Config) -> int:
    """Return the bytes of one checkpoint on disk, over all ranks; the mesh does not matter."""
    return PredictedRun.from_config(llama, config, 1, axes=Axes(1)).checkpoint_bytes
