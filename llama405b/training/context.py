"""What every part of a run gets on a rank: the rank, the run's directory, and the ways to report."""

import dataclasses

from llama405b.contract.paths import RunDir
from llama405b.distributed.ranks import Rank
from llama405b.training.journal import HeartbeatWriter, Journal


@dataclasses.dataclass(frozen=True, slots=True)
class RankContext:
    """A rank of a run, with its directory, journal and heartbeat."""

    rank: Rank
    run: RunDir
    journal: Journal
    heartbeat: HeartbeatWriter

    @classmethod
    def from_rank(cls, rank: Rank, heartbeat: HeartbeatWriter) -> "RankContext":
        """Make the context of a rank that has joined the process group."""
        heartbeat.record = dataclasses.replace(heartbeat.record, gpu=rank.gpu)
        return cls(rank, heartbeat.run, Journal(heartbeat.run, rank), heartbeat)
