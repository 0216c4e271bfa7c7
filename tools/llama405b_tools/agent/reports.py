"""What the head knows of a run for accounts and reports: how its time was spent, its metrics and events."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from llama405b.contract.accounting import Account, Attempt, CountedStep, account_time, is_failure
from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.files import UNLIMITED, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import LINES
from llama405b.contract.records import (
    METRICS_LINE,
    Cause,
    CauseKind,
    EvaluationMetrics,
    EventKind,
    FailureRecord,
    Metrics,
    PromptSample,
    RunEvent,
    SequencePreview,
)
from llama405b.settings.axes import Axes
from llama405b.spec.plan import Expected, read_plan
from llama405b_tools.agent.describe import first_launch_time, is_run_alive, list_ends, load_manifest, newest_checkpoint
from llama405b_tools.agent.machine import first_gpu, list_working_gpus
from llama405b_tools.agent.processes import resolve_run_dir

MAX_POINTS = 1500  # of a curve: more than a screen has columns
MAX_SAMPLES = 200
MEAN_FIELDS = ("loss", "grad_norm", "lr", "rate", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s")


@dataclasses.dataclass(frozen=True, slots=True)
class CurvePoint:
    """Consecutive steps of one attempt: the means of their ``Metrics``, and for some values the range."""

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
    rate: float  # tokens per second, also those that are only read
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
    def start_time(self) -> float:
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
    expected: Expected  # as predicted at its newest launch
    alive: bool
    attempts: tuple[Attempt, ...]
    account: Account | None
    points: tuple[CurvePoint, ...]
    last: Metrics | None
    evaluations: tuple[tuple[int, float, float], ...]  # step, time, loss
    events: tuple[RunEvent, ...]  # of rank 0
    samples: tuple[PromptSample, ...]  # the last ones
    sequences: tuple[SequencePreview, ...]  # the first ones
    settings: str = dataclasses.field(metadata=LINES)  # config.toml
    gpu: str  # name of the first one; "": there is none, or nothing is said
    checkpoint: str  # the newest complete one
    versions: Mapping[str, str]  # by package, of what wrote that
    learns: RunIdentity | None  # the model's and the data's fingerprints there; None: unknown


def iterate_points(steps: Sequence[Metrics], max_points: int = MAX_POINTS) -> Iterator[CurvePoint]:
    """Yield the steps as points; merge steps of an attempt if there are more than ``max_points``."""
    group_size = -(-len(steps) // max_points) if steps else 1
    start = 0
    for end in range(1, len(steps) + 1):
        is_full = end - start == group_size
        if end == len(steps) or is_full or steps[end].attempt != steps[start].attempt:
            yield _merge_steps(steps[start:end])
            start = end


def mean_value(values: Sequence[float]) -> float:
    """Return the mean of the values."""
    return float(sum(values)) / len(values)


def _mean_own_metrics(steps: Sequence[Metrics]) -> dict[str, float]:
    names = dict.fromkeys(itertools.chain.from_iterable(step.own for step in steps))
    return {name: mean_value([step.own[name] for step in steps if name in step.own]) for name in names}


def _merge_steps(steps: Sequence[Metrics]) -> CurvePoint:
    def mean(field: str) -> float:
        return mean_value([getattr(step, field) for step in steps])

    last, losses, norms = steps[-1], [step.loss for step in steps], [step.grad_norm for step in steps]
    return CurvePoint(
        attempt=last.attempt,
        step=last.step,
        time=last.time,
        steps=len(steps),
        loss_low=min(losses),
        loss_high=max(losses),
        grad_norm_high=max(norms),
        peak_bytes=last.peak_bytes,
        allocated_bytes=last.peak_allocated_bytes,
        own=_mean_own_metrics(steps),
        **{field: mean(field) for field in MEAN_FIELDS},
    )


def iterate_evaluations(lines: Sequence[Metrics | EvaluationMetrics]) -> Iterator[tuple[int, float, float]]:
    """Yield the step, the time and the loss of each evaluation that gave a number."""
    for line in lines:
        if line.evaluation_loss is not None:
            yield line.step, line.time, line.evaluation_loss


def account_of(run: str, host: str) -> Account | None:
    """Return how the run's time was spent, from the files of the host of rank 0; None if it has no metrics."""
    run_dir = resolve_run_dir(run)
    plan = read_plan(run_dir)
    steps = [line for line in read_records(METRICS_LINE, run_dir.metrics, UNLIMITED) if isinstance(line, Metrics)]
    attempts = list_attempts(run_dir, host, plan.attempt, steps, alive=is_run_alive(run_dir, plan, host))
    return account_of_attempts(run_dir, host, attempts, steps, plan.world_size)


def account_of_attempts(
    run: RunDir, host: str, attempts: Sequence[Attempt], steps: Sequence[Metrics], world: int
) -> Account | None:
    """Return how the time of a run's attempts was spent until now; None if no step was taken."""
    start = first_launch_time(run, host)
    steps_taken = [CountedStep(step.attempt, step.time, step.step_s) for step in steps]
    return account_time(start, attempts, steps_taken, world, time.time()) if start and steps_taken else None


def list_attempts(
    run: RunDir, host: str, newest_attempt: int, steps: Sequence[Metrics], *, alive: bool
) -> list[Attempt]:
    """Return a run's launches, as a host knows them."""
    ends = {end.attempt: end for end in list_ends(run, host)}
    blames = {blame.attempt: blame for blame in read_records(FailureRecord, run.blames(host), UNLIMITED)}
    last_step_times = {step.attempt: step.time for step in steps}
    blocked_by_attempt = dict.fromkeys(range(1, newest_attempt + 1), 0.0)
    for event in read_records(RunEvent, run.events("rank-0"), UNLIMITED):
        if event.kind is EventKind.SAVED and event.attempt in blocked_by_attempt:
            blocked_by_attempt[event.attempt] += event.blocked_s
    attempts = []
    for number, saves_s in blocked_by_attempt.items():
        end = ends.get(number)
        if number == newest_attempt and alive:
            attempts.append(Attempt(number, saves_s=saves_s))
            continue
        if end:
            cause, end_time = (end.cause if is_failure(end.cause) else None), end.time
        else:  # the host died with it
            cause = Cause(CauseKind.VANISHED, host)
            end_time = (
                last_step_times.get(number)
                or (attempts[-1].ended if attempts else None)
                or first_launch_time(run, host)
            )
        if blame := blames.get(number):
            cause, end_time = blame.cause, blame.time or end_time
        attempts.append(Attempt(number, end_time, cause, saves_s))
    return attempts


def report_of(run: str, host: str) -> ReportReply:
    """Return the contents of the run's files, with curves reduced to what a screen can show."""
    run_dir = resolve_run_dir(run)
    plan = read_plan(run_dir)
    lines, alive = read_records(METRICS_LINE, run_dir.metrics, UNLIMITED), is_run_alive(run_dir, plan, host)
    steps = [line for line in lines if isinstance(line, Metrics)]
    attempts = list_attempts(run_dir, host, plan.attempt, steps, alive=alive)
    checkpoint, settings = newest_checkpoint(run_dir, plan), ""
    manifest = load_manifest(checkpoint) if checkpoint else None
    with contextlib.suppress(OSError):
        settings = run_dir.config.read_text(encoding="utf-8")
    return ReportReply(
        now=time.time(),
        created=plan.created,
        owner=plan.owner,
        attempt=plan.attempt,
        hosts=tuple((node.name, node.slots) for node in plan.nodes),
        mesh=plan.mesh,
        expected=plan.expected,
        alive=alive,
        attempts=tuple(attempts),
        account=account_of_attempts(run_dir, host, attempts, steps, plan.world_size),
        points=tuple(iterate_points(steps)),
        last=steps[-1] if steps else None,
        evaluations=tuple(iterate_evaluations(lines)),
        events=tuple(read_records(RunEvent, run_dir.events("rank-0"), UNLIMITED)),
        samples=tuple(read_records(PromptSample, run_dir.samples, MAX_SAMPLES)),
        sequences=tuple(read_records(SequencePreview, run_dir.sequences, UNLIMITED)),
        settings=settings,
        gpu="" if plan.slurm_job else first_gpu(list_working_gpus()[0])[0],  # a job's files are read on another machine
        checkpoint=str(checkpoint or ""),
        versions=dict(manifest.versions) if manifest else {},
        learns=manifest.identity if manifest else None,
    )
