"""News of a run, as it happens. Pure."""

import dataclasses
from collections.abc import Mapping

from llama405b.contract.events import RunEvent
from llama405b.contract.reader import AS_WRITTEN
from llama405b.contract.records import Blame, MetricsLine, NodeStatus
from llama405b_tools.remote.messages.host_run import Beat

BEATS_EVERY_S = 2.0  # how often a host sends its ranks' heartbeats, if they are asked for
Marks = Mapping[str, tuple[int, int]]  # file below the log directory -> inode, bytes read


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRequest:
    """Report what is new in a run, until standard input closes or the run is over."""

    run: str
    host: str
    follow: bool = False
    forever: bool = False  # even after the run ends: its guard may restart it
    records: bool = False  # metrics and events too
    beats: bool = False  # heartbeats too
    attempt: int = 0  # of the logs; 0: the newest and any later ones; -1: all
    since_s: float = 0.0  # only what arrived in the last N seconds
    tail: int | None = None  # only the last N lines of each file
    agent: bool = False  # torchrun's own log too
    stderr: bool = False  # only standard error
    most_bytes: int = 0  # of what a file has new; lines before them are skipped, and counted (0: none are)
    marks: Marks = dataclasses.field(default_factory=dict)  # where an earlier reader stopped


@dataclasses.dataclass(frozen=True, slots=True)
class NodeUpdate:
    """The state of the host's part of the run."""

    alive: bool
    status: NodeStatus | None
    stopped_by: str
    blame: Blame | None = None  # for the newest attempt that was ended, and why


@dataclasses.dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a stream; a field that is not set has not changed."""

    # blocks of the logs: time, file, text as it was written, which whoever shows it cleans
    entries: tuple[tuple[float, str, str], ...] = dataclasses.field(default=(), metadata=AS_WRITTEN)
    marks: Marks = dataclasses.field(default_factory=dict, metadata=AS_WRITTEN)  # after them
    metrics: tuple[MetricsLine, ...] = ()
    events: tuple[RunEvent, ...] = ()
    node: NodeUpdate | None = None
    beats: tuple[Beat, ...] | None = None
    now: float | None = None
    skipped: int = 0  # lines that were written too fast for ``most_bytes``
    end: bool = False  # nothing more will come
