"""Trackers that a run's numbers are sent to, each by its own package: W&B, TensorBoard. Knows records; not a run's files."""

import dataclasses
import html
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from llama405b.contract.errors import UserError
from llama405b.contract.events import RunEvent
from llama405b.contract.records import EvaluationMetrics, Metrics, Sample
from llama405b.contract.schema import Tracking

NOT_VALUES = {"step", "time", "attempt"}


class Sink(Protocol):
    """What takes a run's numbers, in the order of their steps."""

    def metrics(self, line: Metrics | EvaluationMetrics) -> None:
        """Take a step's numbers, or those of an evaluation where no step was taken."""

    def event(self, event: RunEvent) -> None:
        """Take what happened at a step."""

    def sample(self, sample: Sample) -> None:
        """Take how a prompt was continued."""

    def artifact(self, path: Path) -> None:
        """Take a directory with an exported model.

        Raises:
            UserError: It takes none.
        """

    def flush(self) -> None:
        """Keep what was taken, so that it survives this process."""

    def end(self) -> None:
        """Take no more, and let what is under way arrive."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a tracker is told of a run."""

    name: str
    id: str  # the same for all attempts, and for no other run
    directory: Path  # for the tracker's own files
    settings: Mapping[str, Any]


class _TensorBoard(Sink):
    """Files that `tensorboard --logdir` reads: each attempt continues the curves of those before."""

    def __init__(self, _: Tracking, run: Identity) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.directory / "tensorboard"))

    def metrics(self, line: Metrics | EvaluationMetrics) -> None:
        for name, value in values_of(line).items():
            self.writer.add_scalar(name, value, line.step, line.time)

    def event(self, event: RunEvent) -> None:
        self.writer.add_scalar(f"events/{event.kind}", 1, event.step, event.time)

    def sample(self, sample: Sample) -> None:
        self.writer.add_text(
            f"prompts/{sample.prompt[:40]}", f"{sample.prompt} **{sample.text}**", sample.step, sample.time
        )

    def artifact(self, path: Path) -> None:
        raise UserError(f"--model: TensorBoard takes no models, so {path} was not sent; use --only wandb")

    def flush(self) -> None:
        self.writer.flush()

    def end(self) -> None:
        self.writer.close()


class _WandB(Sink):
    """A run of W&B, online or in files for `wandb sync`; it drops what lies before its last step."""

    def __init__(self, tracking: Tracking, run: Identity) -> None:
        import wandb

        run.directory.mkdir(parents=True, exist_ok=True)
        self.name, self.last = run.name, 0
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

    def metrics(self, line: Metrics | EvaluationMetrics) -> None:
        self.last = line.step
        self.run.log(values_of(line), step=line.step)

    def event(self, event: RunEvent) -> None:
        self.run.log({f"events/{event.kind}": 1}, step=max(self.last, event.step or 0))

    def sample(self, sample: Sample) -> None:
        import wandb

        words = html.escape(f"{sample.prompt} → {sample.text}")
        self.run.log({f"prompts/{sample.prompt[:40]}": wandb.Html(words)}, step=max(self.last, sample.step))

    def artifact(self, path: Path) -> None:
        import wandb

        found = wandb.Artifact(f"{self.name}-model", type="model")
        found.add_dir(str(path))
        self.run.log_artifact(found)

    def flush(self) -> None:
        """W&B writes each line to its own files, and sends them by itself."""

    def end(self) -> None:
        import wandb

        self.run.finish()
        wandb.teardown()  # its service writes the end of its file only then


SINKS: dict[str, Callable[[Tracking, Identity], Sink]] = {"wandb": _WandB, "tensorboard": _TensorBoard}


def values_of(line: Metrics | EvaluationMetrics) -> dict[str, float]:
    """Return the numbers of a line that are known and finite, by the names that they have in metrics.jsonl."""
    found = {name: value for name, value in dataclasses.asdict(line).items() if name not in NOT_VALUES}
    found |= {f"own/{name}": value for name, value in found.pop("own", {}).items()}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
