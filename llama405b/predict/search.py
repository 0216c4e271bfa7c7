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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama405b.contract.errors import UserError, fmt_if, pluralize
from llama405b.predict import calibration
from llama405b.predict.calibration import Calibration, Evidence, TimeRange
from llama405b.predict.estimate import (
    Cluster,
    Estimate,
    Goodput,
    estimate,
    predict_goodput,
    seconds_per_step,
    training_setup,
)
from llama405b.predict.hardware import ModelShape
from llama405b.predict.run_shape import SEARCHED_SETTINGS, PredictedRun, rank_elements
from llama405b.settings import config
from llama405b.settings.axes import FULL_RECOMPUTE, Axes, Recompute
from llama405b.settings.choices import UNIT_CLASSES, StrategyName
from llama405b.settings.config import with_global_batch
from llama405b.settings.rules import find_step_faults
from llama405b.settings.schema import (
    Cadence,
    Config,
    Model,
    Moments,
    Offload,
    Parallel,
    PipelineSchedule,
)
from llama405b.spec import models
from llama405b.spec.adapters import adapter_flops
from llama405b.spec.models import Llama
from llama405b.spec.rules import find_mesh_faults

MEMORY_SPREAD = 0.10
# PyTorch reserved less than this of what is allocated in all settings whose reserved memory is not predicted, and was measured (1.27).
RESERVED_BOUND = 1.3


class Fit(enum.IntEnum):
    """Whether needed bytes fit into memory."""

    NO = 0
    MAYBE = 1  # it is within the spread
    RETRIES = 2  # what a GPU's memory must hold fits, but not what PyTorch keeps: it gives that back and asks again, in each step
    YES = 3

    @classmethod
    def from_sizes(cls, needs: float, has: float, spread: float = MEMORY_SPREAD) -> "Fit":
        """Compare needed with available bytes, within a spread."""
        if needs * (1 + spread) <= has:
            return cls.YES
        return cls.MAYBE if needs * (1 - spread) <= has else cls.NO

    @classmethod
    def from_gpu_bytes(cls, allocated: float, has: float, find_reserved: Callable[[], float | None]) -> "Fit":
        """Compare bytes of a GPU; ``find_reserved`` is asked only where what is allocated fits, and may not be known."""
        if allocated > has:
            return cls.NO
        reserved_bytes = find_reserved()
        if reserved_bytes is None:
            reserved_bytes = allocated * RESERVED_BOUND
        return cls.YES if reserved_bytes <= has else cls.RETRIES


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A run on a cluster: what it needs, and what there is."""

    run: PredictedRun
    cluster: Cluster
    ram_bytes: float  # of a host; 0: unknown
    needs: Estimate
    calibration: Calibration | None = None  # that ``needs`` takes into account

    @classmethod
    def from_run(cls, run: PredictedRun, cluster: Cluster, ram_bytes: float = 0.0) -> "Prediction":
        """Predict a run on a cluster.

        Raises:
            UserError: The GPU has no FP8, and the run computes in it.
        """
        gpu = cluster.gpu
        if run.numerics == "fp8" and not (gpu.is_cpu or gpu.fp8_flops):
            raise UserError(
                f"--parallel.numerics: {gpu.name} has no FP8; use fp32-master, or GPUs that have it, such as h100-80"
            )
        return cls(run, cluster, ram_bytes, estimate(run, cluster, ram_bytes))

    def with_run(self, run: PredictedRun) -> "Prediction":
        """Predict another run on the same cluster; steps that were measured of this run do not apply."""
        return Prediction.from_run(run, self.cluster, self.ram_bytes)

    def with_calibration(self, measured: Calibration) -> "Prediction":
        """Apply a calibration; unchanged if that was of other GPUs, or of another model, sequence or numerics.

        Of runs with tp, cp or pp only the measured one itself is covered: the rates are not of their parts.
        """
        if not measured.covers_run(self.run, self.cluster.gpu):
            return self
        cluster = measured.with_measured_rates(self.cluster)
        needs = estimate(self.run, cluster, self.ram_bytes)
        needs = measured.with_measured_steps(needs) if measured.matches_run(self.run) else needs
        return Prediction(self.run, cluster, self.ram_bytes, needs, measured)

    @property
    def evidence(self) -> Evidence:
        """The kind of measurements behind the predicted time."""
        if self._is_measured:
            return Evidence.STEPS
        return Evidence.RATES if self.calibration else Evidence.kinds_of(training_setup(self.run, self.cluster))[0]

    @property
    def time_range(self) -> TimeRange:
        """The range of times."""
        if self.calibration:
            return calibration.STEPS_RANGE if self._is_measured else calibration.RATES_RANGE
        return calibration.find_time_range(training_setup(self.run, self.cluster))

    @property
    def memory_spread(self) -> float:
        """How far off a GPU's memory may be, as a share."""
        return calibration.MEASURED_MEMORY_SPREAD if self._is_measured else MEMORY_SPREAD

    @property
    def _is_measured(self) -> bool:
        """Whether steps of this very run were measured."""
        return self.calibration is not None and self.calibration.matches_run(self.run)

    @property
    def gpu_fit(self) -> Fit:
        """Whether a GPU's memory is enough."""
        needs, has = self.needs, self.cluster.gpu.memory_bytes
        if self.cluster.gpu.is_cpu:
            return Fit.from_sizes(needs.gpu_bytes, has, self.memory_spread)
        return Fit.from_gpu_bytes(needs.gpu_bytes, has, lambda: self.kept_bytes)

    @property
    def knows_kept_bytes(self) -> bool:
        """Whether ``kept_bytes`` is predicted, and not a bound."""
        return self.cluster.gpu.is_cpu or self._is_measured or bool(self.needs.reserved_by_pool)

    @property
    def kept_bytes(self) -> float:
        """Bytes that PyTorch, CUDA and NCCL keep of a GPU, or the most that they are taken to; of a rank on a CPU, what it holds."""
        bound = 1.0 if self.cluster.gpu.is_cpu or self._is_measured else RESERVED_BOUND
        return self.needs.gpu_reserved_bytes or self.needs.gpu_bytes * bound

    @property
    def ram_fit(self) -> Fit:
        """Whether a host's memory is enough, as far as that is known."""
        return Fit.from_sizes(self.host_bytes, self.ram_bytes) if self.ram_bytes else Fit.YES

    @property
    def host_bytes_by_kind(self) -> dict[str, float]:
        """Bytes of each kind in a host's memory; with checkpoint copies, unless those take only what is free."""
        copies = self.needs.saving.staged_bytes if self.run.staging_bytes is not None else 0.0
        return {**self.needs.host_bytes_by_kind, **({"copies while saving": copies} if copies else {})}

    @property
    def host_bytes(self) -> float:
        """Bytes in a host's memory."""
        return sum(self.host_bytes_by_kind.values())

    @property
    def spare_share(self) -> float:
        """Free share of the scarcest memory, a GPU's or a host's; only the GPU's if the host's is unknown."""
        shares = [1 - self.kept_bytes / self.cluster.gpu.memory_bytes]
        return min([*shares, 1 - self.host_bytes / self.ram_bytes] if self.ram_bytes else shares)

    @property
    def fit(self) -> Fit:
        """Whether both a GPU's and a host's memory are enough."""
        return Fit.NO if self.ram_fit is Fit.NO else min(self.gpu_fit, self.ram_fit)  # what is reserved takes long

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.run.global_batch * self.run.seq_len

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens/s of all GPUs; None: unknown for these numerics."""
        return self.step_tokens / self.needs.step_s if self.needs.step_s else None

    def speedup_over(self, other: "Prediction") -> float:
        """Return by which share this trains faster per GPU than another prediction."""
        return (self.tokens_per_s or 0) / self.run.world / (other.tokens_per_s or 1) * other.run.world - 1

    def goodput(self, tokens: float = 0.0) -> Goodput | None:
        """Return what saves and failures leave of the time that so many tokens take; None: unknown."""
        if not (self.needs.step_s and self.tokens_per_s):
            return None
        cadence, mtbf_s = Cadence.parse(self.run.every), self.run.mtbf_s / self.run.world
        training_s, start_s = tokens / self.tokens_per_s, self.needs.pinning_s
        if self.run.adapter.is_enabled:  # no checkpoint has the weights
            start_s += self.needs.loading.rank0_s
        return predict_goodput(self.needs.saving, cadence, self.needs.step_s, mtbf_s, training_s, start_s)

    def hours(self, tokens: float) -> float | None:
        """Return how long so many tokens take, with saves and failures; None: unknown, or for ever."""
        found_goodput = self.goodput(tokens)
        if not (self.tokens_per_s and found_goodput and found_goodput.makes_progress):
            return None
        return tokens / self.tokens_per_s / found_goodput.share / 3600

    @property
    def floor_s(self) -> float:
        """Seconds of the model's FLOPs at the GPUs' peak: the lower bound of a step."""
        flops = adapter_flops(self.run.llama, self.run.adapter, self.run.seq_len) * self.step_tokens
        return flops / self.run.world / self.cluster.gpu.flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (PaLM, appendix B, with causal attention)."""
        return self.floor_s / self.needs.step_s if self.needs.step_s else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: with what is computed again."""
        shape, seq_len = ModelShape.from_llama(self.run.llama), self.run.seq_len
        n_full = self.run.recompute.count_kinds(self.run.stages or (shape.layers,)).get("full", 0)
        recomputed_share = shape.recomputed_flops(seq_len, n_full) / adapter_flops(
            self.run.llama, self.run.adapter, seq_len
        )
        return self.mfu * (1 + recomputed_share) if self.mfu else None


def can_predict(config: Config) -> bool:
    """Check whether memory and time of this run can be predicted."""
    return not config.parallel.is_fsdp1


MIN_GAIN = 0.01
SPARE_SHARE = (
    0.02  # of a GPU's memory, left free where layers are filled in: loading, evaluation and saves are not counted
)
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")


def keep_most_activations(prediction: Prediction) -> Prediction:
    """Return the run with as many layers' activations kept as fit with room to spare: all, or operators' results, where the trainer can."""

    def with_recompute(recompute: Recompute) -> Prediction:
        return prediction.with_run(dataclasses.replace(prediction.run, recompute=recompute))

    def with_operators(layers: int) -> Prediction:
        return with_recompute(Recompute("operators", last=layers))

    modes = [
        mode
        for mode in (Recompute("none"), Recompute("operators"))
        if is_legal(dataclasses.replace(prediction.run, recompute=mode))
    ]
    for mode in modes:
        if _has_room(candidate := with_recompute(mode)):
            return candidate
    if Recompute("operators") not in modes:
        return prediction
    margin, layers = _reserved_overhead(prediction), max(prediction.run.stages, default=prediction.run.llama.layers)
    while True:  # by what is allocated, as what is reserved beside it takes long to find
        budget = prediction.cluster.gpu.memory_bytes * (1 - SPARE_SHARE) - margin
        n_layers = bisect.bisect_right(
            range(1, layers), budget, key=lambda count: with_operators(count).needs.gpu_bytes
        )
        candidate = with_operators(n_layers) if n_layers else prediction
        if not n_layers or _has_room(candidate):
            while 0 < n_layers < layers - 1 and _has_room(more := with_operators(n_layers + 1)):
                candidate, n_layers = more, n_layers + 1  # beside more that is allocated, less may be reserved
            return candidate
        margin, layers = max(margin, _reserved_overhead(candidate)), n_layers


def _has_room(prediction: Prediction) -> bool:
    """Whether a run surely fits into a GPU, and leaves a share of it free."""
    limit = (1 - SPARE_SHARE) * prediction.cluster.gpu.memory_bytes
    return prediction.gpu_fit is Fit.YES and prediction.kept_bytes <= limit


def _reserved_overhead(prediction: Prediction) -> float:
    """Return the bytes of a GPU that PyTorch reserves beyond what is allocated; 0: not known."""
    return (prediction.needs.gpu_reserved_bytes or prediction.needs.gpu_bytes) - prediction.needs.gpu_bytes


def largest_micro_batch(prediction: Prediction) -> int:
    """Return the largest micro-batch that fits with these settings, of those that divide the batch; 0: none."""

    def fits(size: int) -> bool:
        run = dataclasses.replace(prediction.run, micro_batch=size)
        return prediction.with_run(run).gpu_fit is Fit.YES

    sizes = divisors(max(1, prediction.run.global_batch // prediction.run.dp))
    return next(filter(fits, reversed(sizes)), 0)


def remedies(prediction: Prediction) -> list[tuple[str, Prediction]]:
    """Return single changes that help, the most helpful first, each with its prediction.

    If the run does not surely fit, changes that fit better help; else changes that make it faster by more than 1 %.
    """
    run, cluster = prediction.run, prediction.cluster
    changes = [change for change in single_changes(run) if change[-1] != run and is_runnable(change[-1], cluster)]
    if cluster.rates:  # measured with these numerics
        changes = [change for change in changes if change[-1].numerics == run.numerics]
    candidates = [(setting, value, prediction.with_run(other)) for setting, value, other in changes]
    if prediction.fit is Fit.YES:
        candidates += _with_saved_memory(prediction)
    faster_cluster = dataclasses.replace(cluster, nic_bytes_per_s=2 * cluster.nic_bytes_per_s)
    if run.hosts > 1:
        candidates.append(("twice the network", "", Prediction.from_run(run, faster_cluster, prediction.ram_bytes)))
    helpful = [
        (setting, value, other)
        for setting, value, other in candidates
        if other.fit > prediction.fit
        or (
            other.fit == prediction.fit == Fit.YES
            and other.run.global_batch == run.global_batch  # else a larger batch is all that is gained
            and other.speedup_over(prediction) > MIN_GAIN
        )
    ]
    helpful.sort(key=lambda candidate: (-candidate[-1].fit, -candidate[-1].speedup_over(prediction)))
    best_of_setting: dict[str, tuple[str, Prediction]] = {}
    for setting, value, other in helpful:
        best_of_setting.setdefault(setting, (setting + value, other))
    return [*best_of_setting.values()]


# Settings that save a GPU's memory at little cost, for something that takes more of it.
MEMORY_SAVINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"activations": "host"},
    {"fused": True},
    {"activations": "host", "fused": True},
    {"activations": "host", "fused": True, "loss": "chunked"},
)


def _with_saved_memory(prediction: Prediction) -> Iterator[tuple[str, str, Prediction]]:
    """Yield what more memory makes faster, with settings that save so much: activations of more layers, larger micro-batches."""
    run = prediction.run
    for saving in MEMORY_SAVINGS:
        saved = prediction if not saving else prediction.with_run(dataclasses.replace(run, **saving))
        if saving and (saved.run == run or not is_runnable(saved.run, prediction.cluster)):
            continue
        flags = format_changes(run, saved.run)
        # A chunked loss lowers no peak that a layer has, and each of these takes long to find.
        keeps_more = run.recompute == FULL_RECOMPUTE and not run.compiled and "loss" not in saving
        if keeps_more and saved.fit is Fit.YES:
            max_kept = keep_most_activations(saved)
            if max_kept.run.recompute != run.recompute:
                yield "--model.activation_checkpointing", f" {max_kept.run.recompute}{flags}", max_kept
        larger = dataclasses.replace(saved.run, micro_batch=2 * run.micro_batch)
        if saving and is_runnable(larger, prediction.cluster):
            yield "--training.micro_batch_size", f" {larger.micro_batch}{flags}", prediction.with_run(larger)


def with_larger_batch(prediction: Prediction) -> Prediction | None:
    """Return twice the batch in twice as large micro-batches, with settings that save the memory for it.

    None, if it does not surely fit, trains no faster per token, or is not needed, as a rank has several micro-batches in a step.
    """
    run = prediction.run
    if prediction.fit is not Fit.YES or run.global_batch != run.dp * run.micro_batch:
        return None
    larger = dataclasses.replace(run, micro_batch=2 * run.micro_batch, global_batch=2 * run.global_batch)
    candidates = (dataclasses.replace(larger, **saving) for saving in MEMORY_SAVINGS)
    found = [prediction.with_run(candidate) for candidate in candidates if is_runnable(candidate, prediction.cluster)]
    best = max(
        (other for other in found if other.fit is Fit.YES), key=lambda other: other.tokens_per_s or 0, default=None
    )
    return best if best and best.speedup_over(prediction) > MIN_GAIN else None


def format_changes(before: PredictedRun, after: PredictedRun) -> str:
    """Format the settings of a run that differ from another's, as flags with a space before each."""
    changes = {
        setting: getattr(after, field)
        for field, setting in SEARCHED_SETTINGS.items()
        if getattr(after, field) != getattr(before, field)
    }
    return "".join(f" --{setting} {str(value).lower()}" for setting, value in changes.items())


def single_changes(run: PredictedRun) -> list[tuple[str, str, PredictedRun]]:
    """Return all single changes, each as a setting, what follows that in its label, and the changed run."""
    change, batch = functools.partial(dataclasses.replace, run), 2 * run.dp  # of twice the hosts
    return [
        ("--parallel.fsdp_unit", " sublayer", change(fsdp_unit="sublayer", fsdp_embedding=True)),
        ("--parallel.fsdp_unit", " layer", change(fsdp_unit="layer", fsdp_embedding=True)),
        ("--parallel.offload", " none", change(offload="none", moments="fp32")),
        ("--parallel.offload", " optimizer", change(offload="optimizer")),
        ("--parallel.offload", " all", change(offload="all")),
        ("--model.loss", " chunked", change(loss="chunked")),
        ("--model.compile", " true (different rounding)", change(compiled=True, fused=False)),
        ("--model.fused", " true (different rounding)", change(fused=True)),
        ("--model.activations", " host", change(activations="host")),
        *(
            ("--parallel.cp", f" {size}", change(cp=size))
            for size in divisors(run.ranks_per_host)
            if size > run.cp and run.seq_len >= LONG_SEQUENCE
        ),
        ("--parallel.reshard_after_forward", f" {run.ranks_per_host}", change(kept_by=run.ranks_per_host)),
        ("--parallel.moments", " bf16 (optimizer.betas <= 0.99)", change(moments="bf16")),
        (
            "--parallel.numerics",
            " fp8 --model.compile true (FP8 by torchao)",
            change(numerics="fp8", compiled=True, fused=False),
        ),
        ("--training.micro_batch_size", f" {2 * run.micro_batch}", change(micro_batch=2 * run.micro_batch)),
        (
            "twice the hosts",
            fmt_if(" (with --training.global_batch_size {})", batch if batch > run.global_batch else 0),
            change(world=2 * run.world, global_batch=max(run.global_batch, batch)),
        ),
    ]


def is_runnable(run: PredictedRun, cluster: Cluster) -> bool:
    """Check whether the trainer takes this run, by its own rules, and the cluster has what it needs."""
    if cluster.gpu.is_cpu and (run.offload != "none" or run.compiled or run.activations == "host"):
        return False
    if run.numerics == "fp8" and not cluster.gpu.fp8_flops:
        return False
    # Where the batch does not divide by the ranks, some are idle in the last micro-batch, of whatever size.
    n_sharing = run.dp if run.global_batch % run.dp == 0 else 1
    return run.global_batch % (run.micro_batch * n_sharing) == 0 and is_legal(run)


# A run that has tp across hosts was allowed to; none that is offered has.
ANY_CONFIG = Config(Model(path="any"), parallel=Parallel(tp_across_hosts=True))


def is_legal(run: PredictedRun) -> bool:
    """Check whether the trainer refuses nothing of a run."""
    return _is_legal(dataclasses.replace(run, micro_batch=1))  # no rule depends on the micro-batch


@functools.lru_cache(4096)
def _is_legal(run: PredictedRun) -> bool:
    config, axes = run.apply_to(ANY_CONFIG), run.axes
    if axes.world_size != run.world:
        return False
    mesh_faults = find_mesh_faults(axes, config.parallel, run.llama, run.seq_len, run.ranks_per_host)
    return next(itertools.chain(find_step_faults(config), mesh_faults), None) is None


NEAR_SHARE = 0.033  # of one program, once fitted, nine of ten step times are within this of what is predicted (docs/plan-accuracy.md)
MAX_MESHES = 3  # the fastest that fit
LONG_SEQUENCE = 8192  # tokens of a sequence from which on it may be worth while to split it
MAX_PIPELINE_RANKS = 16  # ranks of a pipeline
MESH_STRATEGIES: tuple[StrategyName, ...] = ("fsdp2", "zero2", "hsdp")
# Changes that take less GPU memory and more time, tried in turn until something fits without a mesh.
MEMORY_SAVERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"loss": "chunked"},
    {"loss": "chunked", "activations": "host"},
)


def rank_variants(prediction: Prediction, moments: Sequence[Moments] = ("fp32",)) -> list[Prediction]:
    """Return all variants and the fastest meshes, best first.

    Those that fit come first, of these those that need nothing tested on one GPU at most; those that do not fit by what they lack.
    Among those near the fastest, the one with most free memory is first. BF16 moments that were not requested come after the others near
    the fastest, as they are rounded. Meshes come by speed.
    """

    def sort_key(candidate: Prediction) -> tuple[float, ...]:
        is_untested = bool(untested_features(candidate.run))
        if candidate.fit is Fit.NO:  # the nearest to fitting
            shares = [candidate.needs.gpu_bytes / candidate.cluster.gpu.memory_bytes]
            if candidate.ram_bytes:
                shares.append(candidate.host_bytes / candidate.ram_bytes)
            return (-candidate.fit, *sorted(shares, reverse=True))
        is_fast = is_near_fastest(candidate, fastest[candidate.fit])
        if is_untested or not is_fast:
            return (-candidate.fit, is_untested, 1, -(candidate.tokens_per_s or 0.0), candidate.needs.gpu_bytes)
        rounds_moments = candidate.run.moments != prediction.run.moments and candidate.run.moments == "bf16"
        return (-candidate.fit, is_untested, 0, rounds_moments, -candidate.spare_share)

    candidates: list[Prediction] = []
    meshes: list[Prediction] = []
    for savers in MEMORY_SAVERS:
        asked = prediction if not savers else prediction.with_run(dataclasses.replace(prediction.run, **savers))
        found = [*variants(asked, moments)]
        candidates += [candidate for candidate in found if not savers or candidate.fit >= Fit.RETRIES]
        if not meshes and _has_mesh_times(prediction):
            meshes = [mesh for mesh in fastest_meshes(asked) if mesh.fit >= Fit.RETRIES]
        if any(candidate.fit is Fit.YES for candidate in found):
            break
    fastest = {
        fit: max((candidate.tokens_per_s or 0.0 for candidate in candidates if candidate.fit is fit), default=0.0)
        for fit in Fit
    }
    best = min(candidates, key=sort_key)
    if best.fit is Fit.YES and not untested_features(best.run):
        with_activations = keep_most_activations(best)
        meshes += [with_activations] if untested_features(with_activations.run) else []
    by_run = {candidate.run: candidate for candidate in [*meshes, *candidates]}
    return sorted(by_run.values(), key=sort_key)


def _has_mesh_times(prediction: Prediction) -> bool:
    """Whether the time of other meshes is known: a calibration measures none, and CPUs have no data sheet."""
    return not prediction.calibration and not prediction.cluster.gpu.is_cpu and bool(prediction.tokens_per_s)


def variants(prediction: Prediction, moments: Sequence[Moments] = ("fp32",)) -> Iterator[Prediction]:
    """Yield the run, and others of the same steps and mesh that the trainer takes: offload, moments, units and micro-batches."""
    run, dtypes = prediction.run, tuple(dict.fromkeys((prediction.run.moments, *moments)))
    layouts = [dataclasses.replace(run, fsdp_unit=unit, fsdp_embedding=True) for unit in UNIT_CLASSES]
    runs = [
        candidate for layout in layouts for candidate in runnable_runs(layout, prediction.cluster, OFFLOADS, dtypes)
    ]
    yield from map(prediction.with_run, dict.fromkeys([run, *runs]))


def runnable_runs(
    layout: PredictedRun, cluster: Cluster, offloads: Sequence[Offload], moments: Sequence[Moments]
) -> Iterator[PredictedRun]:
    """Yield what the trainer takes of a mesh and its FSDP units, with these offloads and moments and any micro-batch."""
    sizes = divisors(max(1, layout.global_batch // layout.dp))
    for offload, dtype, size in itertools.product(offloads, moments, sizes):
        candidate = dataclasses.replace(layout, offload=offload, moments=dtype, micro_batch=size)
        if is_runnable(candidate, cluster):
            yield candidate


def fastest_meshes(
    prediction: Prediction, offloads: Sequence[Offload] = OFFLOADS, at_most: int = MAX_MESHES, *, is_3d: bool = False
) -> list[Prediction]:
    """Return the fastest runs on other meshes that fit, the fastest first, one for each way to split the ranks.

    Where none surely fits, those that fit with retries of the allocator; else the one that comes nearest to it. ``is_3d``: with tp and
    pp. A run that does not fit with one sequence is not tried with more, unless that takes memory of its own: for sums of gradients, or
    in a pipeline.
    """
    cluster = prediction.cluster
    elements = {
        run: n_elements
        for layout, n_elements in _other_meshes(prediction.run)
        if not is_3d or min(layout.tp, layout.pp) > 1
        for run in runnable_runs(layout, cluster, offloads, (layout.moments,))
    }
    # Those whose states alone fill a GPU are looked at only if all do.
    runs = [run for run, n in elements.items() if n * run.states_bytes < cluster.gpu.memory_bytes] or elements
    by_fit: dict[Fit, dict[str, Prediction]] = {fit: {} for fit in Fit}  # and split: where states are makes no mesh
    singles: dict[PredictedRun, Prediction] = {}
    for run in sorted(runs, key=lambda candidate: _comparable_s(candidate, cluster)):
        is_monotone = run.accumulates and run.pp == 1
        single = dataclasses.replace(run, micro_batch=1) if is_monotone else run
        candidate = singles.get(single) or singles.setdefault(single, prediction.with_run(single))
        if run != single and candidate.fit >= Fit.RETRIES:
            candidate = prediction.with_run(run)
        by_fit[candidate.fit].setdefault(format_split(run), candidate)
        if len(by_fit[Fit.YES]) == at_most:
            break
    fitting = [*(by_fit[Fit.YES] or by_fit[Fit.RETRIES]).values()][:at_most]
    return fitting or sorted(singles.values(), key=lambda option: (-option.fit, option.needs.gpu_bytes))[:1]


def _comparable_s(run: PredictedRun, cluster: Cluster) -> float:
    """Return the time of a step, by which meshes are compared; in FP32, where none was measured, that with BF16 products."""
    is_unknown = run.numerics == "fp32" and not cluster.rates
    return seconds_per_step(dataclasses.replace(run, numerics="fp32-master") if is_unknown else run, cluster)


def _other_meshes(run: PredictedRun) -> Iterator[tuple[PredictedRun, int]]:
    """Yield the run on each other mesh of its ranks, with the elements that a rank there keeps of all parameters."""
    own_split, host_divisors = format_split(run), divisors(run.ranks_per_host)
    cp_sizes = host_divisors if run.seq_len >= LONG_SEQUENCE else [1]
    pp_sizes = [size for size in divisors(run.world) if size <= MAX_PIPELINE_RANKS]
    schedules: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")
    for tp, cp, pp, strategy, schedule in itertools.product(
        host_divisors, cp_sizes, pp_sizes, MESH_STRATEGIES, schedules
    ):
        if schedule != "1f1b" and pp == 1:
            continue
        parallel = Parallel(strategy=strategy, tp=tp, cp=cp, pp=pp, pp_schedule=schedule)
        spec = parallel.strategy_spec
        try:
            axes = Axes.from_parallel(parallel, run.world, run.ranks_per_host)
        except UserError:  # the ranks cannot be split so
            continue
        layout = dataclasses.replace(
            run, tp=tp, cp=cp, pp=pp, pp_schedule=schedule, dp_shard=axes.dp_shard if axes.dp_replicate > 1 else 0,
            keeps_weights=spec.keeps_weights_gathered, reduces_each=spec.reduces_every_microbatch, fsdp_unit="layer",
            fsdp_embedding=True, prefetch=0, kept_by=0,
        )  # fmt: skip
        if format_split(layout) != own_split:
            yield layout, rank_elements(run.llama, axes, 0, parallel.virtual_stages)


def format_split(run: PredictedRun) -> str:
    """Format how a run's ranks are split, in the words of settings."""
    words = [str(run.axes)]
    if run.pp > 1 and run.pp_schedule != "1f1b":
        words.append(run.pp_schedule)
    if run.keeps_weights:
        words.append("zero2" if run.reduces_each else "zero1")
    return ", ".join(words)


def split_label(run: PredictedRun) -> str:
    """Return how a run's ranks are split; '' for plain FSDP."""
    return format_split(run) if run.axes.label or run.keeps_weights else ""


def untested_features(run: PredictedRun) -> str:
    """Return the settings of a run, besides FSDP, that were tested on one GPU at most; '': none."""
    words = (
        split_label(run),
        f"--optimizer.kind {run.optimizer}" * (run.optimizer != "adamw"),
        "--model.loss chunked" * (run.loss == "chunked"),
        "--model.activations host" * (run.activations == "host"),
        "--model.compile true" * run.compiled,
        f"--parallel.numerics {run.numerics}" * (run.numerics in ("fp8", "bf16-stochastic")),
        f"--parallel.prefetch {run.prefetch}" * bool(run.prefetch),
        f"--parallel.reshard_after_forward {run.kept_by}" * bool(run.kept_by),
        f"--model.activation_checkpointing {run.recompute}" * (run.recompute != FULL_RECOMPUTE),
    )
    return ", ".join(filter(None, words))


def is_near_fastest(prediction: Prediction, fastest: float) -> bool:
    """Check whether a prediction cannot be told apart from the fastest, in tokens/s."""
    return prediction.tokens_per_s is not None and prediction.tokens_per_s >= fastest * (1 - NEAR_SHARE)


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in order."""
    small = [divisor for divisor in range(1, math.isqrt(n) + 1) if n % divisor == 0]
    return sorted({*small, *(n // divisor for divisor in small)})


def resolve_auto(
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
    config = _resolve_mesh(config, llama, world, ranks_per_host, cluster, ram_bytes)
    if not config.model.is_recompute_auto:
        return config
    recompute = FULL_RECOMPUTE
    if cluster and not cluster.gpu.is_cpu and can_predict(config):
        axes = Axes.from_parallel(config.parallel, world, ranks_per_host)
        run = PredictedRun.from_config(llama, with_global_batch(config, axes), world, ranks_per_host, axes)
        recompute = keep_most_activations(Prediction.from_run(run, cluster, ram_bytes)).run.recompute
    return dataclasses.replace(config, model=dataclasses.replace(config.model, activation_checkpointing=str(recompute)))


def _resolve_mesh(
    config: Config,
    llama: Llama,
    world: int,
    ranks_per_host: int,
    cluster: Cluster | None,
    ram_bytes: float,
) -> Config:
    """Return a configuration with its mesh resolved.

    auto: FSDP over all ranks if that fits, as no GPU has run more, with another micro-batch if need be; else the fastest mesh that fits.
    3d: the fastest with tp and pp. On CPUs, and on GPUs that are in no table, the fastest on H100s. If nothing surely fits, what comes
    nearest to it.
    """
    if not config.parallel.strategy_spec.is_auto:
        return config
    fsdp_config = with_global_batch(
        dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, strategy="fsdp2")), Axes(world)
    )
    run = PredictedRun.from_config(llama, fsdp_config, world, ranks_per_host)
    best = base = Prediction.from_run(run, cluster or Cluster(), ram_bytes)
    if config.parallel.strategy == "3d":
        meshes = fastest_meshes(base, (run.offload,), 1, is_3d=True)
        if not meshes:
            raise UserError(
                f"--parallel.strategy: {pluralize(world, 'rank')} of this model cannot be split by tp and pp, which 3d needs; "
                "use auto or fsdp2"
            )
        return _with_layout(fsdp_config, meshes[0].run)
    if base.fit < Fit.RETRIES:
        sizes = map(base.with_run, runnable_runs(run, base.cluster, (run.offload,), (run.moments,)))
        best = max([base, *sizes], key=lambda option: (option.fit, -_comparable_s(option.run, option.cluster)))
    if best.fit < Fit.RETRIES:
        meshes = fastest_meshes(base, (run.offload,), 1)
        best = next((mesh for mesh in meshes if best.fit is Fit.NO or mesh.fit > best.fit), best)
    return _with_layout(fsdp_config, best.run)


def _with_layout(config: Config, run: PredictedRun) -> Config:
    """Return a configuration with the mesh and the micro-batch of a run; all else, such as what is still auto, stays."""
    applied = run.apply_to(config)
    return dataclasses.replace(config, parallel=applied.parallel, training=applied.training)


def find_model_shape(requested: Config, preset: str) -> models.Llama | None:
    """Return the requested model's shape, from its directory or its preset; None: unknown.

    Raises:
        UserError: The directory's config.json cannot be used, or it has fewer layers than are asked for.
    """
    architectures = json.loads((config.PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))
    directory = Path(requested.model.path)
    if (directory / "config.json").is_file():
        return models.read_llama(directory, requested.model.layers)
    if preset not in architectures:
        return None
    llama = models.parse_llama(architectures[preset], preset)
    if requested.model.layers > llama.layers:
        raise UserError(
            f"--model.layers: {requested.model.layers}, but {preset} has {llama.layers}; lower it, or omit it"
        )
    return dataclasses.replace(llama, layers=requested.model.layers or llama.layers)
