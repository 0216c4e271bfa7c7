"""Choose which settings to try next on real hosts, by predictions and by what was measured so far. Pure.

The logarithm of measured over predicted time is a Gaussian process (Rasmussen and Williams, 2006, chapter 2): what all settings have in
common, what those with the same value of an axis have, and what a measurement is off by. Next comes the candidate with the largest
expected improvement (Jones, Schonlau and Welch, 1998).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from llama405b.contract.reader import AS_WRITTEN
from llama405b.predict.calibration import MORE_LAYERS, STEP_PARTS, MeasuredStep, extrapolate
from llama405b.predict.estimate import Cluster
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.search import (
    Fit,
    Prediction,
    fastest_meshes,
    format_split,
    is_runnable,
    single_changes,
    variants,
)
from llama405b.settings.axes import Recompute

MAX_CANDIDATES = 24
MAX_OF_SPLIT = 6  # candidates with one way to split the ranks, besides that as asked; more where others are lacking
MAX_TRIALS = 12
MAX_LAYERS = 8  # with which to try a run; pipelines of more stages are left out
MESHES = 8  # ways to split the ranks among the candidates
CHANGED_RUNS = 3  # of the fastest, whose single changes are candidates, too
MIN_GAIN = 0.002  # expected improvement, as a share of the fastest: below it, another trial is not worth its time
COMMON_SD = 3.0  # of the logarithm: machines may have no data sheet
SLOPE_SD = 0.5  # of how much larger or smaller differences are than predicted: on CPUs that are no GPUs by far
AXIS_SD, NOISE_SD = 0.1, 0.02
AXIS_SCALES = (0.5, 1.0, 2.0, 4.0)  # factors on ``AXIS_SD``, weighted by how likely they are: one is taken too early
LOSS_TOLERANCE, NORM_TOLERANCE = 5e-3, 5e-2  # relative: kernels and meshes round differently in BF16
COMPARED_STEPS = 2
FAILED_FACTOR = 2.0  # on the longest time: what a failure counts as
Trait = str | float


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that may be tried."""

    label: str
    flags: tuple[str, ...]  # what differs from the settings as asked
    traits: dict[str, Trait]  # the value of each axis of the search; numbers that are close are alike
    predicted_s: float  # of a step; 0: unknown
    layers: tuple[int, ...]  # the numbers of layers to measure with


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What settings gave: medians of steps with few layers and with more, or why they failed."""

    points: tuple[MeasuredStep, ...] = ()
    first_steps: tuple[float, ...] = ()  # losses, then gradient norms
    fault: str = ""  # where, and why


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """What is to be tried, and what already was."""

    flags: tuple[str, ...] = dataclasses.field(metadata=AS_WRITTEN)  # the settings as asked
    candidates: tuple[Candidate, ...]
    layers: int  # of the whole model
    compared_layers: int = 0  # the number of layers with which first steps are compared; 0: they are not
    at_most: int = MAX_TRIALS
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of a step, by label; 0: it failed

    def next(self) -> Candidate | None:
        """Return the candidate to try next; None: no other is likely to be faster, or as many were tried as may be."""
        untried = [candidate for candidate in self.candidates if candidate.label not in self.seconds]
        if not untried or len(self.seconds) >= self.at_most:
            return None
        longest_s = max(self.seconds.values(), default=0.0)
        measured = [
            (candidate, self.seconds[candidate.label] or FAILED_FACTOR * longest_s)  # what is like it may fail, too
            for candidate in self.candidates
            if candidate.label in self.seconds
        ]
        if not longest_s or not all(candidate.predicted_s for candidate in self.candidates):
            return untried[0]
        models = [_TimeModel(measured, scale * AXIS_SD) for scale in AXIS_SCALES]
        likeliest = max(model.log_likelihood for model in models)
        weights = [math.exp(model.log_likelihood - likeliest) for model in models]

        def expected_gain(candidate: Candidate) -> float:
            gains = (weight * model.expected_gain(candidate) for weight, model in zip(weights, models, strict=True))
            return sum(gains) / sum(weights)

        best = max(untried, key=expected_gain)
        return best if expected_gain(best) >= MIN_GAIN else None

    def with_result(self, label: str, seconds: float) -> "Trials":
        """Return the trials after one more; ``seconds``: of a step, 0: it failed."""
        return dataclasses.replace(self, seconds=self.seconds | {label: seconds})

    def step_s(self, points: Sequence[MeasuredStep]) -> float:
        """Return the time of a step with all layers, of points in order of their layers."""
        return sum(extrapolate(points[0], points[-1], self.layers, attrgetter(part)) for part in STEP_PARTS)


class _TimeModel:
    """A Gaussian process of what predictions are off by."""

    def __init__(self, measured: Sequence[tuple[Candidate, float]], axis_sd: float) -> None:
        self.tried, self.axis_sd = [candidate for candidate, _ in measured], axis_sd
        self.center_s = self.tried[0].predicted_s
        self.best = math.log(min(seconds for _, seconds in measured))
        residuals = [math.log(seconds / candidate.predicted_s) for candidate, seconds in measured]
        self.lower = list[list[float]]()
        for row, a in enumerate(self.tried):  # the Cholesky factor, row by row
            known = self._solve([self._covariance(a, b) for b in self.tried[:row]])
            variance = self._covariance(a, a) + NOISE_SD**2 - sum(x * x for x in known)
            self.lower.append([*known, math.sqrt(variance)])
        self.whitened = self._solve(residuals)
        self.log_likelihood = -sum(x * x / 2 for x in self.whitened) - sum(math.log(row[-1]) for row in self.lower)

    def _covariance(self, a: Candidate, b: Candidate) -> float:
        likeness = sum(_likeness(value, b.traits[axis]) for axis, value in a.traits.items())
        contrast = math.log(a.predicted_s / self.center_s) * math.log(b.predicted_s / self.center_s)
        return COMMON_SD**2 + SLOPE_SD**2 * contrast + self.axis_sd**2 * likeness

    def _solve(self, right: Sequence[float]) -> list[float]:
        """Return the solution of the lower triangle's first rows."""
        solution = list[float]()
        for row, value in zip(self.lower, right, strict=False):
            solution.append((value - sum(x * y for x, y in zip(row, solution, strict=False))) / row[-1])
        return solution

    def expected_gain(self, candidate: Candidate) -> float:
        """Return by how much of the fastest a candidate is expected to be faster."""
        known = self._solve([self._covariance(candidate, other) for other in self.tried])
        mean = math.log(candidate.predicted_s) + sum(x * y for x, y in zip(known, self.whitened, strict=True))
        sd = math.sqrt(max(1e-12, self._covariance(candidate, candidate) - sum(x * x for x in known)))
        z = (self.best - mean) / sd
        share, density = (1 + math.erf(z / math.sqrt(2))) / 2, math.exp(-z * z / 2) / math.sqrt(math.tau)
        return (self.best - mean) * share + sd * density


def _likeness(a: Trait, b: Trait) -> float:
    """Return how alike two values of an axis are: 1 for the same; a half for numbers of which one is twice the other."""
    if isinstance(a, str) or isinstance(b, str) or not a or not b:
        return float(a == b)
    return math.exp2(-abs(math.log2(a / b)))


def find_candidates(asked: Prediction, cluster: Cluster) -> list[Prediction]:
    """Return the run as asked, and others that train the same steps, the fastest first, of those that may fit.

    ``cluster``: where they are to run; ``asked`` may be predicted for another one.
    """
    known = {option.run: option for option in (*variants(asked), *fastest_meshes(asked, at_most=MESHES))}
    for base in sorted(filter(_may_fit, known.values()), key=_predicted_s)[:CHANGED_RUNS]:
        changed = [run for _, _, run in single_changes(base.run)]
        changed += [dataclasses.replace(base.run, recompute=Recompute(kind)) for kind in ("none", "operators")]
        runs = [run for run in changed if _trains_the_same(run, asked.run) and is_runnable(run, cluster)]
        known |= {run: base.with_run(run) for run in runs if run not in known}
    others = [option for option in known.values() if is_runnable(option.run, cluster) and has_equal_layers(option.run)]
    chosen, rest = [asked] if _may_fit(asked) else [], list[Prediction]()
    count_by_split = collections.Counter[str]()
    for option in sorted(others, key=_predicted_s):
        layers = common_layers([*(each.run for each in chosen), option.run])
        is_short = layers <= max(MAX_LAYERS, _stages(asked.run))
        if option.run == asked.run or len(chosen) == MAX_CANDIDATES or not (is_short and _has_room(option)):
            continue
        count_by_split[format_split(option.run)] += 1
        (chosen if count_by_split[format_split(option.run)] <= MAX_OF_SPLIT else rest).append(option)
    found = [*chosen, *rest][:MAX_CANDIDATES]
    return [*found[:1], *sorted(found[1:], key=_predicted_s)]


def common_layers(runs: Iterable[PredictedRun]) -> int:
    """Return the number of layers with which all runs are tried: each pipeline stage has as many."""
    stages = math.lcm(*map(_stages, runs))
    return stages * math.ceil(MORE_LAYERS / stages)


def layers_to_try(run: PredictedRun, common: int) -> tuple[int, ...]:
    """Return two numbers of layers with which to try a run, in order; one is ``common`` to all runs, if the model has as many."""
    stages, layers = _stages(run), run.llama.layers
    counts = {min(layers, common), min(layers, stages if stages < common else 2 * common)}
    return tuple(sorted(counts))


def _stages(run: PredictedRun) -> int:
    return run.pp * run.virtual_stages if run.pp > 1 else 1


def has_equal_layers(run: PredictedRun) -> bool:
    """Check whether all layers recompute alike, so that a few tell about the others."""
    return len(run.recompute.count_kinds(run.stages or (run.llama.layers,))) == 1


def _may_fit(prediction: Prediction) -> bool:
    """Whether it fits by what is allocated."""
    return prediction.needs.gpu_bytes <= prediction.cluster.gpu.memory_bytes and prediction.ram_fit is not Fit.NO


def _has_room(prediction: Prediction) -> bool:
    """Whether it fits by what PyTorch reserves, too, as far as that is known; this takes long to find."""
    if not _may_fit(prediction):
        return False
    return prediction.kept_bytes <= prediction.cluster.gpu.memory_bytes or not prediction.knows_kept_bytes


def _predicted_s(prediction: Prediction) -> float:
    return prediction.needs.step_s or math.inf


def _trains_the_same(run: PredictedRun, asked: PredictedRun) -> bool:
    same = ("world", "global_batch", "numerics", "moments", "adapter")
    return all(getattr(run, name) == getattr(asked, name) for name in same)


def traits_of(run: PredictedRun) -> dict[str, Trait]:
    """Return the values of the axes that a search changes."""
    return {
        "split": format_split(run),
        "tp": float(run.tp),
        "cp": float(run.cp),
        "pp": float(run.pp),
        "copies": float(run.axes.dp_replicate),
        "micro_batch": float(run.micro_batch),
        "offload": run.offload,
        "unit": f"{run.fsdp_unit} {run.fsdp_embedding}",
        "recompute": str(run.recompute),
        "kernels": f"{run.loss} {run.fused} {run.compiled}",
        "activations": run.activations,
        "gathered": f"{run.prefetch} {run.kept_by} {run.keeps_weights}",
    }


def outliers(first_steps: Mapping[str, Sequence[float]], asked: str) -> list[str]:
    """Return the labels of those that compute something else than as asked, or if that was not measured, than most.

    ``first_steps``: losses, then gradient norms, by label.
    """
    followers = {
        label: [other for other in first_steps if _agree(first_steps[label], first_steps[other])]
        for label in first_steps
    }
    right = followers.get(asked, max(followers.values(), key=len, default=[]))
    return [label for label in first_steps if label not in right]


def _agree(a: Sequence[float], b: Sequence[float]) -> bool:
    tolerances = itertools.chain([LOSS_TOLERANCE] * COMPARED_STEPS, itertools.repeat(NORM_TOLERANCE))
    return all(abs(x - y) <= limit * abs(y) for x, y, limit in zip(a, b, tolerances, strict=False))
