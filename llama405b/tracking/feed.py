"""Send a run's metrics to its trackers, W&B and TensorBoard, from ``metrics.jsonl`` and rank 0's events.

This runs in a separate process, so a slow or failing tracker delays no step; what a tracker did not accept is sent again. The last step
sent is stored for each tracker: a resumed run continues from there, and repeated steps keep their first values. Knows the run's files
and the trackers' packages; not training.
"""

import contextlib
import dataclasses
import html
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError, pluralize
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import METRICS_LINE, EvaluationMetrics, Metrics, PromptSample, RunEvent
from llama405b.settings.config import read_toml, resolve
from llama405b.settings.schema import Tracking

NOT_METRICS = {"step", "time", "attempt"}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What a tracker is sent of a step: numbers and continuations of prompts, by the names of their curves."""

    step: int
    time: float
    values: Mapping[str, float | PromptSample]


class Tracker(Protocol):
    """A tracker: takes entries in the order of steps."""

    def log(self, entries: Sequence[Entry]) -> None:
        """Send entries, so that they survive this process."""

    def send_model(self, path: Path) -> None:
        """Send a directory with an exported model."""

    def end(self) -> None:
        """Close the tracker after pending data has arrived."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrackedRun:
    """Identity and settings of a run, for a tracker."""

    name: str
    id: str  # the same for all attempts, unique to the run
    directory: Path  # for the tracker's own files
    settings: Mapping[str, Any]


class _TensorBoard(Tracker):
    """Writes files for `tensorboard --logdir`; each attempt continues the earlier curves."""

    def __init__(self, _: Tracking, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.directory / "tensorboard"))

    def log(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            for name, value in entry.values.items():
                if isinstance(value, PromptSample):
                    self.writer.add_text(name, f"{value.prompt} **{value.text}**", entry.step, entry.time)
                else:
                    self.writer.add_scalar(name, value, entry.step, entry.time)
        self.writer.flush()

    def send_model(self, path: Path) -> None:
        raise UserError(f"--model: TensorBoard cannot store models, so {path} was not sent; use --only wandb")

    def end(self) -> None:
        self.writer.close()


class _WandB(Tracker):
    """A W&B run, online or in files for `wandb sync`; W&B writes and uploads by itself, and drops data of earlier steps than its last."""

    def __init__(self, tracking: Tracking, run: TrackedRun) -> None:
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        self.wandb, self.name, self.last_step = wandb, run.name, 0
        self.run = wandb.init(
            entity=tracking.entity or None,
            project=tracking.project,
            name=tracking.display_name or run.name,
            group=tracking.group or None,
            tags=list(tracking.tags),
            id=run.id,
            resume="allow",
            mode="offline" if tracking.offline else "online",
            dir=str(run.directory),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", disable_git=True, silent=True),
        )

    def log(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.last_step = max(self.last_step, entry.step)
            self.run.log({name: self._convert(value) for name, value in entry.values.items()}, step=self.last_step)

    def _convert(self, value: float | PromptSample) -> Any:
        if isinstance(value, PromptSample):
            return self.wandb.Html(html.escape(f"{value.prompt} → {value.text}"))
        return value

    def send_model(self, path: Path) -> None:
        artifact = self.wandb.Artifact(f"{self.name}-model", type="model")
        artifact.add_dir(str(path))
        self.run.log_artifact(artifact)

    def end(self) -> None:
        self.run.finish()
        self.wandb.teardown()  # only then does its service write the end of its file


TRACKERS: dict[str, Callable[[Tracking, TrackedRun], Tracker]] = {"wandb": _WandB, "tensorboard": _TensorBoard}


def metric_values(line: Metrics | EvaluationMetrics) -> dict[str, float]:
    """Return the finite numbers of a line, by their names in metrics.jsonl."""
    values = {name: value for name, value in dataclasses.asdict(line).items() if name not in NOT_METRICS}
    values |= {f"own/{name}": value for name, value in values.pop("own", {}).items()}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


POLL_S = 1.0
RETRY_S = 60.0  # after a failure
T = TypeVar("T")
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class SentState:
    """What was sent to a tracker so far, stored in ``tracking/NAME.json``."""

    step: int = -1  # the last one
    events: int = 0  # of rank 0's, in order
    id: str = ""  # of the run at the tracker
    sampled: int = -1  # the last step whose samples were sent
    directory: str = ""  # of the run that has this id; "": unknown


class LineReader(Generic[T]):
    """Reads the lines of a growing file as records."""

    def __init__(self, path: Path, record_type: Any) -> None:
        self.path, self.record_type, self.offset = path, record_type, 0

    def read_new(self) -> Iterator[T]:
        """Yield the records of complete new lines; malformed lines are skipped."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                # Half a line: read again when it is complete.
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    yield reader.loads(self.record_type, line, self.path.name)
                except MalformedError:
                    continue


class TrackerFeed:
    """Sends a run's new metrics, events and samples to one tracker."""

    def __init__(self, name: str, run: RunDir, say: Say) -> None:
        self.name, self.run, self.say = name, run, say
        self.state_path = run.sent(name)
        self.sent_state = SentState()
        if self.state_path.is_file():
            self.sent_state = self._own_state(
                reader.loads(SentState, self.state_path.read_text(encoding="utf-8"), str(self.state_path))
            )
        self.config = resolve(read_toml(run.config))
        self.tracker: Tracker | None = None
        self.retry_at = 0.0  # earliest time of the next try after a failure
        self.last_error = ""  # of the latest failure
        self.lines: LineReader[Metrics | EvaluationMetrics] = LineReader(run.metrics, METRICS_LINE)
        self.events: LineReader[RunEvent] = LineReader(run.events("rank-0"), RunEvent)
        self.samples: LineReader[PromptSample] = LineReader(run.samples, PromptSample)
        self.pending: list[Entry] = []
        self.read_state = self.sent_state  # once what is pending was sent
        for _ in zip(range(self.sent_state.events), self.events.read_new(), strict=False):
            pass

    def _own_state(self, sent: SentState) -> SentState:
        """Return the stored state of this run: empty for a copy of another run; a renamed run keeps its own."""
        other = RunDir(Path(sent.directory)).sent(self.name)
        if sent.directory in ("", str(self.run.path.resolve())) or self.name == "tensorboard":
            return sent
        with contextlib.suppress(OSError, MalformedError):
            if other.samefile(self.state_path):  # by another path
                return sent
            if reader.loads(SentState, other.read_text(encoding="utf-8"), str(other)).id == sent.id:
                self.say(
                    f"tracking {self.name}: {self.run.name} is a copy of {sent.directory}; sending it as a new run"
                )
                return SentState()
        return sent

    @staticmethod
    def tracker_names(run: RunDir) -> tuple[str, ...]:
        """Return the names of the trackers in a run's settings."""
        return resolve(read_toml(run.config)).tracking.to

    def send(self, *, now: bool = False) -> None:
        """Send what is new; ``now``: even if a failure was recent."""
        self._read_new()
        if not self.pending or (time.monotonic() < self.retry_at and not now):
            return
        try:
            self._open_tracker().log(sorted(self.pending, key=lambda entry: entry.step))
        except Exception as error:  # noqa: BLE001 - a tracker may raise any exception
            self._note_failure(error)
            return
        self._save_state(self.read_state)
        self.pending = []

    def _read_new(self) -> None:
        """Add new entries to the pending ones: of a step the metrics come first."""
        read = self.read_state
        lines = [line for line in self.lines.read_new() if line.step > read.step]
        events = list(self.events.read_new())
        samples = [sample for sample in self.samples.read_new() if sample.step > read.sampled]
        self.pending += [Entry(line.step, line.time, metric_values(line)) for line in lines]
        self.pending += [
            Entry(event.step, event.time, {f"events/{event.kind}": 1}) for event in events if event.step is not None
        ]
        self.pending += [Entry(one.step, one.time, {self._curve_name(one.prompt): one}) for one in samples]
        self.read_state = dataclasses.replace(
            read,
            step=max([read.step, *(line.step for line in lines)]),
            events=read.events + len(events),
            sampled=max([read.sampled, *(sample.step for sample in samples)]),
        )

    def _curve_name(self, prompt: str) -> str:
        """Return the name of a prompt's curve: its number in the settings, since prompts may begin alike."""
        prompts = (*self.config.evaluation.prompts, prompt)
        return f"prompts/{1 + prompts.index(prompt)}"

    def send_model(self, path: Path) -> None:
        """Send an exported model.

        Raises:
            UserError: The tracker cannot store models.
            RunError: It could not be sent.
        """
        try:
            self._open_tracker().send_model(path)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise RunError(
                f"tracking {self.name}: {path} could not be sent ({_reason(error)}); run the same command again"
            ) from None
        self.say(f"tracking {self.name}: sent {path} as an artifact")

    def end(self) -> None:
        """Send pending data and close the tracker."""
        self.send(now=True)
        try:
            if self.tracker:
                self.tracker.end()
        except Exception as error:  # noqa: BLE001 - see above
            self._note_failure(error)
        if steps := {entry.step for entry in self.pending}:
            lines = pluralize(len(steps), "step was", "steps were")
            self.say(f"tracking {self.name}: {lines} not sent; `llama405b track --run {self.run.name}` sends them")

    def _open_tracker(self) -> Tracker:
        if self.tracker:
            return self.tracker
        if not self.sent_state.id:
            self._save_state(dataclasses.replace(self.sent_state, id=uuid.uuid4().hex[:8]))
            self.read_state = dataclasses.replace(self.read_state, id=self.sent_state.id)
        settings = dataclasses.asdict(self.config)
        del settings["checkpoint"]["after_save"]  # a command may hold a secret
        identity = TrackedRun(self.run.name, self.sent_state.id, self.run.tracking, settings)
        self.tracker = TRACKERS[self.name](self.config.tracking, identity)
        return self.tracker

    def _save_state(self, sent: SentState) -> None:
        self.sent_state = dataclasses.replace(sent, directory=str(self.run.path.resolve()))
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.state_path, self.sent_state)

    def _note_failure(self, error: Exception) -> None:
        reason = _reason(error)
        if reason != self.last_error:  # log a repeated reason only once
            self.say(f"tracking {self.name}: {reason}; keeping the metrics to send them later")
        self.last_error, self.tracker, self.retry_at = reason, None, time.monotonic() + RETRY_S


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
