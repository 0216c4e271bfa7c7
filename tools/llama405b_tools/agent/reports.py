"""What the head knows of a run for accounts and reports: how its time was spent, its metrics and events."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from llama405b.contract.accounting import Account, Attempt, StepTaken, account, is_failure
from llama405b.contract.checkpoints import (
    RunIdentity,
    newest_complete,
)
from llama405b.contract.files import EVERY, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import LINES
from llama405b.contract.records import (
    METRICS_LINE,
    Blame,
    Cause,
    CauseKind,
    EvaluationMetrics,
    EventKind,
    Metrics,
    RunEvent,
    Sample,
)
from llama405b.settings.axes import Axes
from llama405b.spec.plan import read_plan
from llama405b_tools.agent.describe import checkpoints_of, ends_of, lives, manifest_of
from llama405b_tools.agent.machine import first_gpu, gpus
from llama405b_tools.agent.messages import (
    AccountReply,
    HeadRequest,
)
from llama405b_tools.agent.processes import run_of

MOST_POINTS = 1500  # of a curve: more than a screen has columns
MOST_SAMPLES = 200
MEANS = ("loss", "grad_norm", "lr", "rate", "step_s", "data_s", "forward_s", "backward_s", "optimizer_s")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
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
    """Yield the steps as points; merge steps of an attempt if there are more than ``most``."""
    each = -(-len(steps) // most) if steps else 1
    begin = 0
    for end in range(1, len(steps) + 1):
        full = end - begin == each
        if end == len(steps) or full or steps[end].attempt != steps[begin].attempt:
            yield _point(steps[begin:end])
            begin = end


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the values."""
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


def account_of(request: HeadRequest) -> AccountReply:
    """Return how the run's time was spent."""
    run = run_of(request.run)
    plan = read_plan(run)
    steps = [line for line in read_records(METRICS_LINE, run.metrics, EVERY) if isinstance(line, Metrics)]
    attempts = attempts_of(run, request.host, plan.attempt, steps, alive=lives(run, plan, request.host))
    return AccountReply(account_of_attempts(run, request.host, attempts, steps, plan.world))


def account_of_attempts(
    run: RunDir, host: str, attempts: Sequence[Attempt], steps: Sequence[Metrics], world: int
) -> Account | None:
    """Return how the time of a run's attempts was spent until now; None if no step was taken."""
    began = _first_launched(run, host)
    taken = [StepTaken(step.attempt, step.time, step.step_s) for step in steps]
    return account(began, attempts, taken, world, time.time()) if began and taken else None


def _first_launched(run: RunDir, host: str) -> float:
    """Return when the first attempt began there; 0 if unknown."""
    with contextlib.suppress(OSError):
        return run.lock(host).stat().st_mtime  # its node runner made it, and nothing is ever written into it
    return 0.0


def attempts_of(run: RunDir, host: str, newest: int, steps: Sequence[Metrics], *, alive: bool) -> list[Attempt]:
    """Return a run's launches, as a host knows them."""
    ends = {end.attempt: end for end in ends_of(run, host)}
    blames = {blame.attempt: blame for blame in read_records(Blame, run.blames(host), EVERY)}
    last = {step.attempt: step.time for step in steps}
    saves = dict.fromkeys(range(1, newest + 1), 0.0)
    for event in read_records(RunEvent, run.events("rank-0"), EVERY):
        if event.kind is EventKind.SAVED and event.attempt in saves:
            saves[event.attempt] += event.blocked_s
    found = []
    for number, saves_s in saves.items():
        end = ends.get(number)
        if number == newest and alive:
            found.append(Attempt(number, saves_s=saves_s))
            continue
        if end:
            cause, ended = (end.cause if is_failure(end.cause) else None), end.time
        else:  # the host died with it
            cause = Cause(CauseKind.VANISHED, host)
            ended = last.get(number) or (found[-1].ended if found else None) or _first_launched(run, host)
        if blame := blames.get(number):
            cause, ended = blame.cause, blame.time or ended
        found.append(Attempt(number, ended, cause, saves_s))
    return found


def report_of(request: HeadRequest) -> ReportReply:
    """Return the contents of the run's files, with curves reduced to what a screen can show."""
    run = run_of(request.run)
    plan = read_plan(run)
    lines, alive = read_records(METRICS_LINE, run.metrics, EVERY), lives(run, plan, request.host)
    steps = [line for line in lines if isinstance(line, Metrics)]
    attempts = attempts_of(run, request.host, plan.attempt, steps, alive=alive)
    saved, settings = None, ""
    with contextlib.suppress(OSError):
        saved = newest_complete(checkpoints_of(run, plan))
    manifest = manifest_of(saved) if saved else None
    with contextlib.suppress(OSError):
        settings = run.config.read_text(encoding="utf-8")
    return ReportReply(
        now=time.time(),
        created=plan.created,
        owner=plan.owner,
        attempt=plan.attempt,
        hosts=tuple((node.name, node.slots) for node in plan.nodes),
        mesh=plan.mesh,
        expected_step_s=plan.expected_step_s,
        alive=alive,
        attempts=tuple(attempts),
        account=account_of_attempts(run, request.host, attempts, steps, plan.world),
        points=tuple(points_of(steps)),
        last=steps[-1] if steps else None,
        evaluations=tuple(evaluations_of(lines)),
        events=tuple(read_records(RunEvent, run.events("rank-0"), EVERY)),
        samples=tuple(read_records(Sample, run.samples, MOST_SAMPLES)),
        settings=settings,
        gpu="" if plan.slurm_job else first_gpu(gpus()[0])[0],  # a job's files are read on another machine
        checkpoint=str(saved or ""),
        versions=dict(manifest.versions) if manifest else {},
        learns=manifest.identity if manifest else None,
    )
