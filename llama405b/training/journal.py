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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama405b.contract import reader
from llama405b.contract.errors import counted, reason_of, remedy_of
from llama405b.contract.files import EVERY, append_line, read_records, write_atomic, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import (
    METRICS_LINE,
    NAME,
    PLACE,
    PLACE_BYTES,
    SIGNAL,
    UNIT_BYTES,
    Cause,
    EvaluationMetrics,
    EventKind,
    Heartbeat,
    Metrics,
    Phase,
    RunEvent,
    Sample,
)

if TYPE_CHECKING:
    from llama405b.distributed.ranks import Rank  # needs torch
MOST_OF = 0.98  # if fewer of the tokens are trained on, print both rates


class Journal:
    """Rank 0's ``metrics.jsonl`` and ``events/rank-0.jsonl``, and its standard output."""

    def __init__(self, run: RunDir, me: "Rank") -> None:
        self.run, self.me = run, me
        self.writer = f"rank-{me.rank}"
        self.tokens = 0  # target tokens so far
        self.steps = 0  # total steps of the run
        self.losses: tuple[float, ...] = ()  # of the steps before the resume
        self.began_evaluated = False  # an earlier attempt evaluated the initial weights
        self.retries = 0  # allocator retries in this attempt
        self.lost = RunEvent(0.0, self.writer, EventKind.NOT_WRITTEN, me.attempt)  # lines that could not be written

    def log(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.me.is_rank0:
            print(line, flush=True)

    def event(
        self, kind: EventKind, *, step: int | None = None, path: Path | None = None, detail: str = "",
        request: str = "", cause: Cause | None = None, count: int = 0, digest: str = "", took_s: float = 0.0, blocked_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Append an event, on rank 0."""
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
        """Append an evaluation that follows no step."""
        if self.me.is_rank0:
            self._append(self.run.metrics, [EvaluationMetrics(step, time.time(), loss, self.me.attempt)])

    def samples(self, step: int, continued: Iterable[tuple[str, str]]) -> None:
        """Append and print continuations; one write for all, so that no reader sees only a part of them."""
        found = [Sample(step, time.time(), prompt, text) for prompt, text in continued]
        if self.me.is_rank0 and found:
            self._append(self.run.samples, found)
            for each in found:
                print(f"{each.prompt!r} → {each.text!r}", flush=True)

    def metrics(self, metrics: Metrics) -> None:
        """Append and print the metrics of one step."""
        if not self.me.is_rank0:
            return
        self._append(self.run.metrics, [metrics])
        more, self.retries = metrics.num_alloc_retries - self.retries, metrics.num_alloc_retries
        retried = f"  {counted(more, 'allocator retry', 'allocator retries')}: GPU memory is short" if more > 0 else ""
        few = f" ({metrics.tokens_per_s:,.0f} trained on)" if metrics.tokens_per_s < MOST_OF * metrics.rate else ""
        own = "".join(f"  {name} {value:.4g}" for name, value in metrics.own.items())
        print(
            f"step {metrics.step}/{self.steps}  loss {metrics.loss:.4f}  grad {metrics.grad_norm:.3f}  lr {metrics.lr:.2e}  "
            f"{metrics.rate:,.0f} tokens/s{few}  {metrics.step_s:.2f} s{own}{retried}",
            flush=True,
        )

    def _append(self, path: Path, records: "Sequence[Metrics | EvaluationMetrics | Sample]") -> None:
        """Append records in one write; count those that cannot be written, as training matters more."""
        before = self.lost
        try:
            append_line(path, "\n".join(map(reader.dumps, records)))
        except OSError as error:
            detail = f"{path}: {reason_of(error)}{remedy_of(error)}"
            count, step = before.count + len(records), records[-1].step
            self.lost = dataclasses.replace(before, count=count, step=step, path=str(path), detail=detail)
            if not before.count:
                print(
                    f"{path} cannot be written ({reason_of(error)}){remedy_of(error)}; training continues", flush=True
                )
            return
        if before.count:
            self.lost = dataclasses.replace(before, count=0)
            lost_of = Path(before.path)
            self.event(EventKind.NOT_WRITTEN, step=before.step, path=lost_of, detail=before.detail, count=before.count)
            print(
                f"{lost_of} is writable again; {counted(before.count, 'line')} up to step {before.step} were lost",
                flush=True,
            )


def read_metrics(path: Path) -> list[Metrics | EvaluationMetrics]:
    """Return the metrics of earlier attempts; skip lines that a kill or a full disk truncated."""
    found: list[Metrics | EvaluationMetrics] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(reader.loads(METRICS_LINE, line, path.name))
            except reader.MalformedError:
                continue
    return found


class RankMemory:
    """Shows the current step and unit in a memory file; on a signal, faulthandler appends all stacks to it.

    faulthandler needs neither the GIL nor memory, so it also works when a rank holds the GIL forever or waits in a collective.
    """

    def __init__(self) -> None:
        self.place: mmap.mmap | bytearray = bytearray(PLACE_BYTES)
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # out of memory or of open files: a rank can train without it
            file = os.memfd_create(NAME)
            os.ftruncate(file, PLACE_BYTES)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that a reader may truncate what it has read
            self.place = mmap.mmap(file, PLACE_BYTES)
            faulthandler.register(SIGNAL, file=file, all_threads=True)

    def step(self, step: int) -> None:
        """Show the current step, in no unit yet."""
        PLACE.pack_into(self.place, 0, step, NO_UNIT)

    def unit(self, label: bytes) -> None:
        """Show the current unit by its ``unit_label``: one copy of 64 bytes."""
        self.place[-UNIT_BYTES:] = label


def unit_label(name: str, way: str) -> bytes:
    """Return the label of a unit, cut at the front to fit."""
    return f"{name} {way}".encode()[-UNIT_BYTES:].ljust(UNIT_BYTES, b"\0")


NO_UNIT = bytes(UNIT_BYTES)


INTERVAL_S = 1.0


class HeartbeatWriter:
    """Writes ``heartbeat/rank-N.json``."""

    def __init__(self, run: RunDir, me: "Rank") -> None:
        self.run, self.me = run, me
        self.memory = RankMemory()
        now = time.time()
        self.record = Heartbeat(me.rank, me.host, os.getpid(), now, 0, Phase.START, now)
        self.before = self.record  # the record before a long wait
        self._write()

    def phase(self, phase: Phase) -> None:
        """Enter a phase; always write."""
        now = time.time()
        self.record = dataclasses.replace(
            self.record, phase=phase, phase_since=now, time=now, done_bytes=0, total_bytes=0
        )
        self._write()

    def waits_for_update(self, waits: bool) -> None:
        """Enter or leave the phase of a long wait for an update of the weights."""
        if waits:
            self.before = self.record
            self.phase(Phase.UPDATE)
        else:
            self.record = dataclasses.replace(self.before, time=time.time())
            self._write()

    def finished_step(
        self, step: int, *, data_s: float | None = None, optimizer_s: float | None = None, busy_s: float | None = None
    ) -> None:
        """Record a finished or skipped step; durations are unknown for a skipped one."""
        self._beat(step=step, data_s=data_s, optimizer_s=optimizer_s, busy_s=busy_s)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Record how many bytes of the current phase are done."""
        self._beat(done_bytes=done_bytes, total_bytes=total_bytes)

    def alive(self) -> None:
        """Record that the rank still makes progress within a phase."""
        self._beat()

    def save(self, every_s: float | None) -> None:
        """Record that a save is due, and the seconds between saves; None: no save is due any more."""
        since = None if every_s is None else self.record.save_since or time.time()
        self.record = dataclasses.replace(self.record, save_since=since, save_every_s=every_s or 0.0)
        self._write()

    def failed(self, cause: Cause) -> None:
        """Record why this rank ends."""
        self.record = dataclasses.replace(self.record, cause=cause)
        self.phase(Phase.FAILED)

    def _beat(self, **news: float | None) -> None:
        self.record = dataclasses.replace(self.record, **news)  # type: ignore[arg-type]
        now = time.time()
        if now - self.record.time >= INTERVAL_S:
            self.record = dataclasses.replace(self.record, time=now)
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk on this host must not end all ranks
            write_json(self.run.heartbeat(self.me.rank), self.record)
