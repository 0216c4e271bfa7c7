"""What every part of a run gets on a rank: the rank, the run's directory, and the ways to report; why a rank ends."""

import dataclasses

from llama405b.contract.errors import EXIT_REFUSED, UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Cause, CauseKind
from llama405b.distributed.collectives import PeerFailedError, is_lost_peer
from llama405b.distributed.ranks import Rank
from llama405b.optim.step import NonFiniteError, SpikeError
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


def cause_of(error: Exception, heartbeat: HeartbeatWriter | None) -> Cause:
    """Return the cause for which this rank ends."""
    kind = CauseKind.RANK_EXIT
    peer = None
    detail = str(error)
    if is_lost_peer(error):
        kind, detail = CauseKind.LOST_PEER, detail[:300]
    elif isinstance(error, PeerFailedError):
        kind = CauseKind.FOLLOWED
        peer = error.peer
        detail = error.message
    elif isinstance(error, NonFiniteError):
        kind = CauseKind.NOT_FINITE
    elif isinstance(error, SpikeError):
        kind = CauseKind.SPIKE
    elif isinstance(error, UserError) and error.exit_code == EXIT_REFUSED:
        kind = CauseKind.REFUSED
    elif not isinstance(error, UserError):
        detail = f"{type(error).__name__}: {error}"
    cause = Cause(kind, peer=peer, detail=" ".join(detail.split()))  # always one line
    if heartbeat is None:
        return cause
    return dataclasses.replace(cause, host=heartbeat.rank.host, rank=heartbeat.rank.index, phase=heartbeat.record.phase)
