"""Feed a run's trackers from ``metrics.jsonl`` and rank 0's events, beside training: what one did not take is sent again.

A tracker that is slow or fails costs no step, as this is a process of its own. Each remembers the last step that it was sent: a resume
goes on from there, and steps that are taken again keep their first values. Knows files and sinks; not what they send to.
"""

import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from llama405b.contract import reader
from llama405b.contract.config import read_toml, resolve
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.events import RunEvent
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import METRICS_LINE, EvaluationMetrics, Metrics, Sample
from llama405b.tracking.sinks import SINKS, Identity, Sink

POLL_S = 1.0
AGAIN_S = 60.0  # after a failure
T = TypeVar("T")
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What a tracker has been sent so far: ``tracking/NAME.json``."""

    step: int = -1  # the last one
    events: int = 0  # of rank 0's, in order
    id: str = ""  # of the run there
    sampled: int = -1  # the last step whose samples were sent


class Tail(Generic[T]):
    """The lines of a file, as they come."""

    def __init__(self, path: Path, kind: Any) -> None:
        self.path, self.kind, self.offset = path, kind, 0

    def new(self) -> Iterator[T]:
        """Yield what is complete and was not yet told; what cannot be read is left out."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    yield reader.loads(self.kind, line, self.path.name)
                except MalformedError:
                    continue


class Feed:
    """One tracker's."""

    def __init__(self, name: str, run: RunDir, say: Say) -> None:
        self.name, self.run, self.say = name, run, say
        self.state = run.sent(name)
        self.sent = Sent()
        if self.state.is_file():
            self.sent = reader.loads(Sent, self.state.read_text(encoding="utf-8"), str(self.state))
        self.config = resolve(read_toml(run.config))
        self.sink: Sink | None = None
        self.again = 0.0  # when to try, after a failure
        self.why = ""  # it failed last
        self.lines: Tail[Metrics | EvaluationMetrics] = Tail(run.metrics, METRICS_LINE)
        self.events: Tail[RunEvent] = Tail(run.events("rank-0"), RunEvent)
        self.samples: Tail[Sample] = Tail(run.samples, Sample)
        self.said: list[Sample] = []
        self.waiting: list[Metrics | EvaluationMetrics] = []
        self.happened: list[RunEvent] = []
        for _ in zip(range(self.sent.events), self.events.new(), strict=False):
            pass

    @staticmethod
    def wanted(run: RunDir) -> tuple[str, ...]:
        """Return the trackers that a run's settings name."""
        return resolve(read_toml(run.config)).tracking.to

    def send(self, *, now: bool = False) -> None:
        """Send what is new; ``now``: also if it failed a moment ago."""
        self.waiting += [line for line in self.lines.new() if line.step > self.sent.step]
        self.happened += self.events.new()
        self.said += [sample for sample in self.samples.new() if sample.step > self.sent.sampled]
        if not (self.waiting or self.happened or self.said) or (time.monotonic() < self.again and not now):
            return
        try:
            sink = self._opened()
            for take in self._in_order(sink):
                take()
            sink.flush()
        except Exception as error:  # noqa: BLE001 - a tracker raises what it likes
            self._failed(error)
            return
        step = max([self.sent.step, *(line.step for line in self.waiting)])
        events = self.sent.events + len(self.happened)
        sampled = max([self.sent.sampled, *(sample.step for sample in self.said)])
        self._keep(dataclasses.replace(self.sent, step=step, events=events, sampled=sampled))
        self.waiting, self.happened, self.said = [], [], []

    def _in_order(self, sink: Sink) -> list[Callable[[], None]]:
        """Return what there is to send, by step, as trackers want it: of each its numbers first."""
        told = [(line.step, functools.partial(sink.metrics, line)) for line in self.waiting]
        told += [
            (event.step, functools.partial(sink.event, event)) for event in self.happened if event.step is not None
        ]
        told += [(sample.step, functools.partial(sink.sample, sample)) for sample in self.said]
        return [take for _, take in sorted(told, key=lambda each: each[0])]

    def send_model(self, path: Path) -> None:
        """Send an exported model.

        Raises:
            UserError: The tracker takes none.
            RunError: It could not be sent.
        """
        try:
            self._opened().artifact(path)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise RunError(
                f"tracking {self.name}: {path} could not be sent ({_reason(error)}); run the same command again"
            ) from None
        self.say(f"tracking {self.name}: {path} is sent as an artifact")

    def end(self) -> None:
        """Send what is left, and close the tracker."""
        self.send(now=True)
        try:
            if self.sink:
                self.sink.end()
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(error)
        if self.waiting:
            lines = counted(len(self.waiting), "step was", "steps were")
            self.say(f"tracking {self.name}: {lines} not sent; `llama405b track {self.run.name}` sends them")

    def _opened(self) -> Sink:
        if self.sink:
            return self.sink
        if not self.sent.id:
            self._keep(dataclasses.replace(self.sent, id=uuid.uuid4().hex[:8]))
        settings = dataclasses.asdict(self.config)
        self.sink = SINKS[self.name](
            self.config.tracking, Identity(self.run.name, self.sent.id, self.run.tracking, settings)
        )
        return self.sink

    def _keep(self, sent: Sent) -> None:
        self.state.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.state, sent)
        self.sent = sent

    def _failed(self, error: Exception) -> None:
        why = _reason(error)
        if why != self.why:  # else it was said
            self.say(f"tracking {self.name}: {why}; what was not sent is kept")
        self.why, self.sink, self.again = why, None, time.monotonic() + AGAIN_S


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
