"""Where this rank is, said on disk at most once a second. Knows the clock and ``rundir``; nothing of training.

Only the training thread writes: a rank that hangs falls silent, and that silence is the signal.
"""

import contextlib
import os
import time

from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Heartbeat, Metrics
from llama405b.ranks import Ranks

INTERVAL_S = 1.0


class Pulse:
    """Writes ``heartbeat/rank-N.json``."""

    def __init__(self, run: RunDir, me: Ranks) -> None:
        self.path = run.heartbeat(me.rank)
        self.me = me
        self.step = 0
        self.data_s: float | None = None
        self.optimizer_s: float | None = None
        self.phase_name, self.phase_since = "start", time.time()
        self.written = 0.0
        self.beat(force=True)

    def phase(self, name: str) -> None:
        """Enter a phase; always written."""
        self.phase_name, self.phase_since = name, time.time()
        self.beat(force=True, at_phase=True)

    def stepped(self, metrics: Metrics) -> None:
        """A step was done."""
        self.step, self.data_s, self.optimizer_s = metrics.step, metrics.data_s, metrics.optimizer_s
        self.beat()

    def beat(
        self,
        done_bytes: int = 0,
        total_bytes: int = 0,
        *,
        force: bool = False,
        message: str = "",
        failed_in: str = "",
        at_phase: bool = False,
    ) -> None:
        """Say that this rank is alive, and how far it is; ``at_phase``: it enters its phase at this moment."""
        now = self.phase_since if at_phase else time.time()
        if not force and now - self.written < INTERVAL_S:
            return
        self.written = now
        record = Heartbeat(
            self.me.rank,
            self.me.host,
            os.getpid(),
            now,
            self.step,
            self.phase_name,
            self.phase_since,
            done_bytes,
            total_bytes,
            message,
            failed_in,
            self.data_s,
            self.optimizer_s,
        )
        with contextlib.suppress(OSError):  # a full disk here is no reason for all ranks to end
            write_json(self.path, record)

    def failed(self, message: str) -> None:
        """Say why this rank ends."""
        failed_in, self.phase_name, self.phase_since = self.phase_name, "failed", time.time()
        self.beat(force=True, message=message, failed_in=failed_in)
