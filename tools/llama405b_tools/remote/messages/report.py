"""Asking the head of a run for all that a report of it shows. Pure."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from llama405b.contract.accounting import Account, Attempt
from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.events import RunEvent
from llama405b.contract.mesh import Axes
from llama405b.contract.reader import LINES
from llama405b.contract.records import EvaluationMetrics, Metrics, Sample

MOST_POINTS = 1500  # of a curve: more than a screen has columns
MOST_SAMPLES = 200
MEANS = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Steps of one attempt that follow each other: the means of what ``Metrics`` says of each, and of some the range."""

    attempt: int
    step: int  # the last one
    time: float  # its end
    steps: int  # how many
    loss: float
    loss_low: float
    loss_high: float
    grad_norm: float
    grad_norm_high: float
    lr: float
    tokens_per_s: float
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: float  # the most so far, not a mean
    allocated_bytes: float
    # what the user's module added, of all that have it
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def began(self) -> float:
        """When its first step began."""
        return self.time - self.steps * self.step_s


@dataclasses.dataclass(frozen=True, slots=True)
class ReportReply:
    """What a run's files say."""

    now: float
    created: float  # by the operator's clock
    owner: str
    attempt: int  # the newest
    hosts: tuple[tuple[str, int], ...]  # and the ranks of each
    mesh: Axes | None
    expected_step_s: float  # as predicted at its launch; 0: nothing was
    alive: bool
    attempts: tuple[Attempt, ...]
    account: Account | None
    points: tuple[Point, ...]
    last: Metrics | None
    evaluations: tuple[tuple[int, float, float], ...]  # step, time, loss
    events: tuple[RunEvent, ...]  # of rank 0
    samples: tuple[Sample, ...]  # the last ones
    settings: str = dataclasses.field(metadata=LINES)  # config.toml
    gpu: str  # name of the first one; "": there is none, or nothing is said
    checkpoint: str  # the newest complete one
    versions: Mapping[str, str]  # by package, of what wrote that
    learns: RunIdentity | None  # the model's and the data's fingerprints there; None: unknown


def points_of(steps: Sequence[Metrics], most: int = MOST_POINTS) -> Iterator[Point]:
    """Yield steps, several of an attempt as one where there are more than ``most``."""
    each = -(-len(steps) // most) if steps else 1
    begin = 0
    for end in range(1, len(steps) + 1):
        full = end - begin == each
        if end == len(steps) or full or steps[end].attempt != steps[begin].attempt:
            yield _point(steps[begin:end])
            begin = end


def mean_of(values: Sequence[float]) -> float:
    """Return their mean."""
    return float(sum(values)) / len(values)


def _own(steps: Sequence[Metrics]) -> dict[str, float]:
    names = dict.fromkeys(itertools.chain.from_iterable(step.own for step in steps))
    return {name: mean_of([step.own[name] for step in steps if name in step.own]) for name in names}


def _point(steps: Sequence[Metrics]) -> Point:
    def mean(field: str) -> float:
        return mean_of([getattr(step, field) for step in steps])

    last, losses, norms = steps[-1], [step.loss for step in steps], [step.grad_norm for step in steps]
    return Point(
        attempt=last.attempt,
        step=last.step,
        time=last.time,
        steps=len(steps),
        loss_low=min(losses),
        loss_high=max(losses),
        grad_norm_high=max(norms),
        peak_bytes=last.peak_bytes,
        allocated_bytes=last.peak_allocated_bytes,
        own=_own(steps),
        **{field: mean(field) for field in MEANS},
    )


def evaluations_of(lines: Sequence[Metrics | EvaluationMetrics]) -> Iterator[tuple[int, float, float]]:
    """Yield the step, the time and the loss of each evaluation that gave a number."""
    for line in lines:
        if line.evaluation_loss is not None:
            yield line.step, line.time, line.evaluation_loss
