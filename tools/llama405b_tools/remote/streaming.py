"""Report what is new in a run on this host: log lines, metrics, events, the host's state. Standard library."""

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from llama405b.contract import reader
from llama405b.contract.events import RunEvent
from llama405b.contract.files import read_record, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Plan, read_plan
from llama405b.contract.records import METRICS_LINE, Blame, NodeStatus
from llama405b_tools.remote import processes
from llama405b_tools.remote.describe import beats_of, lives, stopped_by
from llama405b_tools.remote.hostlogs import HostLogs
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.stream import BEATS_EVERY_S, NodeUpdate, StreamMessage, StreamRequest
from llama405b_tools.remote.tail import Tail
from llama405b_tools.text.clean import hide_in_json, pieces_of

T = TypeVar("T")
STREAM_EVERY_S = 0.3


def stream(request: StreamRequest) -> None:
    """Print news until standard input closes, or the run is over."""
    run, host = run_of(request.run), request.host
    logs = HostLogs(run, host, request)
    records = _Records(run)
    state = _State(run, request)
    secrets = _Secrets(run, host)
    while True:
        plan = read_plan(run)
        alive = lives(run, plan, host)  # checked before lines are read: a run that has ended has written its last
        pieces = secrets.pieces(plan, alive=alive)
        last_pass = not request.follow or not (alive or request.forever)
        for news in logs.poll(final=last_pass):
            _say(news, pieces)
        if request.records:
            for news in records.new():
                _say(news, pieces)
        for news in state.new(plan, alive=alive, final=last_pass):
            _say(news, pieces)
        if last_pass:
            _say(StreamMessage(end=True), pieces)
            return
        if select.select([sys.stdin], [], [], STREAM_EVERY_S)[0] and not os.read(sys.stdin.fileno(), 4096):
            return


class _State:
    """The host's state, as it changes, and its ranks' heartbeats at intervals."""

    def __init__(self, run: RunDir, request: StreamRequest) -> None:
        self.run, self.request = run, request
        self.last: NodeUpdate | None = None
        self.beats_at = 0.0

    def new(self, plan: Plan, *, alive: bool, final: bool) -> Iterator[StreamMessage]:
        """Yield what is to be reported now."""
        host = self.request.host
        blames = read_records(Blame, self.run.blames(host), 1)
        state = NodeUpdate(
            alive, read_record(NodeStatus, self.run.status(host)), stopped_by(self.run, host), next(iter(blames), None)
        )
        if state != self.last:
            self.last = state
            yield StreamMessage(node=state)
        if self.request.beats and (final or time.monotonic() > self.beats_at + BEATS_EVERY_S):
            self.beats_at = time.monotonic()
            yield StreamMessage(beats=beats_of(self.run, plan.find(host)), now=time.time())


class _Records:
    """Rank 0's metrics and events, as they are added."""

    def __init__(self, run: RunDir) -> None:
        self.metrics, self.events = Tail(run.metrics), Tail(run.events("rank-0"))

    def new(self) -> Iterator[StreamMessage]:
        """Yield what was added since the last call."""
        if metrics := tuple(_added(METRICS_LINE, self.metrics)):
            yield StreamMessage(metrics=metrics)
        if events := tuple(_added(RunEvent, self.events)):
            yield StreamMessage(events=events)


class _Secrets:
    """The values of the run's secrets, as long as a process of it has them: they are in no file."""

    def __init__(self, run: RunDir, host: str) -> None:
        self.run, self.host = run, host
        self.known: dict[str, str] = {}
        self.attempt = 0

    def pieces(self, plan: Plan, *, alive: bool) -> list[str]:
        """Return what is to be hidden now."""
        if alive and (self.attempt != plan.attempt or self.known.keys() < set(plan.secrets)):
            self.known |= processes.variables(f"{self.run.path}:{self.host}", plan.secrets)
            self.attempt = plan.attempt
        return pieces_of(self.known.values())


def _added(kind: type[T], tail: Tail) -> Iterator[T]:
    for piece in tail.all():
        for line in piece.data.splitlines():
            try:
                yield reader.loads(kind, line, "a record")
            except reader.MalformedError:
                continue


def _say(news: StreamMessage, pieces: Sequence[str]) -> None:
    print(hide_in_json(reader.dumps(news), pieces), flush=True)
