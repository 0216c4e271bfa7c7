"""What is new of a run, as it happens. Pure."""

import dataclasses
from collections.abc import Mapping

from llama405b.contract.events import RunEvent
from llama405b.contract.records import Metrics, NodeStatus
from llama405b_tools.remote.messages.status import Beat

Marks = Mapping[str, tuple[int, int]]  # file below the log directory -> inode, bytes read


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRequest:
    """Say what is new of a run, until standard input closes or it is over."""

    run: str
    host: str
    follow: bool = False
    forever: bool = False  # not only until the run ends: its guard may bring it back
    records: bool = False  # metrics and events too
    beats: bool = False  # heartbeats too
    attempt: int = 0  # of the logs; 0: the newest, and those that follow; -1: all
    since_s: float = 0.0  # only what came in so many seconds
    tail: int | None = None  # only so many lines of each file
    agent: bool = False  # torchrun's own log too
    stderr: bool = False  # only standard error
    marks: Marks = dataclasses.field(default_factory=dict)  # where an earlier reader was


@dataclasses.dataclass(frozen=True, slots=True)
class NodeNews:
    """What became of the host's part of the run."""

    alive: bool
    status: NodeStatus | None
    stopped_by: str


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """One message of a stream; what is not there has not changed."""

    entries: tuple[tuple[float, str, str], ...] = ()  # blocks of the logs: time, file, text
    marks: Marks = dataclasses.field(default_factory=dict)  # after them
    metrics: tuple[Metrics, ...] = ()
    events: tuple[RunEvent, ...] = ()
    node: NodeNews | None = None
    beats: tuple[Beat, ...] | None = None
    now: float | None = None
    end: bool = False  # nothing more will come
