"""What goes between the operator's machine and a host's agent: requests in, replies out, each a line of JSON. Pure.

Both ends read them with ``contract.reader``. Times are seconds since the epoch by the clock of whoever writes.
"""

import dataclasses
import enum
from collections.abc import Mapping

from llama405b.contract.causes import Cause
from llama405b.contract.events import RunEvent
from llama405b.contract.plan import Plan
from llama405b.contract.records import Heartbeat, Metrics, NodeStatus
from llama405b.contract.requests import RequestKind
from llama405b_tools.machine.addresses import Address
from llama405b_tools.machine.fabric import Rdma

KEEP = "keep\n"  # what a starting host is told once all hosts are up
LOOK = "look\n"  # what the hosts of a chain are told once all have left their mark


@dataclasses.dataclass(frozen=True, slots=True)
class StartRequest:
    """Start this host's part of a plan."""

    host: str
    plan: Plan
    secrets: Mapping[str, str]
    ranks: tuple[int, ...]
    again: bool = False  # a restart, which a stop that somebody asked for meanwhile forbids


class StartFault(enum.StrEnum):
    """Why a host did not start."""

    TAKEN = "taken"  # the run was started just now, by somebody else
    STOPPED = "stopped"  # somebody asked for its end
    TMUX = "tmux"  # would not start a session
    ENDED = "ended"  # the node runner did, at once
    SLOW = "slow"  # torchrun was not started in time


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """Whether it did."""

    fault: StartFault | None = None
    by: str = ""
    cause: Cause | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The host heard that it is to go on."""

    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks which runs are there."""

    host: str
    run: str | None = None  # None: the newest


@dataclasses.dataclass(frozen=True, slots=True)
class Beat(Heartbeat):
    """A rank's heartbeat, with the state of its process (R, S, D, T, …; "" if it is gone)."""

    state: str = ""

    def with_state(self, state: str) -> "Beat":
        """The same, of a process in this state."""
        return dataclasses.replace(self, state=state)


@dataclasses.dataclass(frozen=True, slots=True)
class HostRun:
    """One run, as one host knows it."""

    run: str
    created: float
    attempt: int
    owner: str
    first_rank: int
    alive: bool
    leftovers: tuple[int, ...]  # processes of a run whose node runner is gone
    status: NodeStatus | None
    heartbeats: tuple[Beat, ...]
    ends: tuple[NodeStatus, ...]  # of its last attempts, oldest first
    stopped_by: str
    metrics: Metrics | None  # of the last step
    checkpoint: str | None  # the newest that is complete
    now: float


@dataclasses.dataclass(frozen=True, slots=True)
class StatusReply:
    """Newest first."""

    runs: tuple[HostRun, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EndRequest:
    """End a run here."""

    run: str
    host: str
    only: str | None = None  # the rendezvous id of one launch; another's is not touched
    by: str = ""  # who asked for it, so that no restart follows
    grace_s: float = 0.0  # for the trainer to save first
    hard: bool = False  # as a crash would
    discard: bool = False  # delete a rehearsal's checkpoints


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What became of it."""

    known: bool  # whether the run is this host's
    was_alive: bool
    swept: int = 0  # processes ended
    left: tuple[int, ...] = ()  # processes that could not be ended
    job_left: bool = False  # the Slurm job still runs
    stopped_by: str = ""
    node: HostRun | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing is left."""
        return not self.left and not self.job_left


@dataclasses.dataclass(frozen=True, slots=True)
class OrphansRequest:
    """Asks what is left of runs whose node runner is gone."""

    end: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """The processes of one run on this host."""

    value: str  # <run directory>:<host>
    pids: tuple[int, ...]
    what: str  # the first one's command line
    left: tuple[int, ...]  # after ending them, where that was asked for


@dataclasses.dataclass(frozen=True, slots=True)
class OrphansReply:
    """By run."""

    orphans: tuple[Orphan, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AskRequest:
    """Hand a request to a run that trains; for the head."""

    run: str
    kind: RequestKind
    by: str
    steps: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The request was written."""

    id: str  # its answer is an event that names it; "": the run does not live here


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


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRequest:
    """Receive files into a directory, and pass them on."""

    to: str
    token: str
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class RelayReady:
    """Where the host listens; or why it cannot receive, now or ever."""

    port: int = 0
    addresses: tuple[str, ...] = ()
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RelaySees:
    """The hosts whose marks stand in the directory: it is one with theirs."""

    sees: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NextHop:
    """The host after this one."""

    addresses: tuple[str, ...]
    port: int
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """Who comes next in the chain; None: nobody."""

    below: NextHop | None


@dataclasses.dataclass(frozen=True, slots=True)
class SendRequest:
    """Send files of this host to the first of a chain."""

    path: str
    below: NextHop


@dataclasses.dataclass(frozen=True, slots=True)
class RelayNews:
    """How far a host of the chain is."""

    done: int = 0  # bytes
    total: int = 0
    end: bool = False
    fault: str = ""
    own: bool = False  # the fault is this host's, and would be again


@dataclasses.dataclass(frozen=True, slots=True)
class WeightsCheck:
    """The checkpoint that rank 0 will read, and what it has to fit."""

    path: str
    seq_len: int
    layers: int
    random: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Asks what launch must know of this host."""

    run: str
    host: str
    port: int
    token: str
    packages: tuple[str, ...]
    places: Mapping[str, str]  # cache and scratch of the hosts file
    is_head: bool = False
    candidates: tuple[str, ...] = ()  # addresses that the head may have
    weights: WeightsCheck | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """The way from a host to an address of the head."""

    fault: str  # "": it answers with its token
    mine: str = ""  # the own address on the way there
    interface: str = ""  # that carries it


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A directory in full, and whether it is there or can be made."""

    path: str
    writable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What launch must know of a host."""

    versions: Mapping[str, str]
    tmux: bool
    ip: bool
    run_exists: bool
    attempt: int
    owner: str
    alive: bool
    others: tuple[str, ...]  # names of other runs that live here
    leftovers: tuple[int, ...]
    machine: str
    gpus: int
    rdma: Rdma
    cores: int
    port_fault: str  # of the port that was asked for, on the head
    port_in_use: bool
    own: tuple[Address, ...]
    head: Mapping[str, Reach]  # by address of the head
    workdir: str
    writable: bool
    places: Mapping[str, Place]
    free_bytes: int
    weights_fault: str  # "": the checkpoint is whole and fits, or was not asked for
