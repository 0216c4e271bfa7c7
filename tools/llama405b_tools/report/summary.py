"""What a report says of a run, as values: how it stands, its curves against the time, its idle GPUs. Pure."""

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

LAST = 10  # steps whose mean stands for the end of a curve
LEAST_IDLE_S = 300.0  # after a run's end: from then on it is said
USES = {
    Use.TRAINING: "steps that count",
    Use.STARTING: "starting: reading data, loading weights",
    Use.SAVING: "steps that waited for a save, and saving at a stop",
    Use.PAUSES: "between steps: evaluations, profiles",
    Use.SLOW: "steps that hung for a while",
    Use.FAILURES: "failures: steps taken again, hang, restart, loading",
    Use.RESTARTS: "restarts that somebody asked for",
    Use.WAITING: "since the last step",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Happened:
    """Something at a moment."""

    time: float
    kind: str
    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run, as a report shows it."""

    run: str
    reply: ReportReply
    price: float  # of a GPU-hour; 0: unknown
    logs: str = "llama405b logs"  # the command that shows its logs

    @property
    def world(self) -> int:
        """Number of its ranks."""
        return sum(ranks for _, ranks in self.reply.hosts)

    @property
    def unit(self) -> str:
        """What an hour of a rank is called."""
        return "GPU-h" if self.reply.gpu else "rank-h"

    @property
    def ended(self) -> float | None:
        """When its last attempt ended; None if it lives."""
        last = self.reply.attempts[-1] if self.reply.attempts else None
        return last.ended if last and not self.reply.alive else None

    @property
    def began(self) -> float:
        """When it was launched first, as far as that is known."""
        if self.reply.account:
            return self.reply.account.began
        return self.reply.points[0].time if self.reply.points else self.reply.created

    @property
    def idle_s(self) -> float:
        """For how long its machines have trained nothing of it, since it ended."""
        return 0.0 if self.ended is None else max(0.0, self.reply.now - self.ended)

    @property
    def steps(self) -> int | None:
        """How many it is to take; None if its settings do not say."""
        found = tomllib.loads(self.reply.settings).get("training", {}).get("max_steps", 0)
        return found or None

    @property
    def trackers(self) -> tuple[str, ...]:
        """Where its numbers were sent, too."""
        return tuple(tomllib.loads(self.reply.settings).get("tracking", {}).get("to", ()))

    @property
    def planned_tokens_per_s(self) -> float | None:
        """What its plan predicted; None if there was none."""
        last = self.reply.last
        return last.rate * last.step_s / self.reply.expected_step_s if last and self.reply.expected_step_s else None

    @property
    def slow(self) -> list[tuple[Point, float]]:
        """The points with a step that took far longer than usual, as ``accounting`` counts it, and what they usually take."""
        usual_s = statistics.median([point.step_s for point in self.reply.points] or [0.0])
        least_s = max(SLOW_S, SLOW_STEPS * usual_s) - usual_s
        usual = [(point, point.steps * usual_s) for point in self.reply.points]
        return [(point, its_s) for point, its_s in usual if point.time - point.began - its_s > least_s]

    @property
    def ending(self) -> list[Point]:
        """The last points, of at least so many steps, if there are as many."""
        found = list[Point]()
        for point in reversed(self.reply.points):
            if sum(each.steps for each in found) >= LAST:
                break
            found.append(point)
        return found

    @property
    def last_steps(self) -> int:
        """Of how many steps ``last`` is the mean."""
        return sum(point.steps for point in self.ending)

    def last(self, field: str) -> float:
        """Return the mean of what the last steps say."""
        return float(sum(point.steps * getattr(point, field) for point in self.ending)) / self.last_steps

    def mfu(self, rate: float | None) -> float | None:
        """Model FLOPs utilization in percent: the model's FLOPs over the peak of the GPUs; None if these are not known."""
        peak, last = bf16_flops(self.reply.gpu), self.reply.last
        if not (peak and last and last.flops_per_token and rate):
            return None
        return 100 * rate * last.flops_per_token / (peak * self.world)

    def cost(self, seconds: float) -> float | None:
        """Return what seconds of all its ranks cost; None without a price."""
        return self.price * seconds * self.world / 3600 if self.price else None


def state_words(found: Summary) -> str:
    """Say how the run stands."""
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
    """Say what its machines cost since it ended, if they still run; "" if that is little, or it lives."""
    if found.idle_s < LEAST_IDLE_S or not (found.reply.gpu or found.price):
        return ""
    hours, cost = found.idle_s * found.world / 3600, given(", {:,.2f}", found.cost(found.idle_s))
    what = counted(found.world, "GPU" if found.reply.gpu else "rank")
    return (
        f"the run ended {span(found.idle_s)} ago; if nothing else runs on its {what}, they have been idle for "
        f"{hours:,.1f} {found.unit}{cost}"
    )


def happened(found: Summary) -> list[Happened]:
    """Return all that happened, by time: what rank 0 told, and each attempt's failure."""
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
    """Name the steps of a point."""
    return f"step {point.step}" if point.steps == 1 else f"steps {point.step - point.steps + 1}-{point.step}"


def event_words(event: RunEvent) -> str:
    """Say what rank 0 told."""
    step, name = event.step, event.path.rpartition("/")[2]
    said = {
        EventKind.STARTED: "training began, from the model's weights",
        EventKind.RESUMED: f"resumed from {name}",
        EventKind.PASSED_OVER: f"{name} was passed over",
        EventKind.SAVED: f"saved {name} in {span(event.took_s)}, of which training waited {span(event.blocked_s)}",
        EventKind.NOT_SAVED: f"step {step} was not saved",
        EventKind.NOT_WRITTEN: f"{counted(event.count, 'line')} of numbers up to step {step} were lost",
        EventKind.AFTER_SAVE: f"checkpoint.after_save succeeded{given(' for step {}', step)}",
        EventKind.AFTER_SAVE_FAILED: "checkpoint.after_save failed",
        EventKind.BUDGET: "most of the budget is spent",
        EventKind.SPIKE: f"the loss of step {step} was far above the last ones",
        EventKind.NOT_FINITE: f"the loss or gradient of step {step} was not finite",
        EventKind.SKIPPED: f"step {step} was skipped, as all its targets are masked",
        EventKind.STOPPED: f"stopped after step {step}",
        EventKind.ANSWERED: f"a request was carried out after step {step}",
    }.get(event.kind, str(event.kind))
    why = words(event.cause) if event.cause else ""
    return clean(said + given(": {}", event.detail or why))


def spent(account: Account) -> Iterator[tuple[Use, float]]:
    """Yield what the time went into, and the seconds, where there are any."""
    for use in USES:
        if account.seconds.get(use, 0.0) > 0:
            yield use, account.seconds[use]


def by_attempt(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the points of each attempt."""
    for number in sorted({point.attempt for point in points}):
        yield [point for point in points if point.attempt == number]
