"""What rank 0 reports about the run: metrics and events in files, and lines on standard output. Other ranks report nothing.

The only part of the trainer that prints during training.
"""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llama405b.contract import reader
from llama405b.contract.causes import Cause
from llama405b.contract.events import EventKind, RunEvent
from llama405b.contract.files import EVERY, append_line, read_records, write_atomic
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted
from llama405b.contract.records import METRICS_LINE, EvaluationMetrics, Metrics, Sample

if TYPE_CHECKING:
    from llama405b.distributed.ranks import Rank  # needs torch


class Journal:
    """Rank 0's ``metrics.jsonl`` and ``events/rank-0.jsonl``, and its standard output."""

    def __init__(self, run: RunDir, me: "Rank") -> None:
        self.run, self.me = run, me
        self.writer = f"rank-{me.rank}"
        self.tokens = 0  # target tokens so far
        self.steps = 0  # total steps of the run
        self.losses: tuple[float, ...] = ()  # of the steps before a resume
        self.began_evaluated = False  # before the first step, by an earlier attempt
        self.retries = 0  # of the allocator, in this attempt

    def log(self, line: str) -> None:
        """Print a line."""
        if self.me.is_rank0:
            print(line, flush=True)

    def event(
        self, kind: EventKind, *, step: int | None = None, path: Path | None = None, detail: str = "",
        request: str = "", cause: Cause | None = None, count: int = 0, digest: str = "", took_s: float = 0.0, blocked_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Add an event."""
        if not self.me.is_rank0:
            return
        place = str(path or "")
        now, attempt = time.time(), self.me.attempt
        event = RunEvent(
            now, self.writer, kind, attempt, step, place, count, cause, request, detail, digest, took_s, blocked_s
        )
        with contextlib.suppress(OSError):  # a full disk on this host must not end all ranks
            append_line(self.run.events(self.writer), reader.dumps(event))

    def resumed_at(self, done: int, steps: int, *, anew: bool = False) -> None:
        """Keep the metrics up to step ``done``, after which the run resumes; ``steps``: its total; ``anew``: keep none."""
        self.steps = steps
        if not self.me.is_rank0:
            return
        kept = [] if anew else [line for line in read_metrics(self.run.metrics) if line.step <= done]
        write_atomic(self.run.metrics, "".join(reader.dumps(line) + "\n" for line in kept))
        samples = [] if anew else [each for each in read_records(Sample, self.run.samples, EVERY) if each.step <= done]
        write_atomic(self.run.samples, "".join(reader.dumps(each) + "\n" for each in samples))
        taken = [line for line in kept if isinstance(line, Metrics)]
        self.tokens = taken[-1].tokens if taken else 0
        self.losses = tuple(metrics.loss for metrics in taken)
        self.began_evaluated = len(taken) < len(kept)

    def evaluation(self, step: int, loss: float | None) -> None:
        """Append an evaluation where no step was taken."""
        if self.me.is_rank0:
            append_line(self.run.metrics, reader.dumps(EvaluationMetrics(step, time.time(), loss, self.me.attempt)))

    def samples(self, step: int, continued: Iterable[tuple[str, str]]) -> None:
        """Append how prompts were continued, all in one write, so that nobody reads a part of them; and print it."""
        found = [Sample(step, time.time(), prompt, text) for prompt, text in continued]
        if self.me.is_rank0 and found:
            append_line(self.run.samples, "\n".join(map(reader.dumps, found)))
            for each in found:
                print(f"{each.prompt!r} continues: {each.text!r}", flush=True)

    def metrics(self, metrics: Metrics) -> None:
        """Append one step, and print it."""
        if not self.me.is_rank0:
            return
        append_line(self.run.metrics, reader.dumps(metrics))
        more, self.retries = metrics.num_alloc_retries - self.retries, metrics.num_alloc_retries
        retried = f"  {counted(more, 'allocator retry', 'allocator retries')}: GPU memory is short" if more > 0 else ""
        own = "".join(f"  {name} {value:.4g}" for name, value in metrics.own.items())
        print(
            f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}  grad {metrics.grad_norm:.3f}  lr {metrics.lr:.2e}  "
            f"{metrics.tokens_per_s:,.0f} tokens/s  {metrics.step_s:.2f} s{own}{retried}",
            flush=True,
        )


def read_metrics(path: Path) -> list[Metrics | EvaluationMetrics]:
    """Read the metrics of earlier attempts; what follows a line truncated by a kill is dropped."""
    found: list[Metrics | EvaluationMetrics] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(reader.loads(METRICS_LINE, line, path.name))
            except reader.MalformedError:
                break
    return found
