"""Messages between the operator's machine and the agents: requests and replies, one dataclass each."""

import dataclasses
import enum
from collections.abc import Mapping

from llama405b.contract.checkpoints import STEP_DIR, CopiedStep
from llama405b.contract.errors import fmt_if
from llama405b.contract.reader import AS_WRITTEN, SoundOnly
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


@dataclasses.dataclass(frozen=True, slots=True)
class WatchRequest:
    """What ``watch`` reports of a host."""

    host: str
    run: str | None  # the one asked for
    stay: str  # the one to follow; "": the newest that is alive, else the newest
    interval_s: float
    deaf_s: float  # it ends when it has received nothing for so long
    smi_retry_s: float  # until an nvidia-smi that does not answer is replaced
    slots: int = 0  # of the host in the hosts file
    elsewhere: bool = False  # the host's files are on this machine, but it is another one


Nodes = tuple[tuple[str, int, int], ...]  # of a run: name, first rank, number of ranks


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step, by any trainer; values it does not report are None."""

    step: int
    loss: SoundOnly[float | None] = None  # None: not a finite number
    step_s: float | None = None  # None: no step was taken, only an evaluation made
    time: float | None = None  # the clock of the host that writes them
    attempt: int = 0  # the launch of the run that took the step; 0: unknown
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    update_s: float | None = None  # of updates on the CPU since the step before
    exposed_s: float | None = None  # of them, and of the norm: what the step waited for
    update_bytes: int | None = None  # that these updates moved in rank 0's CPU memory
    down_bytes: int | None = None  # of rank 0's gradients to CPU memory
    up_bytes: int | None = None  # of rank 0's weights from there
    tokens_per_s: float | None = None  # trained on
    all_tokens_per_s: float | None = None  # also those that are only read; None or 0: an earlier version's
    flops_per_token: float | None = None
    num_alloc_retries: int | None = None  # of rank 0's allocator so far in this attempt, for want of GPU memory
    evaluation_loss: SoundOnly[float | None] = None  # on data that is not trained on, after this step

    @property
    def rate(self) -> float | None:
        """Tokens per second as the plan counts them: all of the step's."""
        return self.all_tokens_per_s or self.tokens_per_s

    def __post_init__(self) -> None:
        """Refuse negative values."""
        times = (
            self.step_s,
            self.data_s,
            self.forward_s,
            self.backward_s,
            self.optimizer_s,
            self.update_s,
            self.exposed_s,
            self.update_bytes,
            self.down_bytes,
            self.up_bytes,
            self.num_alloc_retries,
            self.all_tokens_per_s,
        )
        if min(filter(None, (self.step, *times, self.tokens_per_s, self.flops_per_token)), default=0) < 0:
            raise ValueError


@dataclasses.dataclass(frozen=True, slots=True)
class RunFrame:
    """What a host reports about the run.

    ``usual_s``: by ``Phase``, the seconds in the median that this run's took before; the trainer records only saves, so only
    ``checkpoint`` is there, from the beginning of a save. ``run_created``: when this host first ran the run, whatever the
    attempt, by the clock of the file system that has the run's directory (the host's, or its file server's), in seconds since
    the epoch; None if it never has.
    """

    name: str
    created: float
    attempt: int
    alive: bool
    status: SoundOnly[NodeStatus | None]
    beats: SoundOnly[tuple[RankHeartbeat, ...]]
    log_age_s: float | None  # since the last line of any rank on this host
    net: str  # the transport NCCL reported: IB, EFA, SOCKET; "": none yet
    blame: SoundOnly[FailureRecord | None] = None  # on the last attempt that failed
    guard: SoundOnly[GuardState | None] = None  # as this host last heard from it
    others: tuple[str, ...] = ()  # other live runs on this host
    nodes: Nodes | None = None  # only if the plan is new
    trains: bool = True  # with ``nodes``: whether it runs our trainer, which writes heartbeats
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)  # with ``nodes``: NCCL's settings on this host
    expected_step_s: float = 0.0  # with ``nodes``: as predicted; 0: nothing is
    load_s: float = 0.0  # with ``nodes``: timeouts.load; 0: unknown
    mesh: SoundOnly[Axes | None] = None  # with ``nodes``: of the ranks
    metrics: SoundOnly[tuple[StepMetrics, ...]] = ()  # only from the head
    max_steps: int | None = None  # only from the head
    unsaved: str = ""  # only from the head: why the newest save failed
    unsent: str = ""  # only from the head: where the command after a save fails, and why
    usual_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # only from the head
    checkpoint_step: int | None = None  # the newest in the directory of checkpoints; None: there is none
    copied_step: int | None = None  # the newest of which the next host has this one's part; None: nothing is copied
    run_created: float | None = None
