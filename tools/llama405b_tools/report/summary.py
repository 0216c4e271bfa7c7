"""The values that a report shows: a run's state, throughput, events, cost and idle GPUs. Pure."""

import dataclasses
import statistics
import tomllib
from collections.abc import Iterator, Sequence

from llama405b.contract.accounting import SLOW_S, SLOW_STEPS, Account, Use, is_failure
from llama405b.contract.errors import counted, given
from llama405b.contract.records import EventKind, RunEvent, words
from llama405b_tools.agent.reports import Point, ReportReply
from llama405b_tools.parsers import bf16_flops
from llama405b_tools.run.judge import Failure, failure_words, log_words
from llama405b_tools.run.query import incident_words
from llama405b_tools.text.figures import span
from llama405b_tools.text.words import clean

LAST = 10  # steps averaged for the latest value of a curve
LEAST_IDLE_S = 300.0  # after a run's end, before idle hosts are mentioned
USES = {
    Use.TRAINING: "steps that count",
    Use.STARTING: "starting: reading data, loading weights",
    Use.SAVING: "steps that waited for a save, and saving at a stop",
    Use.PAUSES: "between steps: evaluations, profiles",
    Use.SLOW: "steps that stalled",
    Use.FAILURES: "failures: steps taken again, hang, restart, loading",
    Use.RESTARTS: "requested restarts",
    Use.WAITING: "since the last step",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Happened:
    """An event of the run: time, kind and text."""

    time: float
    kind: str
    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run's reply and price, and the values that a report derives from them."""

    run: str
    reply: ReportReply
    price: float  # of a GPU-hour; 0: unknown
    logs: str = "llama405b logs"  # the command that shows its logs

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(ranks for _, ranks in self.reply.hosts)

    @property
    def unit(self) -> str:
        """The unit of cost: GPU-h, or rank-h without GPUs."""
        return "GPU-h" if self.reply.gpu else "rank-h"

    @property
    def ended(self) -> float | None:
        """When the last attempt ended; None while the run is alive."""
        last = self.reply.attempts[-1] if self.reply.attempts else None
        return last.ended if last and not self.reply.alive else None

    @property
    def began(self) -> float:
        """When the run was first launched, as far as is known."""
        if self.reply.account:
            return self.reply.account.began
        return self.reply.points[0].time if self.reply.points else self.reply.created

    @property
    def idle_s(self) -> float:
        """Seconds since the run ended; 0 while it is alive."""
        return 0.0 if self.ended is None else max(0.0, self.reply.now - self.ended)

    @property
    def steps(self) -> int | None:
        """The number of steps that the settings ask for; None if they do not say."""
        found = tomllib.loads(self.reply.settings).get("training", {}).get("max_steps", 0)
        return found or None

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers that also receive the metrics."""
        return tuple(tomllib.loads(self.reply.settings).get("tracking", {}).get("to", ()))

    @property
    def planned_tokens_per_s(self) -> float | None:
        """Tokens/s that the plan predicted; None without a plan."""
        last = self.reply.last
        return last.rate * last.step_s / self.reply.expected_step_s if last and self.reply.expected_step_s else None

    @property
    def slow(self) -> list[tuple[Point, float]]:
        """The points with a far slower step than usual (see ``accounting``), and their usual seconds."""
        usual_s = statistics.median([point.step_s for point in self.reply.points] or [0.0])
        least_s = max(SLOW_S, SLOW_STEPS * usual_s) - usual_s
        usual = [(point, point.steps * usual_s) for point in self.reply.points]
        return [(point, its_s) for point, its_s in usual if point.time - point.began - its_s > least_s]

    @property
    def ending(self) -> list[Point]:
        """The last points, covering at least ``LAST`` steps if there are that many; newest first."""
        found = list[Point]()
        for point in reversed(self.reply.points):
            if sum(each.steps for each in found) >= LAST:
                break
            found.append(point)
        return found

    @property
    def last_steps(self) -> int:
        """The number of steps that ``last`` averages."""
        return sum(point.steps for point in self.ending)

    def last(self, field: str) -> float:
        """Return the mean of a field over the last steps."""
        return float(sum(point.steps * getattr(point, field) for point in self.ending)) / self.last_steps

    def mfu(self, rate: float | None) -> float | None:
        """Return model FLOPs utilization in percent: the model's FLOPs over the GPUs' peak; None if unknown."""
        peak, last = bf16_flops(self.reply.gpu), self.reply.last
        if not (peak and last and last.flops_per_token and rate):
            return None
        return 100 * rate * last.flops_per_token / (peak * self.world)

    def cost(self, seconds: float) -> float | None:
        """Return the cost of running all ranks for this long; None without a price."""
        return self.price * seconds * self.world / 3600 if self.price else None


def state_words(found: Summary) -> str:
    """Describe the run's state."""
    reply = found.reply
    step = reply.last.step if reply.last else 0
    of = given(" of {}", found.steps)
    if reply.alive:
        return f"running, step {step}{of}"
    last = reply.attempts[-1] if reply.attempts else None
    if last and is_failure(last.cause):
        failure = Failure(last.cause.host, last.cause)
        return f"failed after step {step}{of}: {failure_words(failure)}{log_words(failure, found.logs)}"
    return f"ended after step {step}{of}, {span(found.idle_s)} ago"


def idle_words(found: Summary) -> str:
    """Describe what idle hosts have cost since the run ended; "" if that is little or the run is alive."""
    if found.idle_s < LEAST_IDLE_S or not (found.reply.gpu or found.price):
        return ""
    hours, cost = found.idle_s * found.world / 3600, given(", {:,.2f}", found.cost(found.idle_s))
    what = counted(found.world, "GPU" if found.reply.gpu else "rank")
    return (
        f"the run ended {span(found.idle_s)} ago; if nothing else runs on its {what}, they have been idle for "
        f"{hours:,.1f} {found.unit}{cost}"
    )


def happened(found: Summary) -> list[Happened]:
    """Return all events by time: those rank 0 reported, each attempt's failure, and stalled steps."""
    told = [Happened(event.time, event.kind, event_words(event)) for event in found.reply.events]
    account = found.reply.account
    failed = [Happened(each.failed, "failed", incident_words(each)) for each in (account.incidents if account else ())]
    slow = [
        Happened(
            each.began, Use.SLOW, f"{step_words(each)} took {span(each.time - each.began)}, usually {span(usual_s)}"
        )
        for each, usual_s in found.slow
    ]
    return sorted([*told, *failed, *slow], key=lambda each: each.time)


def step_words(point: Point) -> str:
    """Name the steps of a point: ``step 7``, ``steps 5-7``."""
    return f"step {point.step}" if point.steps == 1 else f"steps {point.step - point.steps + 1}-{point.step}"


def event_words(event: RunEvent) -> str:
    """Describe an event that rank 0 reported."""
    step, name = event.step, event.path.rpartition("/")[2]
    said = {
        EventKind.STARTED: "training started from the model's weights",
        EventKind.RESUMED: f"resumed from {name}",
        EventKind.PASSED_OVER: f"skipped {name}",
        EventKind.SAVED: f"saved {name} in {span(event.took_s)}, of which training waited {span(event.blocked_s)}",
        EventKind.NOT_SAVED: f"step {step} was not saved",
        EventKind.NOT_WRITTEN: f"{counted(event.count, 'line')} of metrics up to step {step} were lost",
        EventKind.AFTER_SAVE: f"checkpoint.after_save succeeded{given(' for step {}', step)}",
        EventKind.AFTER_SAVE_FAILED: "checkpoint.after_save failed",
        EventKind.BUDGET: "most of the GPU-hour budget is spent",
        EventKind.SPIKE: f"the loss of step {step} was far above the recent ones",
        EventKind.NOT_FINITE: f"the loss or gradient of step {step} was not finite",
        EventKind.SKIPPED: f"step {step} was skipped: all its targets are masked",
        EventKind.STOPPED: f"stopped after step {step}",
        EventKind.ANSWERED: f"carried out a request after step {step}",
    }.get(event.kind, str(event.kind))
    why = words(event.cause) if event.cause else ""
    return clean(said + given(": {}", event.detail or why))


def spent(account: Account) -> Iterator[tuple[Use, float]]:
    """Yield each use of the time with its seconds, if any."""
    for use in USES:
        if account.seconds.get(use, 0.0) > 0:
            yield use, account.seconds[use]


def by_attempt(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the points of each attempt."""
    for number in sorted({point.attempt for point in points}):
        yield [point for point in points if point.attempt == number]
