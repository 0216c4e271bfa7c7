"""Reports of a rank while it trains: the journal, the heartbeat, and live progress in memory (records in ``contract.records``).

Only the training thread writes the heartbeat, to disk at most once per second: a rank that hangs falls silent, and silence is the signal.
Live progress is a file in memory; it exists only on Linux. Knows the run's directory; not torch.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama405b.contract import reader
from llama405b.contract.errors import pluralize, reason_of, remedy_of
from llama405b.contract.files import UNLIMITED, append_line, read_records, write_atomic, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import (
    MEMORY_FILE_NAME,
    METRICS_LINE,
    POSITION_BYTES,
    POSITION_STRUCT,
    QUOTE_PREFIX,
    STACKS_SIGNAL,
    UNIT_BYTES,
    Cause,
    EvaluationMetrics,
    EventKind,
    Heartbeat,
    Metrics,
    Phase,
    PromptSample,
    RunEvent,
    SequencePreview,
)

if TYPE_CHECKING:
    from llama405b.distributed.ranks import Rank  # needs torch
TRAINED_SHARE = 0.98  # if fewer of the tokens are trained on, print both rates


class Journal:
    """Rank 0's ``metrics.jsonl`` and ``events/rank-0.jsonl``, and its standard output."""

    def __init__(self, run: RunDir, rank: "Rank") -> None:
        self.run, self.rank = run, rank
        self.writer = f"rank-{rank.index}"
        self.tokens = 0  # target tokens so far
        self.steps = 0  # total steps of the run
        self.losses: tuple[float, ...] = ()  # of the steps before the resume
        self.evaluated_at_start = False  # an earlier attempt evaluated the initial weights
        self.n_retries = 0  # allocator retries in this attempt
        self.not_written = RunEvent(
            0.0, self.writer, EventKind.NOT_WRITTEN, rank.attempt
        )  # lines that could not be written

    def log(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.rank.is_rank0:
            print(line, flush=True)

    def write_event(
        self, kind: EventKind, *, step: int | None = None, path: Path | None = None, detail: str = "",
        request: str = "", cause: Cause | None = None, count: int = 0, digest: str = "", took_s: float = 0.0, blocked_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Append an event, on rank 0."""
        if not self.rank.is_rank0:
            return
        path_text = str(path or "")
        now, attempt = time.time(), self.rank.attempt
        event = RunEvent(
            now, self.writer, kind, attempt, step, path_text, count, cause, request, detail, digest, took_s, blocked_s
        )
        with contextlib.suppress(OSError):  # a full disk on this host must not end all ranks
            append_line(self.run.events(self.writer), reader.dumps(event))

    def resume_after(self, step: int, steps: int, *, restart: bool = False) -> None:
        """Keep the metrics up to step ``step``, after which the run resumes; ``steps``: its total; ``restart``: keep none."""
        self.steps = steps
        if not self.rank.is_rank0:
            return
        lines = [] if restart else [line for line in read_metrics(self.run.metrics) if line.step <= step]
        write_atomic(self.run.metrics, "".join(reader.dumps(line) + "\n" for line in lines))
        samples = (
            []
            if restart
            else [sample for sample in read_records(PromptSample, self.run.samples, UNLIMITED) if sample.step <= step]
        )
        write_atomic(self.run.samples, "".join(reader.dumps(sample) + "\n" for sample in samples))
        step_metrics = [line for line in lines if isinstance(line, Metrics)]
        self.tokens = step_metrics[-1].tokens if step_metrics else 0
        self.losses = tuple(metrics.loss for metrics in step_metrics)
        self.evaluated_at_start = len(step_metrics) < len(lines)

    def write_evaluation(self, step: int, loss: float | None) -> None:
        """Append an evaluation that follows no step."""
        if self.rank.is_rank0:
            self._append(self.run.metrics, [EvaluationMetrics(step, time.time(), loss, self.rank.attempt)])

    def write_samples(self, step: int, continuations: Iterable[tuple[str, str]]) -> None:
        """Append and print continuations; one write for all, so that no reader sees only a part of them."""
        samples = [PromptSample(step, time.time(), prompt, text) for prompt, text in continuations]
        if self.rank.is_rank0 and samples:
            self._append(self.run.samples, samples)
            for sample in samples:
                print(f"{sample.prompt!r} → {sample.text!r}", flush=True)

    def write_sequences(
        self, previews: Sequence[SequencePreview], format_lines: Callable[[SequencePreview], Iterable[str]]
    ) -> None:
        """Write and print the first sequences, on rank 0, unless an earlier attempt wrote the same."""
        if read_records(SequencePreview, self.run.sequences, UNLIMITED) == list(previews):
            return
        with contextlib.suppress(OSError):  # a full disk must not end the run; the log has them
            write_atomic(self.run.sequences, "".join(reader.dumps(preview) + "\n" for preview in previews))
        lines = [line for preview in previews for line in format_lines(preview)]
        print("the first sequences, with what is trained on between ⟦ and ⟧:", flush=True)
        print("".join(f"{QUOTE_PREFIX}{line}\n" for line in lines), end="", flush=True)

    def write_metrics(self, metrics: Metrics) -> None:
        """Append and print the metrics of one step."""
        if not self.rank.is_rank0:
            return
        self._append(self.run.metrics, [metrics])
        new_retries, self.n_retries = metrics.num_alloc_retries - self.n_retries, metrics.num_alloc_retries
        retry_note = (
            f"  {pluralize(new_retries, 'allocator retry', 'allocator retries')}: GPU memory is short"
            if new_retries > 0
            else ""
        )
        trained_note = (
            f" ({metrics.tokens_per_s:,.0f} trained on)" if metrics.tokens_per_s < TRAINED_SHARE * metrics.rate else ""
        )
        user_metrics = "".join(f"  {name} {value:.4g}" for name, value in metrics.own.items())
        print(
            f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}  grad {metrics.grad_norm:.3f}  lr {metrics.lr:.2e}  "
            f"{metrics.rate:,.0f} tokens/s{trained_note}  {metrics.step_s:.2f} s{user_metrics}{retry_note}",
            flush=True,
        )

    def _append(self, path: Path, records: "Sequence[Metrics | EvaluationMetrics | PromptSample]") -> None:
        """Append records in one write; count those that cannot be written, as training matters more."""
        previous = self.not_written
        try:
            append_line(path, "\n".join(map(reader.dumps, records)))
        except OSError as error:
            detail = f"{path}: {reason_of(error)}{remedy_of(error)}"
            count, step = previous.count + len(records), records[-1].step
            self.not_written = dataclasses.replace(previous, count=count, step=step, path=str(path), detail=detail)
            if not previous.count:
                print(
                    f"{path} cannot be written ({reason_of(error)}){remedy_of(error)}; training continues", flush=True
                )
            return
        if previous.count:
            self.not_written = dataclasses.replace(previous, count=0)
            lost_path = Path(previous.path)
            self.write_event(
                EventKind.NOT_WRITTEN, step=previous.step, path=lost_path, detail=previous.detail, count=previous.count
            )
            print(
                f"{lost_path} is writable again; {pluralize(previous.count, 'line')} up to step {previous.step} were lost",
                flush=True,
            )


def read_metrics(path: Path) -> list[Metrics | EvaluationMetrics]:
    """Return the metrics of earlier attempts; skip lines that a kill or a full disk truncated."""
    records: list[Metrics | EvaluationMetrics] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(reader.loads(METRICS_LINE, line, path.name))
            except reader.MalformedError:
                continue
    return records


class LiveProgress:
    """Shows the current step and unit in a memory file; on a signal, faulthandler appends all stacks to it.

    faulthandler needs neither the GIL nor memory, so it also works when a rank holds the GIL forever or waits in a collective.
    """

    def __init__(self) -> None:
        self.memory: mmap.mmap | bytearray = bytearray(POSITION_BYTES)
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # out of memory or of open files: a rank can train without it
            file = os.memfd_create(MEMORY_FILE_NAME)
            os.ftruncate(file, POSITION_BYTES)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that a reader may truncate what it has read
            self.memory = mmap.mmap(file, POSITION_BYTES)
            faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)

    def show_step(self, step: int) -> None:
        """Show the current step, in no unit yet."""
        POSITION_STRUCT.pack_into(self.memory, 0, step, NO_UNIT)

    def show_unit(self, label: bytes) -> None:
        """Show the current unit by its ``unit_label``: one copy of 64 bytes."""
        self.memory[-UNIT_BYTES:] = label


def unit_label(name: str, direction: str) -> bytes:
    """Return the label of a unit, cut at the front to fit."""
    return f"{name} {direction}".encode()[-UNIT_BYTES:].ljust(UNIT_BYTES, b"\0")


NO_UNIT = bytes(UNIT_BYTES)


WRITE_INTERVAL_S = 1.0


class HeartbeatWriter:
    """Writes ``heartbeat/rank-N.json``."""

    def __init__(self, run: RunDir, rank: "Rank") -> None:
        self.run, self.rank = run, rank
        self.live_progress = LiveProgress()
        now = time.time()
        self.record = Heartbeat(rank.index, rank.host, os.getpid(), now, 0, Phase.START, now)
        self.record_before_wait = self.record  # the record before a long wait
        self._write()

    def enter_phase(self, phase: Phase) -> None:
        """Enter a phase; always write."""
        now = time.time()
        self.record = dataclasses.replace(
            self.record, phase=phase, phase_since=now, time=now, done_bytes=0, total_bytes=0
        )
        self._write()

    def record_update_wait(self, is_waiting: bool) -> None:
        """Enter or leave the phase of a long wait for an update of the weights."""
        if is_waiting:
            self.record_before_wait = self.record
            self.enter_phase(Phase.UPDATE)
        else:
            self.record = dataclasses.replace(self.record_before_wait, time=time.time())
            self._write()

    def record_step(
        self, step: int, *, data_s: float | None = None, optimizer_s: float | None = None, busy_s: float | None = None
    ) -> None:
        """Record a finished or skipped step; durations are unknown for a skipped one."""
        self._beat(step=step, data_s=data_s, optimizer_s=optimizer_s, busy_s=busy_s)

    def record_progress(self, done_bytes: int, total_bytes: int) -> None:
        """Record how many bytes of the current phase are done."""
        self._beat(done_bytes=done_bytes, total_bytes=total_bytes)

    def record_alive(self) -> None:
        """Record that the rank still makes progress within a phase."""
        self._beat()

    def record_save(self, every_s: float | None) -> None:
        """Record that a save is due, and the seconds between saves; None: no save is due any more."""
        save_since = None if every_s is None else self.record.save_since or time.time()
        self.record = dataclasses.replace(self.record, save_since=save_since, save_every_s=every_s or 0.0)
        self._write()

    def record_failure(self, cause: Cause) -> None:
        """Record why this rank ends."""
        self.record = dataclasses.replace(self.record, cause=cause)
        self.enter_phase(Phase.FAILED)

    def _beat(self, **changes: float | None) -> None:
        self.record = dataclasses.replace(self.record, **changes)  # type: ignore[arg-type]
        now = time.time()
        if now - self.record.time >= WRITE_INTERVAL_S:
            self.record = dataclasses.replace(self.record, time=now)
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk on this host must not end all ranks
            write_json(self.run.heartbeat(self.rank.index), self.record)
