"""Follow a run to its end: print rank 0's output, and why other ranks fail. Ctrl-C only stops following."""

import collections
import contextlib
import dataclasses
import enum
import math
import queue
import re
import shlex
import time
from collections.abc import Callable

from llama405b.contract.errors import EXIT_DETACHED, EXIT_FAILED, EXIT_OK, fmt_if, pluralize
from llama405b.contract.records import (
    Cause,
    CauseKind,
    EvaluationMetrics,
    EventKind,
    FailureRecord,
    Metrics,
    Phase,
    RunEvent,
)
from llama405b.spec.plan import Plan
from llama405b_tools.agent.describe import overdue_save
from llama405b_tools.agent.messages import NodeUpdate, StopReply, StreamMessage, StreamRequest
from llama405b_tools.hosts.fleet import Fleet, program_name
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import judge
from llama405b_tools.run.backends import stop_launch
from llama405b_tools.run.diagnosis import examine_failure
from llama405b_tools.run.hang import STALE_AFTER_S, HostHeartbeats, Pace, find_hung_rank
from llama405b_tools.run.judge import Failure, failure_words, log_words, unstopped_hosts
from llama405b_tools.run.query import HostMessage, Streams, Unreachable
from llama405b_tools.run.screen import NoReaderError, PlainPrinter, Printer, make_printer, show
from llama405b_tools.text.words import BAR_MARK, clean, fold_ranks, split_mark

MEAN_STEPS = 10  # steps, because one step's loss depends on its few sequences
POLL_S = 0.5
RANK_0_OUT = re.compile(r"/0/stdout\.log$")
QUIET_S = 3.0  # before the first step: after this silence, print what the ranks are doing
SAME_QUIET_S = 60.0  # and if that is still the same, after this one
PHASE_WORDS = {
    Phase.START: "connecting to each other",
    Phase.DATA: "reading the data",
    Phase.LOAD: "loading the weights",
    Phase.PIN: "pinning CPU memory",
    Phase.RESUME: "restoring the checkpoint",
    Phase.EVAL: "evaluating",
    Phase.TRAIN: "taking the first step",
}
PEER_GRACE_S = 15.0  # after the first failure, for the other hosts to notice by themselves


class EndKind(enum.StrEnum):
    """How a run ended, or how following it did."""

    WELL = "well"
    FAILED = "failed"
    STOPPED = "stopped"  # somebody asked for it
    RESTART = "restart"  # somebody asked for the attempt to end, and for the guard to start the next one
    LEFT = "left"  # Ctrl-C: the run continues


EXIT_CODES = {
    EndKind.WELL: EXIT_OK,
    **dict.fromkeys((EndKind.FAILED, EndKind.STOPPED, EndKind.RESTART), EXIT_FAILED),
    EndKind.LEFT: EXIT_DETACHED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended, and why."""

    kind: EndKind
    failure: Failure | None = None
    stopped_by: str = ""
    logs: str = ""  # the command that shows those of the attempt

    @property
    def code(self) -> int:
        """The exit code for this ending."""
        return EXIT_CODES[self.kind]

    @property
    def would_fail_again(self) -> bool:
        """Whether a restart cannot help (bad input, loss spike guard)."""
        repeatable = (CauseKind.REFUSED, CauseKind.FOLLOWED, CauseKind.SPIKE)
        return self.failure is not None and self.failure.cause.kind in repeatable

    @property
    def words(self) -> str:
        """The ending as one clause."""
        if self.failure:
            return f"{self.failure.host}: {failure_words(self.failure)}{log_words(self.failure, self.logs)}"
        if self.kind is EndKind.RESTART:
            return f"a restart requested by {self.stopped_by}"
        return fmt_if("stopped by {}", self.stopped_by) or "the run finished successfully"


class RunMonitor:
    """What is known about a run while it is followed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.metrics: list[Metrics] = []
        self.first_evaluation: float | None = None  # the loss on data held out, before the first step
        self.ended_at: dict[str, float] = {}  # when each host's part did, by its own clock; 0: unknown
        self.failures: list[Failure] = []  # in order of arrival, by the operator's clock, not the hosts'
        self.output_lines: collections.deque[str] = collections.deque(maxlen=3000)  # rank 0's last lines
        self.saved, self.saves = "", list[RunEvent]()
        self.failed_saves: list[RunEvent] = []  # since the last that succeeded
        self.after_save_fails = False
        self.pages = collections.deque[RunEvent]()  # what the user is to be told at once, until somebody takes it
        self.resumed = False
        self.unreachable: dict[str, str] = {}  # hosts, and why; not a failure unless a host reports one
        self.stopped: dict[str, StopReply | HostError] = {}  # how ending the rest went, if that was needed
        self.is_hung = False
        self.give_up_at = math.inf  # when the other hosts are ended
        self.stopped_by = ""  # who stopped the run, if anyone did
        self.restart_by = ""  # who asked for a restart, if anyone did
        self.heartbeats: dict[str, HostHeartbeats] = {}  # each host's heartbeats

    @property
    def is_over(self) -> bool:
        """Whether every host's part has ended."""
        return len(self.ended_at) == len(self.plan.nodes)

    @property
    def can_resume(self) -> bool:
        """Whether this attempt has saved a checkpoint, or began from one."""
        return bool(self.saved) or self.resumed

    @property
    def newest_step(self) -> int:
        """The last step of this attempt that was not skipped; 0 before the first."""
        return max((m.step for m in self.metrics if m.attempt == self.plan.attempt), default=0)

    def handle(self, arrival: HostMessage) -> list[str]:
        """Take one message; return the lines to print."""
        host, message = arrival.host, arrival.message
        if isinstance(message, Unreachable):
            previous = self.unreachable.get(host)
            self.unreachable[host] = message.why
            if previous:
                return []
            return [f"{host} │ cannot be reached: {message.why}; its processes may still be running; retrying"]
        lines = []
        if self.unreachable.pop(host, None):
            lines.append(f"{host} │ reachable again")
        self._take_records(message)
        if message.beats is not None and message.now is not None:
            self.heartbeats[host] = HostHeartbeats(message.beats, message.now, time.monotonic())
        if message.node and not message.node.alive:
            self._end(host, message.node)
        return [*lines, *self._lines(host, message)]

    def startup_activity(self) -> str:
        """Return what the ranks do before the first step; '' afterwards, or if the program is not our trainer."""
        if (
            not self.plan.trains
            or self.failures
            or any(metrics.attempt == self.plan.attempt for metrics in self.metrics)
        ):
            return ""
        ranks_by_activity: dict[str, set[int]] = {"starting Python and PyTorch": set(range(self.plan.world_size))}
        for beat in [beat for host_heartbeats in self.heartbeats.values() for beat in host_heartbeats.beats]:
            for ranks in ranks_by_activity.values():
                ranks.discard(beat.rank)
            ranks_by_activity.setdefault(PHASE_WORDS.get(beat.phase, beat.phase), set()).add(beat.rank)
        return ", ".join(
            f"{activity} ({fold_ranks(sorted(ranks))})" for activity, ranks in ranks_by_activity.items() if ranks
        )

    def _take_records(self, message: StreamMessage) -> None:
        for metrics in message.metrics:  # a resumed run goes back: forget the steps it repeats
            if isinstance(metrics, EvaluationMetrics):
                self.first_evaluation = metrics.evaluation_loss
                continue
            while self.metrics and self.metrics[-1].step >= metrics.step:
                self.metrics.pop()
            self.metrics.append(metrics)
        self.saves += [event for event in message.events if event.kind is EventKind.SAVED]
        for event in message.events:
            if event.attempt != self.plan.attempt:
                continue
            self.resumed = self.resumed or event.kind is EventKind.RESUMED
            if event.kind is EventKind.SAVED:
                self.saved, self.failed_saves = event.path, []
            if event.kind is EventKind.NOT_SAVED:
                self.failed_saves.append(event)
            if event.kind is EventKind.AFTER_SAVE:
                self.after_save_fails = False
            elif event.kind is EventKind.AFTER_SAVE_FAILED and not self.after_save_fails:  # once until it has passed
                self.after_save_fails = True
                self.pages.append(event)
            elif event.kind is EventKind.BUDGET:
                self.pages.append(event)

    def late_save(self) -> str:
        """Return that a checkpoint is late, because its save hangs; '' if it is not, or that is not known."""
        head = self.heartbeats.get(self.plan.nodes[0].name)
        if head is None or not head.beats:
            return ""
        return overdue_save(self.saves, head.now, head.beats[0])

    def should_give_up(self, pace: Pace | None) -> bool:
        """Return whether the other hosts had time to notice a failure: they may still run, but cannot continue."""
        if pace and self.plan.trains:
            self.check_hang(pace)
        if (self.failures or self.restart_by) and self.give_up_at == math.inf:
            self.give_up_at = time.monotonic() + (0 if self.is_hung else PEER_GRACE_S)
        return time.monotonic() > self.give_up_at

    def check_hang(self, pace: Pace) -> None:
        """Count a rank that is silent for too long as a failure, unless steps, which need it, still complete."""
        pace = dataclasses.replace(pace, step_s=max((metrics.step_s for metrics in self.metrics), default=0.0))
        hung = find_hung_rank(self.heartbeats, time.monotonic(), pace)
        if hung and not self.failures and self._step_age_s() > pace.steps.hang_s:
            self.is_hung = True
            self.failures.append(Failure(hung.host, hung.cause))

    def _step_age_s(self) -> float:
        """Return how long ago this attempt took its last step, by the head's clock; inf if that is unknown."""
        head = self.heartbeats.get(self.plan.nodes[0].name)
        if head is None or not self.metrics or self.metrics[-1].attempt != self.plan.attempt:
            return math.inf
        return head.now - self.metrics[-1].time + time.monotonic() - head.arrived_s

    def failed_at(self, host: str) -> float:
        """Return when the attempt failed, as the failed host saw it, by the head's clock; 0: unknown."""
        head, host_heartbeats = self.heartbeats.get(self.plan.nodes[0].name), self.heartbeats.get(host)
        if head is None:
            return 0.0
        ended_s = (
            self.ended_at[host] - host_heartbeats.now + host_heartbeats.arrived_s
            if host_heartbeats and self.ended_at.get(host)
            else time.monotonic()
        )
        return head.now + ended_s - head.arrived_s

    def count_unreachable(self, now_s: float) -> None:
        """Count silent hosts as unreachable: the run has failed, and the others only waited for them."""
        for host, host_heartbeats in self.heartbeats.items():
            silent_s = now_s - host_heartbeats.arrived_s
            if host not in self.ended_at and silent_s > STALE_AFTER_S:
                self.unreachable.setdefault(host, f"no message for {silent_s:.0f} s")

    def worst_failure(self) -> Failure | None:
        """Return the failure to name; None if no host reported one, or a restart was requested."""
        if not self.failures or self.restart_by:
            return None
        unreachable = [
            Failure(host, Cause(CauseKind.UNREACHABLE, host, detail=why)) for host, why in self.unreachable.items()
        ]
        candidates = (
            [*unreachable, *self.failures] if self.is_hung else [*self.failures, *unreachable]
        )  # a hung rank waits for a lost one
        return judge.first_failure(candidates)

    def replace_failure(self, failure: Failure, examined_failure: Failure) -> Failure:
        """Replace a failure by the one that an autopsy returned; return that."""
        self.failures = [examined_failure if entry is failure else entry for entry in self.failures]
        return examined_failure

    def _end(self, host: str, node: NodeUpdate) -> None:
        self.stopped_by = self.stopped_by or node.stopped_by
        if node.blame and node.blame.attempt == self.plan.attempt:
            self.restart_by = self.restart_by or judge.restart_requester(node.blame)
        state = judge.state_from_status(node.status, alive=False) if node.status else judge.FILES_GONE  # it had started
        failure = judge.failure_of(host, state)
        self.ended_at[host] = node.status.time if node.status else 0.0
        if failure:
            self.failures.append(failure)

    def _lines(self, host: str, message: StreamMessage) -> list[str]:
        """Return the lines to print of a host's logs: rank 0's output, why ranks end, another program's stderr."""
        printed: list[str] = []
        for _, file, written in message.entries:
            text, ending = split_mark(written)
            lines = text.split("\n") if ending != BAR_MARK else []
            if host == self.plan.nodes[0].name and RANK_0_OUT.search(file):
                self.output_lines.extend(lines)
                printed += lines
            elif file.endswith("stderr.log"):
                errors = [line for line in lines if not self.plan.trains or line.startswith("llama405b train:")]
                printed += [f"{host} │ {line}" for line in errors]
        return printed


class IdleMessage:
    """Track how long nothing was printed, and what to print then."""

    def __init__(self, monitor: RunMonitor, now_s: float) -> None:
        self.monitor = monitor
        self.began_s = now_s
        self.since_s = now_s
        self.last_words = ""

    def due(self, now_s: float) -> list[str]:
        """Return the line to print now, if there is one."""
        text, quiet_s = self.monitor.startup_activity(), now_s - self.since_s
        if not text or quiet_s < QUIET_S or (text == self.last_words and quiet_s < SAME_QUIET_S):
            return []
        self.last_words, self.since_s = text, now_s
        return [f"{now_s - self.began_s:.0f} s: {text}"]


def watch_run(
    fleet: Fleet,
    plan: Plan,
    pace: Pace | None = None,
    until: Callable[[RunMonitor], bool] = lambda _: False,
    screen: Printer | None = None,
) -> RunMonitor:
    """Print what happens until every host is done, or ``until`` holds; when one fails, end the others.

    With ``pace``, a run that hangs counts as failed.

    Raises:
        NobodyReadsError: Nothing can be printed any more, and there is nothing to guard.
    """
    monitor, screen = RunMonitor(plan), screen or PlainPrinter()
    names = [node.name for node in plan.nodes]
    request = StreamRequest(plan.run, "", follow=True, beats=plan.trains)
    idle = IdleMessage(monitor, time.monotonic())
    streams = Streams(fleet, names, request, records_of=names[0])
    try:
        while not (monitor.is_over or until(monitor) or monitor.should_give_up(pace)):
            lines = _next_lines(streams, monitor)
            if lines:
                idle.since_s = time.monotonic()
            else:
                lines = idle.due(time.monotonic())
            if lines and not screen.show([clean(line) for line in lines]) and pace is None:
                raise NoReaderError
    finally:
        screen.close()
        streams.close()
    if monitor.failures:
        monitor.count_unreachable(time.monotonic())
    if (worst := monitor.worst_failure()) and not (plan.slurm_job and monitor.is_over):  # such a job ends by itself
        if pace and not plan.slurm_job:
            worst = monitor.replace_failure(worst, examine_failure(fleet, plan, worst, pace.min_hang_s))
        blame = FailureRecord(plan.attempt, worst.host, worst.cause, monitor.failed_at(worst.host))
        monitor.stopped = stop_launch(plan, fleet, blame)
    return monitor


def _next_lines(streams: Streams, monitor: RunMonitor) -> list[str]:
    """Take the next message, if one arrives in time; return the lines to print."""
    with contextlib.suppress(queue.Empty):
        return monitor.handle(streams.arrivals.get(timeout=POLL_S))
    return []


def follow(
    fleet: Fleet,
    plan: Plan,
    pace: Pace | None = None,
    until: Callable[[RunMonitor], bool] = lambda _: False,
    *,
    plain: bool = True,
) -> Ending:
    """Follow a run to its end, and print how it ended; Ctrl-C only stops following.

    ``until`` is called all the while; unless ``plain``, a terminal has the newest step in its last line.
    """
    try:
        monitor = watch_run(fleet, plan, pace, until, make_printer(plain=plain))
        return summarise(monitor, plan, fleet, guarded=pace is not None)
    except (KeyboardInterrupt, NoReaderError):
        show(
            f"\nDetached; the run keeps going. Re-attach: `{fleet.command_to_type('logs', plan.run)} -f`. "
            f"Stop: `{fleet.command_to_type('stop', plan.run)}`."
        )
        return Ending(EndKind.LEFT)


def summarise(monitor: RunMonitor, plan: Plan, fleet: Fleet, *, guarded: bool = False) -> Ending:
    """Print how the run ended, and return that."""
    if monitor.metrics:
        show(f"\n{plan.run}: {_progress_words(monitor, plan)}")
    if monitor.saved:
        show(f"checkpoint: {monitor.saved}")
    command = fleet.command_to_type("logs", plan.run)
    logs = f"`{command}` shows every rank"
    resume_hint = [f"to continue, repeat the launch with --run {plan.run} --resume auto"] if monitor.can_resume else []
    if worst := monitor.worst_failure():
        for host, why in unstopped_hosts(monitor.stopped).items():
            show(f"{host}: {why}; run `{fleet.command_to_type('stop', plan.run)}` again", error=True)
        ending = Ending(EndKind.FAILED, worst, logs=f"{command} --attempt {plan.attempt}")
        show(f"FAILED  {ending.words}", error=True)
        show("next: " + "; ".join([logs] if guarded else [logs, *resume_hint]), error=True)
        return ending
    if monitor.restart_by and not monitor.stopped_by:
        ending = Ending(EndKind.RESTART, stopped_by=monitor.restart_by)
        show(f"attempt {plan.attempt} was ended for {ending.words}")
        return ending
    if monitor.stopped_by:
        show("; ".join([f"stopped by {monitor.stopped_by}", *resume_hint]))
        return Ending(EndKind.STOPPED, stopped_by=monitor.stopped_by)
    own_model_hint = (
        [f"`{program_name()} launch my-hosts --config my.toml` trains your own model"] if plan.trains else []
    )
    export_hint = []
    if monitor.saved:
        export_hint = [f"{_export_words(plan, fleet)} writes a model that transformers loads"]
    show("next: " + "; ".join([*export_hint, logs, *own_model_hint]))
    return Ending(EndKind.WELL)


def _export_words(plan: Plan, fleet: Fleet) -> str:
    """Return the command that exports a model, and where to type it."""
    command = f"{program_name()} export {plan.run} OUT"
    if not plan.spread or len(plan.nodes) == 1:
        return f"`{command}`, where the checkpoint is,"
    if plan.slurm_job:
        return f"`{command} HOSTS`, with a hosts file that names the job's nodes,"
    return f"`{command} {shlex.quote(str(fleet.hosts_file))}`"


def _progress_words(monitor: RunMonitor, plan: Plan) -> str:
    """Return loss and rate from the first step to the last."""
    metrics = monitor.metrics
    first = metrics[0]
    last = metrics[-1]
    recent = metrics[-MEAN_STEPS:]
    loss = sum(step_metrics.loss for step_metrics in recent) / len(recent)
    rate = sum(step_metrics.rate * step_metrics.step_s for step_metrics in metrics) / sum(
        step_metrics.step_s for step_metrics in metrics
    )
    return (
        f"steps {first.step}-{last.step}, loss {first.loss:.3f} -> {loss:.3f} (mean of the last {len(recent)}), "
        f"{_evaluation_words(monitor)}"
        f"{rate:,.0f} tokens/s on {pluralize(plan.world_size, 'rank')} of {pluralize(len(plan.nodes), 'host')}"
    )


def _evaluation_words(monitor: RunMonitor) -> str:
    """Return the held-out loss, before the first step and after the last that was evaluated."""
    latest = next(
        (step_metrics for step_metrics in reversed(monitor.metrics) if step_metrics.evaluation_loss is not None), None
    )
    if latest is None:
        return ""
    first = fmt_if("{:.3f} -> ", monitor.first_evaluation)
    return f"evaluation {first}{latest.evaluation_loss:.3f} after step {latest.step}, "
