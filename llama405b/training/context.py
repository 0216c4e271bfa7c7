"""What every part of a run on a rank is given: its place, the run's directory, and how it reports."""

import dataclasses

from llama405b.contract.paths import RunDir
from llama405b.contract.records import Phase
from llama405b.distributed.ranks import Rank
from llama405b.training.journal import HeartbeatWriter, Journal


@dataclasses.dataclass(frozen=True, slots=True)
class RankContext:
    """A rank at work on a run."""

    me: Rank
    run: RunDir
    journal: Journal
    heartbeat: HeartbeatWriter

    @classmethod
    def of(cls, me: Rank, heartbeat: HeartbeatWriter) -> "RankContext":
        """Return that of a rank that has joined the others."""
        heartbeat.record = dataclasses.replace(heartbeat.record, gpu=me.gpu)
        return cls(me, heartbeat.run, Journal(heartbeat.run, me), heartbeat)

    def log(self, line: str) -> None:
        """Print a line, on rank 0."""
        self.journal.log(line)

    def phase(self, phase: Phase) -> None:
        """Enter a phase."""
        self.heartbeat.phase(phase)
