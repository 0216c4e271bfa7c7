"""The values that a report shows: a run's state, throughput, events, cost and idle GPUs. Pure."""

import dataclasses
import statistics
import tomllib
from collections.abc import Iterator, Sequence

from llama405b.contract.accounting import SLOW_S, SLOW_STEPS, Account, TimeUse, is_failure
from llama405b.contract.errors import fmt_if, pluralize
from llama405b.contract.records import EventKind, RunEvent, describe_cause
from llama405b_tools.agent.reports import CurvePoint, ReportReply
from llama405b_tools.parsers import bf16_flops
from llama405b_tools.run.judge import Failure, failure_words, log_words
from llama405b_tools.run.query import incident_words
from llama405b_tools.text.figures import format_duration, hour_unit
from llama405b_tools.text.words import clean

GIB = 1 << 30
LAST_STEPS = 10  # steps averaged for the latest value of a curve
MIN_IDLE_S = 300.0  # after a run's end, before idle hosts are mentioned
USE_LABELS = {
    TimeUse.TRAINING: "steps that count",
    TimeUse.STARTING: "starting: reading data, loading weights",
    TimeUse.SAVING: "steps that waited for a save, and saving at a stop",
    TimeUse.PAUSES: "between steps: evaluations, profiles",
    TimeUse.SLOW: "steps that stalled",
    TimeUse.FAILURES: "failures: steps taken again, hang, restart, loading",
    TimeUse.RESTARTS: "requested restarts",
    TimeUse.WAITING: "since the last step",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ReportEvent:
    """An event of the run: time, kind and text."""

    time: float
    kind: str
    words: str


STARTS = (EventKind.STARTED, EventKind.RESUMED)


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Something that was predicted, and what it came to: seconds or bytes of rank 0."""

    name: str
    predicted: float
    measured: float
    is_time: bool = True
    likely: tuple[float, float] | None = None  # shares of what was predicted; None: it has no range

    @property
    def ratio(self) -> float:
        """Measured, of predicted."""
        return self.measured / self.predicted

    @property
    def words(self) -> str:
        """Both, in words."""
        predicted, measured = map(_format_time if self.is_time else _format_gib, (self.predicted, self.measured))
        verdict = ""
        if self.likely:
            shortest, longest = self.likely
            is_likely = shortest <= self.ratio <= longest
            verdict = f"; {'as' if is_likely else 'not as'} likely, {shortest:.2f} to {longest:.2f}"
        return f"{measured}, predicted {predicted} ({self.ratio:.2f}){verdict}"


def _format_time(seconds: float) -> str:
    return f"{seconds:.2f}s" if seconds < 1 else format_duration(seconds)


def _format_gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.2f} GiB"


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 without values."""
    return statistics.median(values) if values else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A run's reply and price, and the values that a report derives from them."""

    run: str
    reply: ReportReply
    price: float  # of a GPU-hour; 0: unknown
    logs: str = "llama405b logs"  # the command that shows its logs

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(ranks for _, ranks in self.reply.hosts)

    @property
    def hour_unit(self) -> str:
        """The unit of cost: GPU-h, or rank-h without GPUs."""
        return hour_unit(bool(self.reply.gpu))

    @property
    def end_time(self) -> float | None:
        """When the last attempt ended; None while the run is alive."""
        last = self.reply.attempts[-1] if self.reply.attempts else None
        return last.ended if last and not self.reply.alive else None

    @property
    def start_time(self) -> float:
        """When the run was first launched, as far as is known."""
        if self.reply.account:
            return self.reply.account.began
        return self.reply.points[0].time if self.reply.points else self.reply.created

    @property
    def idle_s(self) -> float:
        """Seconds since the run ended; 0 while it is alive."""
        return 0.0 if self.end_time is None else max(0.0, self.reply.now - self.end_time)

    @property
    def max_steps(self) -> int | None:
        """The number of steps that the settings ask for; None if they do not say."""
        max_steps = tomllib.loads(self.reply.settings).get("training", {}).get("max_steps", 0)
        return max_steps or None

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers that also receive the metrics."""
        return tuple(tomllib.loads(self.reply.settings).get("tracking", {}).get("to", ()))

    @property
    def planned_tokens_per_s(self) -> float | None:
        """Tokens/s that the plan predicted; None without a plan."""
        last = self.reply.last
        return last.rate * last.step_s / self.reply.expected.step_s if last and self.reply.expected.step_s else None

    @property
    def slow_points(self) -> list[tuple[CurvePoint, float]]:
        """The points with a far slower step than usual (see ``accounting``), and their usual seconds."""
        usual_s = statistics.median([point.step_s for point in self.reply.points] or [0.0])
        min_excess_s = max(SLOW_S, SLOW_STEPS * usual_s) - usual_s
        expected = [(point, point.steps * usual_s) for point in self.reply.points]
        return [
            (point, expected_s)
            for point, expected_s in expected
            if point.time - point.start_time - expected_s > min_excess_s
        ]

    @property
    def last_points(self) -> list[CurvePoint]:
        """The last points, covering at least ``LAST_STEPS`` steps if there are that many; newest first."""
        tail = list[CurvePoint]()
        for point in reversed(self.reply.points):
            if sum(entry.steps for entry in tail) >= LAST_STEPS:
                break
            tail.append(point)
        return tail

    @property
    def n_last_steps(self) -> int:
        """The number of steps that ``mean_of_last`` averages."""
        return sum(point.steps for point in self.last_points)

    def mean_of_last(self, field: str) -> float:
        """Return the mean of a field over the last steps."""
        return float(sum(point.steps * getattr(point, field) for point in self.last_points)) / self.n_last_steps

    def mfu(self, rate: float | None) -> float | None:
        """Return model FLOPs utilization in percent: the model's FLOPs over the GPUs' peak; None if unknown."""
        peak, last = bf16_flops(self.reply.gpu), self.reply.last
        if not (peak and last and last.flops_per_token and rate):
            return None
        return 100 * rate * last.flops_per_token / (peak * self.world_size)

    @property
    def scores(self) -> tuple["Score", ...]:
        """What the newest launch predicted, beside what came, as far as both are known."""
        expected, points, last = self.reply.expected, self.reply.points, self.reply.last
        newest = [point for point in points if point.attempt == self.reply.attempt]
        saves = [event for event in self.reply.events if event.kind is EventKind.SAVED]
        first = [point for point in newest[:1] if point.steps == 1]
        began = [
            event.time for event in self.reply.events if event.kind in STARTS and event.attempt == self.reply.attempt
        ]
        launched = self.start_time if self.reply.attempt == 1 else 0.0
        likely = (expected.shortest, expected.longest)
        until_began_s = began[0] - launched if began and launched else 0.0
        times = (
            Score("a step", expected.step_s, _median([point.step_s for point in newest[1:]]), likely=likely),
            Score("the first step", expected.step_s, _median([point.step_s for point in first])),
            Score("until training began", expected.start_s, until_began_s),
            Score("a save", expected.save_s, _median([event.took_s for event in saves])),
            Score("of a save, training waited", expected.save_wait_s, _median([event.blocked_s for event in saves])),
        )
        memory = (
            Score("allocated", expected.allocated_bytes, last.peak_allocated_bytes if last else 0, is_time=False),
            Score("peak memory", expected.peak_bytes, last.peak_bytes if last else 0, is_time=False),
        )
        rows = times + memory
        return tuple(row for row in rows if row.predicted and row.measured)

    @property
    def score_rows(self) -> list[tuple[str, str]]:
        """The scores in words; the last says if what was predicted is not what the launch predicted."""
        rows = [(score.name, score.words) for score in self.scores]
        if rows and not self.reply.expected.is_sealed(self.run):
            rows.append(("THE PREDICTION WAS CHANGED AFTER THE LAUNCH", "(expected, in plan.json)"))
        return rows

    def cost(self, seconds: float) -> float | None:
        """Return the cost of running all ranks for this long; None without a price."""
        return self.price * seconds * self.world_size / 3600 if self.price else None


def format_run_state(summary: Summary) -> str:
    """Describe the run's state."""
    reply = summary.reply
    step = reply.last.step if reply.last else 0
    of_total = fmt_if(" of {}", summary.max_steps)
    if reply.alive:
        return f"running, step {step}{of_total}"
    last = reply.attempts[-1] if reply.attempts else None
    if last and is_failure(last.cause):
        failure = Failure(last.cause.host, last.cause)
        return f"failed after step {step}{of_total}: {failure_words(failure)}{log_words(failure, summary.logs)}"
    return f"ended after step {step}{of_total}, {format_duration(summary.idle_s)} ago"


def describe_idle(summary: Summary) -> str:
    """Describe what idle hosts have cost since the run ended; "" if that is little or the run is alive."""
    if summary.idle_s < MIN_IDLE_S or not (summary.reply.gpu or summary.price):
        return ""
    hours, cost = summary.idle_s * summary.world_size / 3600, fmt_if(", {:,.2f}", summary.cost(summary.idle_s))
    ranks_text = pluralize(summary.world_size, "GPU" if summary.reply.gpu else "rank")
    return (
        f"the run ended {format_duration(summary.idle_s)} ago; if nothing else runs on its {ranks_text}, they have been idle for "
        f"{hours:,.1f} {summary.hour_unit}{cost}"
    )


def list_events(summary: Summary) -> list[ReportEvent]:
    """Return all events by time: those rank 0 reported, each attempt's failure, and stalled steps."""
    run_events = [ReportEvent(event.time, event.kind, describe_event(event)) for event in summary.reply.events]
    account = summary.reply.account
    failures = [
        ReportEvent(incident.failed, "failed", incident_words(incident))
        for incident in (account.incidents if account else ())
    ]
    slow_steps = [
        ReportEvent(
            point.start_time,
            TimeUse.SLOW,
            f"{format_steps(point)} took {format_duration(point.time - point.start_time)}, usually {format_duration(usual_s)}",
        )
        for point, usual_s in summary.slow_points
    ]
    return sorted([*run_events, *failures, *slow_steps], key=lambda entry: entry.time)


def format_steps(point: CurvePoint) -> str:
    """Name the steps of a point: ``step 7``, ``steps 5-7``."""
    return f"step {point.step}" if point.steps == 1 else f"steps {point.step - point.steps + 1}-{point.step}"


def describe_event(event: RunEvent) -> str:
    """Describe an event that rank 0 reported."""
    step, name = event.step, event.path.rpartition("/")[2]
    sentence = {
        EventKind.STARTED: "training started from the model's weights",
        EventKind.RESUMED: f"resumed from {name}",
        EventKind.PASSED_OVER: f"skipped {name}",
        EventKind.SAVED: f"saved {name} in {format_duration(event.took_s)}, of which training waited {format_duration(event.blocked_s)}",
        EventKind.NOT_SAVED: f"step {step} was not saved",
        EventKind.NOT_WRITTEN: f"{pluralize(event.count, 'line')} of metrics up to step {step} were lost",
        EventKind.AFTER_SAVE: f"checkpoint.after_save succeeded{fmt_if(' for step {}', step)}",
        EventKind.AFTER_SAVE_FAILED: "checkpoint.after_save failed",
        EventKind.BUDGET: "most of the GPU-hour budget is spent",
        EventKind.SPIKE: f"the loss of step {step} was far above the recent ones",
        EventKind.NOT_FINITE: f"the loss or gradient of step {step} was not finite",
        EventKind.SKIPPED: f"step {step} was skipped: all its targets are masked",
        EventKind.STOPPED: f"stopped after step {step}",
        EventKind.ANSWERED: f"carried out a request after step {step}",
    }.get(event.kind, str(event.kind))
    cause_text = describe_cause(event.cause) if event.cause else ""
    return clean(sentence + fmt_if(": {}", event.detail or cause_text))


def time_by_use(account: Account) -> Iterator[tuple[TimeUse, float]]:
    """Yield each use of the time with its seconds, if any."""
    for use in USE_LABELS:
        if account.seconds.get(use, 0.0) > 0:
            yield use, account.seconds[use]


def split_by_attempt(points: Sequence[CurvePoint]) -> Iterator[list[CurvePoint]]:
    """Yield the points of each attempt."""
    for number in sorted({point.attempt for point in points}):
        yield [point for point in points if point.attempt == number]
