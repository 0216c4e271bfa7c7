"""Where this rank is, written to disk at most once per second, and shown in memory. Knows the clock and the contract; nothing of training.

Only the training thread writes: a rank that hangs falls silent, and the silence is the signal.
"""

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING

from llama405b.contract.causes import Cause
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Heartbeat, Phase
from llama405b.training.rank_memory import RankMemory

if TYPE_CHECKING:
    from llama405b.distributed.ranks import Rank  # needs torch

INTERVAL_S = 1.0


class HeartbeatWriter:
    """Writes ``heartbeat/rank-N.json``."""

    def __init__(self, run: RunDir, me: "Rank") -> None:
        self.run, self.me = run, me
        self.memory = RankMemory()
        now = time.time()
        self.record = Heartbeat(me.rank, me.host, os.getpid(), now, 0, Phase.START, now)
        self.before = self.record  # a long wait
        self._write()

    def phase(self, phase: Phase) -> None:
        """Enter a phase; always writes."""
        now = time.time()
        self.record = dataclasses.replace(
            self.record, phase=phase, phase_since=now, time=now, done_bytes=0, total_bytes=0
        )
        self._write()

    def waits_for_update(self, waits: bool) -> None:
        """Enter the phase of a long wait for the update of the weights, or leave it again."""
        if waits:
            self.before = self.record
            self.phase(Phase.UPDATE)
        else:
            self.record = dataclasses.replace(self.before, time=time.time())
            self._write()

    def finished_step(
        self, step: int, *, data_s: float | None = None, optimizer_s: float | None = None, busy_s: float | None = None
    ) -> None:
        """Record a finished or skipped step; how long the parts of a skipped one took is not known."""
        self._beat(step=step, data_s=data_s, optimizer_s=optimizer_s, busy_s=busy_s)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Record how much of the weights is loaded."""
        self._beat(done_bytes=done_bytes, total_bytes=total_bytes)

    def alive(self) -> None:
        """Record that it goes on within a phase."""
        self._beat()

    def save(self, every_s: float | None) -> None:
        """Record that a save is due, as one is every so many seconds; None: that none is any more."""
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
