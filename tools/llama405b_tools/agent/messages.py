"""Messages between the operator's machine and the agents: requests and replies, one dataclass each."""

import dataclasses
import enum
from collections.abc import Mapping

from llama405b.contract.checkpoints import STEP_DIR, CopiedStep
from llama405b.contract.errors import fmt_if
from llama405b.contract.reader import AS_WRITTEN
from llama405b.contract.records import (
    Cause,
    CauseKind,
    FailureRecord,
    GuardState,
    Heartbeat,
    MetricsLine,
    NodeStatus,
    RunEvent,
)
from llama405b.settings.axes import Axes
from llama405b.spec.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class RankHeartbeat(Heartbeat):
    """A rank's heartbeat, with the state of its process (R, S, D, T, …; "" if it is gone)."""

    state: str = ""

    def with_state(self, state: str) -> "RankHeartbeat":
        """Return the heartbeat with this process state."""
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
    heartbeats: tuple[RankHeartbeat, ...]
    ends: tuple[NodeStatus, ...]  # of its last attempts, oldest first
    stopped_by: str
    metrics: MetricsLine | None  # of the last step, or of an evaluation where none was taken
    checkpoint: str | None  # the newest complete one
    now: float
    hosts: tuple[str, ...] = ()  # every host of the run
    guard: GuardState | None = None  # as last heard from it here; None: none was asked for
    blames: tuple[FailureRecord, ...] = ()  # of its last attempts that failed, oldest first
    world: int = 0  # ranks on all its hosts
    save_s: float = 0.0  # how long its saves usually take; 0: unknown
    unsaved: str = ""  # the newest step that could not be saved since, and why
    unsent: str = ""  # where ``checkpoint.after_save`` fails, and why
    copied: CopiedStep | None = None  # what the next host has of this one's checkpoints; None: nothing is copied
    tmux: str = ""  # the name of its tmux server there
    mesh: Axes | None = None  # of its ranks; None: of another program
    launching: bool = False  # whoever launches it has not been told by all hosts yet that they have started

    def __post_init__(self) -> None:
        """Refuse a checkpoint path that does not end in a step directory."""
        if self.checkpoint and not STEP_DIR.fullmatch(self.checkpoint.rpartition("/")[2]):
            raise ValueError("its checkpoint is not step-<8 digits>")


@dataclasses.dataclass(frozen=True, slots=True)
class StatusReply:
    """The host's runs, newest first."""

    runs: tuple[HostRun, ...]
    strangers: tuple[str, ...] = ()  # the hosts of the run that was asked for, if its files are here, but no part of it


KILL_AFTER_S = 10.0  # between SIGTERM and SIGKILL
RUNNER_END_TIMEOUT_S = (
    2 * KILL_AFTER_S
)  # after the grace period, until a node runner has ended its processes and said how
STOP_TIMEOUT_S = 3 * RUNNER_END_TIMEOUT_S  # after the grace period, until a host has ended what is left and answered
RELEASE = "cut\n"  # sent to a tether, so that it ends nothing


@dataclasses.dataclass(frozen=True, slots=True)
class StopReply:
    """The outcome on this host."""

    known: bool  # whether the run is on this host
    was_alive: bool
    swept: int = 0  # processes ended
    left: tuple[int, ...] = ()  # processes that could not be ended
    job_left: bool = False  # the Slurm job still runs
    stopped_by: str = ""
    node: HostRun | None = None

    @property
    def survivors(self) -> str:
        """What could not be ended; '' if everything was."""
        if self.job_left:
            return "the job"
        return fmt_if("processes {}", ", ".join(map(str, self.left)))


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """The processes of one run on this host."""

    value: str  # <run directory>:<host>
    pids: tuple[int, ...]
    what: str  # the first one's command line
    left: tuple[int, ...]  # after ending them, if that was requested


HEARTBEAT_INTERVAL_S = 2.0  # how often a host sends its ranks' heartbeats, if they are asked for
LogOffsets = Mapping[str, tuple[int, int]]  # file below the log directory -> inode, bytes read


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
    whole: bool = False  # every byte, long lines in pieces and all states of bars
    most_bytes: int = 0  # of what a file has new; lines before them are skipped, and counted (0: none are)
    marks: LogOffsets = dataclasses.field(default_factory=dict)  # where an earlier reader stopped


@dataclasses.dataclass(frozen=True, slots=True)
class NodeUpdate:
    """The state of the run on this host."""

    alive: bool
    status: NodeStatus | None
    stopped_by: str
    blame: FailureRecord | None = None  # for the newest attempt that was ended, and why


@dataclasses.dataclass(frozen=True, slots=True)
class StreamMessage:
    """One message of a stream; a field that is not set has not changed."""

    # blocks of the logs: time, file, text as it was written, which whoever shows it cleans
    entries: tuple[tuple[float, str, str], ...] = dataclasses.field(default=(), metadata=AS_WRITTEN)
    marks: LogOffsets = dataclasses.field(default_factory=dict, metadata=AS_WRITTEN)  # after them
    metrics: tuple[MetricsLine, ...] = ()
    events: tuple[RunEvent, ...] = ()
    node: NodeUpdate | None = None
    beats: tuple[RankHeartbeat, ...] | None = None
    now: float | None = None
    skipped: int = 0  # lines that were written too fast for ``most_bytes``
    end: bool = False  # nothing more will come


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerReply:
    """The answer, if there is one, and whether the run is alive; only a live run can still answer."""

    answer: RunEvent | None
    alive: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DiskSpace:
    """One that the run writes to."""

    path: str
    free_bytes: int
    total_bytes: int


COMMIT = "keep\n"  # sent to a starting host once all hosts are up
TMUX_START_TIMEOUT_S = 60.0  # for tmux to start a session
START_TIMEOUT_S = 120.0  # for the node runner to start torchrun, however busy the machine is
START_REPLY_TIMEOUT_S = TMUX_START_TIMEOUT_S + START_TIMEOUT_S + 30.0  # for a host to report it


@dataclasses.dataclass(frozen=True, slots=True)
class StartRequest:
    """Start this host's part of a plan."""

    host: str
    plan: Plan
    secrets: Mapping[str, str]
    ranks: tuple[int, ...]
    again: bool = False  # a restart, refused if somebody has stopped the run meanwhile
    guard: GuardState | None = None  # that was asked for; in a restart the guard itself says what it does
    known_stop: float = 0.0  # the time of the stop that this launch ends, by the host's clock; 0: there was none


class StartFault(enum.StrEnum):
    """Why a host did not start."""

    TAKEN = "taken"  # somebody else has just started the run
    STOPPED = "stopped"  # somebody stopped the run
    STOPPED_SINCE = "stopped since"  # somebody stopped what was started here
    TMUX = "tmux"  # could not start a session
    ENDED = "ended"  # the node runner ended immediately
    SLOW = "slow"  # torchrun was not started in time


FAULTS_BEFORE_START = (
    StartFault.TAKEN,
    StartFault.STOPPED,
)  # this launch did nothing on the host, and has nothing to end there


@dataclasses.dataclass(frozen=True, slots=True)
class StartReply:
    """Whether the host started, and why not."""

    fault: StartFault | None = None
    by: str = ""
    cause: Cause = Cause(CauseKind.UNKNOWN, detail="no reason given")  # if the node runner ended
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """The host has received the order to keep its part, and obeys unless somebody stopped the run."""

    stopped_by: str = ""  # who did


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPart:
    """A directory with files of a checkpoint: the host's own part, or its copy of another's."""

    step: int
    digest: str  # of the manifest: equal for all parts of one checkpoint
    path: str
    here: tuple[str, ...]  # files with weights, or about them, that are complete
    needed: tuple[str, ...]  # all of them


@dataclasses.dataclass(frozen=True, slots=True)
class PartsReply:
    """The checkpoint files on a host."""

    root: str  # directory of the run's checkpoints; "": it has none here
    parts: tuple[CheckpointPart, ...] = ()
