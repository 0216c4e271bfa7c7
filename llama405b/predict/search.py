"""Predict a run on a cluster, list changes that help, and search for the fastest settings.

All settings that the search tries train the same steps. How far off a time may be: ``calibration``. The memory spread applies to a host's
memory, and to a GPU's where only what is allocated is known. Where what is reserved is known too, no spread applies: beyond what is
allocated there is only more or less time.
"""

import bisect
import dataclasses
import enum
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError, counted
from llama405b.predict import calibration
from llama405b.predict.calibration import Calibration, Evidence, Range
from llama405b.predict.estimate import Cluster, Estimate, Goodput, estimate, goodput, seconds_per_step, setting_of
from llama405b.predict.hardware import Shape
from llama405b.predict.run_shape import RunShape, held_elements
from llama405b.settings import config
from llama405b.settings.axes import FULL, Axes, Recompute
from llama405b.settings.config import on_ranks
from llama405b.settings.schema import (
    FP32_MASTERS,
    IN_BF16,
    Cadence,
    Config,
    Moments,
    Offload,
    Parallel,
    PipelineSchedule,
)
from llama405b.settings.strategies import Name
from llama405b.spec import models
from llama405b.spec.models import Llama, adapter_flops
from llama405b.spec.rules import check_mesh

MEMORY_SPREAD = 0.10
WHOLE, HALVES = ("LlamaDecoderLayer", "Embedding"), ("LlamaAttention", "LlamaMLP", "Embedding")
UNITS = tuple(
    frozenset(units) - {"Embedding"} for units in (WHOLE, HALVES)
)  # with the embedding or without, as predicted


class Fit(enum.IntEnum):
    """Whether needed bytes fit into memory."""

    NO = 0
    MAYBE = 1  # it is within the spread
    RETRIES = 2  # what a GPU's memory must hold fits, but not what PyTorch keeps: it gives that back and asks again, in each step
    YES = 3

    @classmethod
    def of(cls, needs: float, has: float, spread: float = MEMORY_SPREAD) -> "Fit":
        """Compare needed with available bytes, within a spread."""
        if needs * (1 + spread) <= has:
            return cls.YES
        return cls.MAYBE if needs * (1 - spread) <= has else cls.NO

    @classmethod
    def on_gpu(cls, allocated: float, has: float, reserved: Callable[[], float | None]) -> "Fit":
        """Compare bytes of a GPU; ``reserved`` is asked only where what is allocated fits, and may not be known."""
        if allocated > has:
            return cls.NO
        kept = reserved()
        if kept is None:
            kept = allocated * (1 + MEMORY_SPREAD)
        return cls.YES if kept <= has else cls.RETRIES


@dataclasses.dataclass(frozen=True, slots=True)
class Outlook:
    """A run on a cluster: what it needs, and what there is."""

    load: RunShape
    cluster: Cluster
    ram_bytes: float  # of a host; 0: unknown
    needs: Estimate
    calibration: Calibration | None = None  # that ``needs`` takes into account

    @classmethod
    def of(cls, load: RunShape, cluster: Cluster, ram_bytes: float = 0.0) -> "Outlook":
        """Predict a run on a cluster.

        Raises:
            UserError: The GPU has no FP8, and the run computes in it.
        """
        gpu = cluster.gpu
        if load.numerics == "fp8" and not (gpu.is_cpu or gpu.fp8_flops):
            raise UserError(
                f"--parallel.numerics: {gpu.name} has no FP8; use fp32-master, or GPUs that have it, such as h100-80"
            )
        return cls(load, cluster, ram_bytes, estimate(load, cluster, ram_bytes))

    def of_load(self, load: RunShape) -> "Outlook":
        """Predict another run on the same cluster; steps that were measured of this run do not apply."""
        return Outlook.of(load, self.cluster, self.ram_bytes)

    def calibrated(self, found: Calibration) -> "Outlook":
        """Apply a calibration; unchanged if that was of other GPUs, or of another model, sequence or numerics."""
        if not found.knows(self.load, self.cluster.gpu):
            return self
        cluster = found.measured(self.cluster)
        needs = estimate(self.load, cluster, self.ram_bytes)
        needs = found.applied(needs) if found.fits(self.load) else needs
        return Outlook(self.load, cluster, self.ram_bytes, needs, found)

    @property
    def evidence(self) -> Evidence:
        """The kind of measurements behind the predicted time."""
        if self._measured:
            return Evidence.STEPS
        return Evidence.RATES if self.calibration else Evidence.of(setting_of(self.load, self.cluster))

    @property
    def time_range(self) -> Range | None:
        """The range of times; None: the GPU was never measured."""
        if self.calibration:
            return calibration.STEPS if self._measured else calibration.RATES
        return calibration.range_of(setting_of(self.load, self.cluster))

    @property
    def memory_spread(self) -> float:
        """How far off a GPU's memory may be, as a share."""
        return calibration.MEMORY_SPREAD if self._measured else MEMORY_SPREAD

    @property
    def _measured(self) -> bool:
        """Whether steps of this very run were measured."""
        return self.calibration is not None and self.calibration.fits(self.load)

    @property
    def gpu(self) -> Fit:
        """Whether a GPU's memory is enough."""
        needs, has = self.needs, self.cluster.gpu.memory_bytes
        if self.cluster.gpu.is_cpu:
            return Fit.of(needs.gpu_bytes, has, self.memory_spread)
        return Fit.on_gpu(needs.gpu_bytes, has, lambda: needs.gpu_reserved_bytes)

    @property
    def ram(self) -> Fit:
        """Whether a host's memory is enough, as far as that is known."""
        return Fit.of(self.host_bytes, self.ram_bytes) if self.ram_bytes else Fit.YES

    @property
    def host_held_bytes(self) -> dict[str, float]:
        """Bytes of each kind in a host's memory; with checkpoint copies, unless those take only what is free."""
        copies = self.needs.saving.staged_bytes if self.load.staging_bytes is not None else 0.0
        return {**self.needs.held_by_host, **({"copies while saving": copies} if copies else {})}

    @property
    def host_bytes(self) -> float:
        """Bytes in a host's memory."""
        return sum(self.host_held_bytes.values())

    @property
    def room(self) -> float:
        """Free share of the scarcest memory, a GPU's or a host's; only the GPU's if the host's is unknown."""
        left = [1 - (self.needs.gpu_reserved_bytes or self.needs.gpu_bytes) / self.cluster.gpu.memory_bytes]
        return min([*left, 1 - self.host_bytes / self.ram_bytes] if self.ram_bytes else left)

    @property
    def fit(self) -> Fit:
        """Whether both a GPU's and a host's memory are enough."""
        return min(self.gpu, self.ram)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.load.global_batch * self.load.seq_len

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens/s of all GPUs; None: unknown for these numerics."""
        return self.step_tokens / self.needs.step_s if self.needs.step_s else None

    def gain(self, other: "Outlook") -> float:
        """Return by which share this trains faster per GPU than another prediction."""
        return (self.tokens_per_s or 0) / self.load.world / (other.tokens_per_s or 1) * other.load.world - 1

    def goodput(self, tokens: float = 0.0) -> Goodput | None:
        """Return what saves and failures leave of the time that so many tokens take; None: unknown."""
        if not (self.needs.step_s and self.tokens_per_s):
            return None
        cadence, mtbf_s = Cadence.read(self.load.every), self.load.mtbf_s / self.load.world
        whole_s, start_s = tokens / self.tokens_per_s, self.needs.pinning_s
        if self.load.adapter.trains:  # no checkpoint has the weights
            start_s += self.needs.loading.rank0_s
        return goodput(self.needs.saving, cadence, self.needs.step_s, mtbf_s, whole_s, start_s)

    def hours(self, tokens: float) -> float | None:
        """Return how long so many tokens take, with saves and failures; None: unknown, or for ever."""
        share = self.goodput(tokens)
        if not (self.tokens_per_s and share and share.arrives):
            return None
        return tokens / self.tokens_per_s / share.share / 3600

    @property
    def floor_s(self) -> float:
        """Seconds of the model's FLOPs at the GPUs' peak: the lower bound of a step."""
        flops = adapter_flops(self.load.llama, self.load.adapter, self.load.seq_len) * self.step_tokens
        return flops / self.load.world / self.cluster.gpu.flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (PaLM, appendix B, with causal attention)."""
        return self.floor_s / self.needs.step_s if self.needs.step_s else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: with what is computed again."""
        shape, seq_len = Shape.of(self.load.llama), self.load.seq_len
        full = self.load.recompute.counts(self.load.stages or (shape.layers,)).get("full", 0)
        again = shape.recomputed_flops(seq_len, full) / adapter_flops(self.load.llama, self.load.adapter, seq_len)
        return self.mfu * (1 + again) if self.mfu else None


def predicts_units(wrap: Iterable[str]) -> bool:
    """Check whether the memory of these FSDP units can be predicted."""
    return {*wrap} - {"Embedding"} in UNITS


def is_predicted(config: Config) -> bool:
    """Check whether memory and time of this run can be predicted."""
    return predicts_units(config.parallel.wrap) and not config.parallel.by_fsdp1


LEAST_GAIN = 0.01
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")


def keeping_most(outlook: Outlook) -> Outlook:
    """Return the run with as many layers' activations kept as surely fit: all, or operators' results."""

    def kept(recompute: Recompute) -> Outlook:
        return outlook.of_load(dataclasses.replace(outlook.load, recompute=recompute))

    def operators(layers: int) -> Outlook:
        return kept(Recompute("operators", last=layers))

    for whole in (Recompute("none"), Recompute("operators")):
        if (found := kept(whole)).gpu is Fit.YES:
            return found
    spare, layers = _beyond(outlook), max(outlook.load.stages, default=outlook.load.llama.layers)
    while True:  # by what is allocated, as what is reserved beside it takes long to find
        room = outlook.cluster.gpu.memory_bytes - spare
        fits = bisect.bisect_right(range(1, layers), room, key=lambda count: operators(count).needs.gpu_bytes)
        found = operators(fits) if fits else outlook
        if not fits or found.gpu is Fit.YES:
            return found
        spare, layers = max(spare, _beyond(found)), fits


def _beyond(outlook: Outlook) -> float:
    """Return the bytes of a GPU that PyTorch reserves beyond what is allocated; 0: not known."""
    return (outlook.needs.gpu_reserved_bytes or outlook.needs.gpu_bytes) - outlook.needs.gpu_bytes


def largest_micro_batch(outlook: Outlook) -> int:
    """Return the largest micro-batch that fits with these settings; 0: none."""

    def fits(micro: int) -> bool:
        load = dataclasses.replace(outlook.load, micro_batch=micro)
        return outlook.of_load(load).gpu is Fit.YES

    return bisect.bisect_left(range(1, 1025), x=True, key=lambda micro: not fits(micro))


def remedies(outlook: Outlook) -> list[tuple[str, Outlook]]:
    """Return single changes that help, the most helpful first, each with its prediction.

    If the run does not surely fit, changes that fit better help; else changes that make it faster by more than 1 %.
    """
    load, cluster = outlook.load, outlook.cluster
    changed = [(words, other) for words, other in _changes(load) if other != load and can_run(other, cluster)]
    if cluster.rates:  # measured with these numerics
        changed = [(words, other) for words, other in changed if other.numerics == load.numerics]
    found = [(words, outlook.of_load(other)) for words, other in changed]
    if outlook.fit is Fit.YES and load.recompute == FULL and not load.compiled:
        most = keeping_most(outlook)
        found.append((f"--model.activation_checkpointing {most.load.recompute}", most))
    faster = dataclasses.replace(cluster, nic_bytes_per_s=2 * cluster.nic_bytes_per_s)
    if load.hosts > 1:
        found.append(("twice the network", Outlook.of(load, faster, outlook.ram_bytes)))
    helps = [
        (words, other)
        for words, other in found
        if other.fit > outlook.fit or (other.fit == outlook.fit == Fit.YES and other.gain(outlook) > LEAST_GAIN)
    ]
    return sorted(helps, key=lambda each: (-each[1].fit, -each[1].gain(outlook)))


def _changes(load: RunShape) -> list[tuple[str, RunShape]]:
    """Return all single changes, each as a label and the changed run."""
    change = functools.partial(dataclasses.replace, load)
    return [
        (f"smaller units (--parallel.wrap {','.join(HALVES)})", change(wrap=HALVES)),
        (f"larger units (--parallel.wrap {','.join(WHOLE)})", change(wrap=WHOLE)),
        ("--parallel.offload none", change(offload="none", moments="fp32")),
        ("--parallel.offload optimizer", change(offload="optimizer")),
        ("--parallel.offload all", change(offload="all")),
        ("--parallel.loss parts", change(loss="parts")),
        ("--model.compile true (different rounding)", change(compiled=True)),
        ("--model.fused true (different rounding)", change(fused=True)),
        ("--model.activations host", change(activations="host")),
        (f"--parallel.reshard_after_forward {load.ranks_per_host}", change(kept_by=load.ranks_per_host)),
        ("--parallel.moments bf16 (with optimizer.betas of at most 0.99)", change(moments="bf16")),
        (
            "--parallel.numerics fp8 --model.compile true (products in FP8, by torchao)",
            change(numerics="fp8", compiled=True, fused=False),
        ),
        (f"--training.micro_batch_size {2 * load.micro_batch}", change(micro_batch=2 * load.micro_batch)),
        (_twice(load), change(world=2 * load.world, global_batch=max(load.global_batch, 2 * load.dp))),
    ]


def _twice(load: RunShape) -> str:
    """Describe twice the hosts, with the global batch that this needs."""
    batch = 2 * load.dp
    return (
        f"twice the hosts (with --training.global_batch_size {batch})"
        if batch > load.global_batch
        else "twice the hosts"
    )


def can_run(load: RunShape, cluster: Cluster) -> bool:
    """Check whether the trainer supports these settings on this cluster."""
    if cluster.gpu.is_cpu and load.offload != "none":
        return False
    if load.offload != "none" and load.axes.dp_replicate > 1:
        return False
    if load.compiled and (
        load.tp * load.cp > 1 or load.halves or "operators" in str(load.recompute) or cluster.gpu.is_cpu
    ):
        return False
    if load.adapter.trains and (load.offload == "optimizer" or load.numerics == "fp8"):
        return False
    if load.numerics == "fp8" and (load.fused or load.tp > 1 or not cluster.gpu.fp8_flops):
        return False
    if load.fused and (load.compiled or load.tp > 1):
        return False
    if load.prefetch and load.halves:
        return False
    if load.kept_by and (
        load.keeps_weights or load.tp * load.pp > 1 or load.kept_by >= load.shards or load.shards % load.kept_by
    ):
        return False
    if load.activations == "host" and (cluster.gpu.is_cpu or load.recompute == Recompute("none")):
        return False
    if load.offload == "optimizer" and load.numerics not in FP32_MASTERS:
        return False
    if load.moments == "bf16" and (load.offload == "none" or load.numerics in IN_BF16):
        return False
    return load.global_batch % (load.micro_batch * load.dp) == 0


NEAR = 0.033  # of one program, once fitted, nine of ten step times are within this of what is predicted (docs/plan-accuracy.md)
MESHES = 3  # the fastest that fit
WALKED = 40  # the fastest meshes whose memory is looked at
LONG = 8192  # tokens of a sequence from which on it may be worth while to split it
LARGEST = 16  # ranks of a pipeline
OF_MESHES: tuple[Name, ...] = ("fsdp2", "zero2", "hsdp")


def best(outlook: Outlook, moments: Sequence[Moments] = ("fp32",)) -> list[Outlook]:
    """Return all variants and the fastest meshes, best first.

    Those that fit come first, then those that need nothing tested on one GPU at most.
    Among those near the fastest, the one with most free memory is first. BF16 moments that were not requested come after the others near
    the fastest, as they are rounded, and so do states in host memory of unknown size. Meshes come by speed.
    """

    def order(each: Outlook) -> tuple[float, ...]:
        untried = bool(untried_of(each.load))
        if untried or not is_near(each, fastest[each.fit]):
            return (-each.fit, untried, 1, -(each.tokens_per_s or 0.0), each.needs.gpu_bytes)
        unseen = each.load.offload != "none" and not each.ram_bytes
        rounds = each.load.moments != outlook.load.moments and each.load.moments == "bf16"
        return (-each.fit, untried, 0, rounds, unseen, -each.room)

    found = list(variants(outlook, moments))
    of_parts = dataclasses.replace(outlook.load, loss="parts")
    for load in (of_parts, dataclasses.replace(of_parts, activations="host")):
        if not any(each.fit is Fit.YES for each in found):
            found += [each for each in variants(outlook.of_load(load), moments) if each.fit is Fit.YES]
    fastest = {fit: max((each.tokens_per_s or 0.0 for each in found if each.fit is fit), default=0.0) for fit in Fit}
    ranked = sorted(found, key=order)
    more = [keeping_most(each) for each in ranked[:1] if each.fit is Fit.YES and not untried_of(each.load)]
    return sorted([*ranked, *meshes(outlook), *(each for each in more if untried_of(each.load))], key=order)


def variants(outlook: Outlook, moments: Sequence[Moments] = ("fp32",)) -> Iterator[Outlook]:
    """Yield supported runs of the same steps, with other offload, moments, units and micro-batches."""
    load = outlook.load
    dtypes = dict.fromkeys((load.moments, *moments))
    sizes = sorted({load.micro_batch, *divisors(max(1, load.global_batch // load.dp))})
    for offload, dtype, wrap, size in itertools.product(OFFLOADS, dtypes, (WHOLE, HALVES), sizes):
        other = dataclasses.replace(load, offload=offload, moments=dtype, wrap=wrap, micro_batch=size)
        if can_run(other, outlook.cluster) or other == load:
            yield outlook.of_load(other)


def meshes(outlook: Outlook) -> list[Outlook]:
    """Return the fastest other meshes that fit, the fastest first."""
    cluster = outlook.cluster
    if outlook.calibration or cluster.gpu.is_cpu or not outlook.tokens_per_s:  # of meshes nothing is measured
        return []
    found: dict[str, Outlook] = {}  # by how the ranks are split: where the states are makes no other mesh
    for load in fastest_first(outlook, OFFLOADS)[:WALKED]:
        each = outlook.of_load(load)
        if each.fit is Fit.YES:
            found.setdefault(split_of(load), each)
        if len(found) == MESHES:
            break
    return list(found.values())


def fastest_first(outlook: Outlook, offloads: Sequence[Offload]) -> list[RunShape]:
    """Return runs on all suitable meshes with these offloads, fastest first; fit is not checked."""
    return sorted(_loads(outlook, offloads), key=lambda each: seconds_per_step(each, outlook.cluster))


def split_of(load: RunShape) -> str:
    """Format how a run's ranks are split, in the words of settings."""
    words = [str(load.axes)]
    if load.pp > 1 and load.pp_schedule != "1f1b":
        words.append(load.pp_schedule)
    if load.keeps_weights:
        words.append("zero2" if load.reduces_each else "zero1")
    return ", ".join(words)


def untried_of(load: RunShape) -> str:
    """Return the settings of a run, besides FSDP, that were tested on one GPU at most; '': none."""
    words = [split_of(load)] if load.axes.told or load.keeps_weights else []
    if load.loss == "parts":
        words.append("--parallel.loss parts")
    if load.activations == "host":
        words.append("--model.activations host")
    if load.compiled:
        words.append("--model.compile true")
    if load.numerics in ("fp8", "bf16-stochastic"):
        words.append(f"--parallel.numerics {load.numerics}")
    if load.fused:
        words.append("--model.fused true")
    if load.prefetch:
        words.append(f"--parallel.prefetch {load.prefetch}")
    if load.kept_by:
        words.append(f"--parallel.reshard_after_forward {load.kept_by}")
    if load.recompute != FULL:
        words.append(f"--model.activation_checkpointing {load.recompute}")
    return ", ".join(words)


def is_near(outlook: Outlook, fastest: float) -> bool:
    """Check whether a prediction cannot be told apart from the fastest, in tokens/s."""
    return outlook.tokens_per_s is not None and outlook.tokens_per_s >= fastest * (1 - NEAR)


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [each for each in range(1, math.isqrt(n) + 1) if n % each == 0]
    return sorted({*small, *(n // each for each in small)})


def _splits(load: RunShape) -> Iterator[Parallel]:
    """Yield the splits to try, whether they suit the run or not."""
    near = divisors(load.ranks_per_host)
    of_sequences = near if load.seq_len >= LONG else [1]
    of_layers = [size for size in divisors(load.world) if size <= LARGEST]
    schedules: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")
    for tp, cp, pp, strategy, schedule in itertools.product(near, of_sequences, of_layers, OF_MESHES, schedules):
        if (schedule == "1f1b" or pp > 1) and (tp * cp * pp > 1 or strategy != "fsdp2"):
            yield Parallel(strategy=strategy, tp=tp, cp=cp, pp=pp, pp_schedule=schedule)


def _axes_of(parallel: Parallel, load: RunShape) -> Axes | None:
    """Return the mesh that settings make of a run's ranks; None: it does not suit the ranks or the model."""
    try:
        axes = Axes.of(parallel, load.world, load.ranks_per_host)
        check_mesh(axes, parallel, load.llama, load.seq_len, load.ranks_per_host)
    except UserError:
        return None
    return axes


def _loads(outlook: Outlook, offloads: Sequence[Offload]) -> Iterator[RunShape]:
    """Yield the supported runs on other meshes whose states alone do not fill a GPU."""
    load, memory = outlook.load, outlook.cluster.gpu.memory_bytes
    for parallel in _splits(load):
        axes = _axes_of(parallel, load)
        if axes is None or (not axes.told and not parallel.of_strategy.keeps_weights):
            continue
        split = dataclasses.replace(
            load,
            tp=axes.tp,
            cp=axes.cp,
            pp=axes.pp,
            pp_schedule=parallel.pp_schedule,
            dp_shard=axes.dp_shard if axes.dp_replicate > 1 else 0,
            keeps_weights=parallel.of_strategy.keeps_weights,
            reduces_each=parallel.of_strategy.reduces_each,
            wrap=WHOLE,
            prefetch=0,
            kept_by=0,
        )
        if split.dp > load.global_batch:
            continue
        held = held_elements(load.llama, axes, 0, parallel.chunks)
        for offload, size in itertools.product(offloads, divisors(max(1, load.global_batch // split.dp))):
            other = dataclasses.replace(split, offload=offload, micro_batch=size)
            if can_run(other, outlook.cluster) and held * other.states_bytes < memory:
                yield other


def chosen(
    config: Config,
    llama: Llama,
    world: int,
    ranks_per_host: int,
    cluster: Cluster | None = None,
    ram_bytes: float = 0.0,
) -> Config:
    """Resolve strategy auto/3d and activation_checkpointing auto for given machines.

    Activation checkpointing becomes the fastest that is predicted to fit; full on CPUs, and on GPUs that are in no table.

    Raises:
        UserError: The model cannot be split so over these ranks.
    """
    config = _with_mesh(config, llama, world, ranks_per_host, cluster, ram_bytes)
    if not config.model.chooses_recompute:
        return config
    found = FULL
    if cluster and not cluster.gpu.is_cpu and is_predicted(config):
        axes = Axes.of(config.parallel, world, ranks_per_host)
        load = RunShape.of(llama, on_ranks(config, axes), world, axes)
        outlook = Outlook.of(dataclasses.replace(load, ranks_per_host=ranks_per_host), cluster, ram_bytes)
        found = keeping_most(outlook).load.recompute
    return dataclasses.replace(config, model=dataclasses.replace(config.model, activation_checkpointing=str(found)))


def _with_mesh(
    config: Config,
    llama: Llama,
    world: int,
    ranks_per_host: int,
    cluster: Cluster | None,
    ram_bytes: float,
) -> Config:
    """Return a configuration with its mesh resolved.

    auto: FSDP over all ranks if that fits, as no GPU has run more; else the fastest mesh that fits. 3d: the fastest with tp and pp.
    On CPUs, and on GPUs that are in no table, the fastest on H100s; if nothing fits, the mesh that needs least GPU memory.
    """
    strategy = config.parallel.strategy
    if not config.parallel.of_strategy.chosen:
        return config
    plain = on_ranks(
        dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, strategy="fsdp2")), Axes(world)
    )
    known = (
        dataclasses.replace(plain.parallel, numerics="fp32-master")
        if plain.parallel.numerics == "fp32"
        else plain.parallel
    )
    load = RunShape.of(llama, dataclasses.replace(plain, parallel=known), world)
    asked = Outlook.of(dataclasses.replace(load, ranks_per_host=ranks_per_host), cluster or Cluster(), ram_bytes)
    if strategy == "auto" and asked.fit >= Fit.RETRIES:
        return plain
    tried = fastest_first(asked, (load.offload,))
    found = [each for each in tried if strategy == "auto" or min(each.tp, each.pp) > 1]
    if not found and strategy == "auto":
        return plain
    if not found:
        raise UserError(
            f"--parallel.strategy: {counted(world, 'rank')} of this model cannot be split by tp and pp, which 3d needs; use auto or fsdp2"
        )
    best = _first_that_fits(asked, found)
    parallel = dataclasses.replace(best.load.parallel(plain.parallel), numerics=plain.parallel.numerics)
    training = dataclasses.replace(plain.training, micro_batch_size=best.load.micro_batch)
    return dataclasses.replace(plain, parallel=parallel, training=training)


def _first_that_fits(asked: Outlook, loads: Sequence[RunShape]) -> Outlook:
    """Return the first run that fits, else the one that needs least GPU memory.

    A run that does not fit with one sequence is not tried with more.
    """
    least: dict[RunShape, Outlook] = {}
    for load in loads:
        one = dataclasses.replace(load, micro_batch=1)
        if one not in least:
            least[one] = asked.of_load(one)
        found = least[one] if load == one or least[one].fit < Fit.RETRIES else asked.of_load(load)
        if found.fit >= Fit.RETRIES:
            return found
    return min(least.values(), key=lambda each: each.needs.gpu_bytes)


def known_shape(asked: Config, preset: str) -> models.Llama | None:
    """Return the requested model's shape, from its directory or its preset; None: unknown.

    Raises:
        UserError: The directory's config.json cannot be used, or it has fewer layers than are asked for.
    """
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))
    directory = Path(asked.model.path)
    if (directory / "config.json").is_file():
        return models.read_llama(directory, asked.model.layers)
    if preset not in known:
        return None
    llama = models.parse_llama(known[preset], preset)
    if asked.model.layers > llama.layers:
        raise UserError(f"--model.layers: {asked.model.layers}, but {preset} has {llama.layers}; lower it, or omit it")
    return dataclasses.replace(llama, layers=asked.model.layers or llama.layers)
