"""Follow a run to its end: rank 0's words as they come, the others' when they fail. Ctrl-C only stops following."""

import queue
import re
import sys
import time
from typing import Any

from llama405b.errors import FAILED, GOOD, STOPPED_FOLLOWING
from llama405b_tools import runs
from llama405b_tools.commands import Plan
from llama405b_tools.fleet import Fleet, Outcome, front_door
from llama405b_tools.runs import Failure
from llama405b_tools.stop import stop
from llama405b_tools.streams import Streams
from llama405b_tools.transport import HostError

MEAN_OF = 10  # steps: one step's loss depends on its few sequences
POLL_S = 0.5
PEER_GRACE_S = 15.0  # after the first failure, for the others to find out by themselves


class Watch:
    """What is known of a run while it is followed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.metrics: list[dict[str, Any]] = []
        self.ended: dict[str, Failure | None] = {}
        self.failures: list[Failure] = []  # in order of arrival: the operator's clock, not the hosts'
        self.saved = ""
        self.unreachable: dict[str, str] = {}  # hosts, and why; not a failure as long as no host reports one
        self.stopped: dict[str, Outcome] = {}  # how ending the rest went, where that was needed

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
        elif "file" in news:
            return self._lines(host, news["file"], news["lines"])
        elif "alive" in news and not news["alive"]:
            described = {"alive": False, "leftovers": [], "status": news["status"]}
            self._end(host, runs.failure_of(host, described))
        return []

    def _end(self, host: str, failure: Failure | None) -> None:
        self.ended[host] = failure
        if failure:
            self.failures.append(failure)

    def _lines(self, host: str, file: str, lines: list[str]) -> list[str]:
        for line in lines:
            if line.startswith("saved "):
                self.saved = line.removeprefix("saved ")
        if host == self.plan.nodes[0].name and re.search(r"/0/stdout\.log$", file):
            return lines
        return [
            f"{host} │ {line}" for line in lines if file.endswith("stderr.log") and line.startswith("llama405b train:")
        ]


def follow(fleet: Fleet, plan: Plan, hosts: str = "") -> int:
    """Print what happens until every host is done; when one fails, end the others.

    ``hosts`` is what the commands that are printed need, to find the hosts again.

    Returns 0 where the run ended well, 1 where it failed, 130 on Ctrl-C.
    """
    watch = Watch(plan)
    streams = Streams(fleet, plan.run, [node.name for node in plan.nodes], follow=True, metrics_of=plan.nodes[0].name)
    give_up_at = float("inf")
    try:
        while len(watch.ended) < len(plan.nodes):
            if watch.failures and give_up_at == float("inf"):
                give_up_at = time.monotonic() + PEER_GRACE_S
            if time.monotonic() > give_up_at:  # the rest still runs, or hangs: it cannot go on without who failed
                watch.stopped = stop(fleet, plan.run)
                break
            try:
                host, item = streams.news.get(timeout=POLL_S)
            except queue.Empty:
                continue
            for line in watch.take(host, item):
                print(line)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(
            f"\nno longer following; the run goes on. `{front_door()} logs{hosts} -f --run {plan.run}` follows again, "
            f"`{front_door()} stop{hosts} --run {plan.run}` ends it"
        )
        return STOPPED_FOLLOWING
    finally:
        streams.close()
    return summarise(watch, plan, hosts)


def summarise(watch: Watch, plan: Plan, hosts: str = "") -> int:
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
    if watch.failures:
        lost = [Failure(host, f"cannot be reached: {why}", origin=2) for host, why in watch.unreachable.items()]
        worst = runs.first_failure([*watch.failures, *lost])
        for host, end in watch.stopped.items():
            if isinstance(end, HostError) or end["left"]:
                print(
                    f"{host}: could not be verified to have ended; run `{front_door()} stop{hosts} --run {plan.run}` again",
                    file=sys.stderr,
                )
        print(f"FAILED  {worst.host}: {worst.what}", file=sys.stderr)
        print(f"next: {logs}; the same launch with --run {plan.run} --resume auto goes on", file=sys.stderr)
        return FAILED
    print(f"next: {logs}; `{front_door()} launch my-hosts --config my.toml` trains yours")
    return GOOD
