"""Follow a run to its end: rank 0's words as they come, the others' when they fail. Ctrl-C only stops following."""

import collections
import contextlib
import dataclasses
import queue
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from llama405b.contract.errors import FAILED, GOOD, REFUSED, STOPPED_FOLLOWING
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.fleet import Fleet, Outcome
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.hosts.typed import front_door
from llama405b_tools.run import judge
from llama405b_tools.run.judge import Failure, Heard
from llama405b_tools.run.start import stop_this
from llama405b_tools.run.streams import Streams
from llama405b_tools.text.clean import clean

MEAN_OF = 10  # steps: one step's loss depends on its few sequences
POLL_S = 0.5
STEP_LINE = re.compile(r"step (\d+)/\d+\s+loss ([\d.]+)")
SLACK_S = 60.0  # beyond the trainer's own timeout, for it to say itself what it waits for
PEER_GRACE_S = 15.0  # after the first failure, for the others to find out by themselves


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may be silent before the run counts as hung and is ended, in seconds."""

    step_s: float  # between steps; at least five of the longest step so far
    slow_s: float  # while loading, saving, and until the first step is done


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended, or that following it did."""

    code: int  # 0 the run ended well, 1 it failed or was stopped, 130 Ctrl-C
    failure: Failure | None = None
    stopped_by: str = ""
    refused: bool = False  # by the trainer: the same again would be refused again

    @property
    def words(self) -> str:
        """One clause."""
        if self.failure:
            return f"{self.failure.host}: {self.failure.what}"
        return f"stopped by {self.stopped_by}" if self.stopped_by else "the run ended well"


class Watch:
    """What is known of a run while it is followed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.metrics: list[dict[str, Any]] = []
        self.ended: dict[str, Failure | None] = {}
        self.failures: list[Failure] = []  # in order of arrival: the operator's clock, not the hosts'
        self.losses: dict[int, float] = {}  # by step, as rank 0 prints them in this attempt
        self.said: collections.deque[str] = collections.deque(maxlen=300)  # rank 0's last lines
        self.saved = ""
        self.unreachable: dict[str, str] = {}  # hosts, and why; not a failure as long as no host reports one
        self.stopped: dict[str, Outcome] = {}  # how ending the rest went, where that was needed
        self.hangs = False
        self.stopped_by = ""  # who asked for the end, if somebody did
        self.heard: dict[str, Heard] = {}  # each host's heartbeats

    def take(self, host: str, news: dict[str, Any]) -> list[str]:
        """Take one piece of news; returns the lines to print."""
        if "unreachable" in news:
            first = host not in self.unreachable
            self.unreachable[host] = news["unreachable"]
            return (
                [f"{host} │ cannot be reached: {news['unreachable']}; its part may go on, trying again"]
                if first
                else []
            )
        if self.unreachable.pop(host, None):
            return [f"{host} │ reached again", *self.take(host, news)]
        if "metrics" in news:
            for metrics in news["metrics"]:  # a resumed run goes back: what it takes again is forgotten
                while self.metrics and self.metrics[-1]["step"] >= metrics["step"]:
                    self.metrics.pop()
                self.metrics.append(metrics)
        elif "entries" in news:
            return [line for _, file, text in news["entries"] for line in self._lines(host, file, text.split("\n"))]
        elif "beats" in news:
            self.heard[host] = Heard(news["beats"], news["now"], time.monotonic())
        elif "alive" in news and not news["alive"]:
            self.stopped_by = self.stopped_by or news.get("stopped_by", "")
            described = {"alive": False, "leftovers": [], "status": news["status"]}
            self._end(host, judge.failure_of(host, described))
        return []

    def look_for_hang(self, limits: Limits) -> None:
        """Count a rank that is silent for too long as a failure."""
        longest_step_s = max((m["step_s"] for m in self.metrics), default=0.0)
        hung = judge.hung(self.heard, time.monotonic(), max(limits.step_s, 5 * longest_step_s), limits.slow_s)
        if hung and not self.failures:
            self.hangs = True
            self.failures.append(hung)

    def worst(self) -> Failure | None:
        """The failure to name; None where no host reported any."""
        lost = [Failure(host, f"cannot be reached: {why}", origin=2) for host, why in self.unreachable.items()]
        found = [*lost, *self.failures] if self.hangs else [*self.failures, *lost]  # who hangs waits for who is lost
        return judge.first_failure(found) if self.failures else None

    def _end(self, host: str, failure: Failure | None) -> None:
        self.ended[host] = failure
        if failure:
            self.failures.append(failure)

    def _lines(self, host: str, file: str, lines: list[str]) -> list[str]:
        for line in lines:
            if line.startswith("saved "):
                self.saved = line.removeprefix("saved ")
            if step := STEP_LINE.match(line):
                self.losses[int(step[1])] = float(step[2])
        if host == self.plan.nodes[0].name and re.search(r"/0/stdout\.log$", file):
            self.said.extend(lines)
            return lines
        return [
            f"{host} │ {line}" for line in lines if file.endswith("stderr.log") and line.startswith("llama405b train:")
        ]


def watch_run(
    fleet: Fleet, plan: Plan, limits: Limits | None = None, until: Callable[[Watch], bool] = lambda _: False
) -> Watch:
    """Print what happens until every host is done, or ``until`` holds; when one fails, end the others.

    With ``limits``, a run that hangs counts as failed.
    """
    watch = Watch(plan)
    names = [node.name for node in plan.nodes]
    streams = Streams(fleet, plan.run, names, {"follow": True, "beats": limits is not None}, metrics_of=names[0])
    give_up_at = float("inf")
    try:
        while len(watch.ended) < len(plan.nodes) and not until(watch):
            if limits and plan.trains:
                watch.look_for_hang(limits)
            if watch.failures and give_up_at == float("inf"):
                give_up_at = time.monotonic() + (0 if watch.hangs else PEER_GRACE_S)
            if time.monotonic() > give_up_at:  # the rest still runs, or hangs: it cannot go on without who failed
                watch.stopped = stop_this(plan, fleet)
                break
            with contextlib.suppress(queue.Empty):
                for line in watch.take(*streams.news.get(timeout=POLL_S)):
                    print(clean(line))
                sys.stdout.flush()
    finally:
        streams.close()
    return watch


def follow(fleet: Fleet, plan: Plan, hosts: str = "", limits: Limits | None = None) -> Ending:
    """Follow a run to its end, and say how it ended; Ctrl-C only stops following.

    ``hosts`` is what the commands that are printed need, to find the hosts again.
    """
    try:
        return summarise(watch_run(fleet, plan, limits), plan, hosts, guarded=limits is not None)
    except KeyboardInterrupt:
        print(
            f"\nno longer following; the run goes on. `{front_door()} logs{hosts} -f --run {plan.run}` follows again, "
            f"`{front_door()} stop{hosts} --run {plan.run}` ends it"
        )
        return Ending(STOPPED_FOLLOWING)


def summarise(watch: Watch, plan: Plan, hosts: str = "", *, guarded: bool = False) -> Ending:
    """Print how it ended."""
    if watch.metrics:
        first, last = watch.metrics[0], watch.metrics[-1]
        ending = watch.metrics[-MEAN_OF:]
        loss = sum(m["loss"] for m in ending) / len(ending)
        tokens_per_s = sum(m["tokens_per_s"] * m["step_s"] for m in watch.metrics) / sum(
            m["step_s"] for m in watch.metrics
        )
        print(
            f"\n{plan.run}: steps {first['step']}-{last['step']}, loss {first['loss']:.3f} -> {loss:.3f} (mean of the last {len(ending)}), "
            f"{tokens_per_s:,.0f} tokens/s on {plan.world} ranks of {len(plan.nodes)} hosts"
        )
    if watch.saved:
        print(f"checkpoint: {watch.saved}")
    logs = f"`{front_door()} logs{hosts} --run {plan.run}` shows every rank"
    if worst := watch.worst():
        for host, end in watch.stopped.items():
            if isinstance(end, HostError) or end["left"]:
                print(
                    f"{host}: could not be verified to have ended; run `{front_door()} stop{hosts} --run {plan.run}` again",
                    file=sys.stderr,
                )
        print(f"FAILED  {worst.host}: {worst.what}", file=sys.stderr)
        again = "" if guarded else f"; the same launch with --run {plan.run} --resume auto goes on"
        print(f"next: {logs}{again}", file=sys.stderr)
        refused = plan.trains and f" exited with {REFUSED}: " in worst.what
        return Ending(FAILED, worst, refused=refused)
    if watch.stopped_by:
        print(f"stopped by {watch.stopped_by}; the same launch with --run {plan.run} --resume auto goes on")
        return Ending(FAILED, stopped_by=watch.stopped_by)
    print(f"next: {logs}; `{front_door()} launch my-hosts --config my.toml` trains yours")
    return Ending(GOOD)
