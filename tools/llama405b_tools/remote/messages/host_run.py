"""What a host knows about its runs. Pure."""

import dataclasses

from llama405b.contract.checkpoints import STEP_DIR
from llama405b.contract.mesh import Axes
from llama405b.contract.records import Blame, GuardState, Heartbeat, MetricsLine, NodeStatus
from llama405b.contract.replicas import Copied


@dataclasses.dataclass(frozen=True, slots=True)
class StatusRequest:
    """Ask which runs the host knows."""

    host: str
    run: str | None = None  # None: the newest


@dataclasses.dataclass(frozen=True, slots=True)
class PlanRequest:
    """Ask for the ``Plan`` of the run's newest attempt."""

    run: str


@dataclasses.dataclass(frozen=True, slots=True)
class Beat(Heartbeat):
    """A rank's heartbeat, with the state of its process (R, S, D, T, …; "" if it is gone)."""

    state: str = ""

    def with_state(self, state: str) -> "Beat":
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
    heartbeats: tuple[Beat, ...]
    ends: tuple[NodeStatus, ...]  # of its last attempts, oldest first
    stopped_by: str
    metrics: MetricsLine | None  # of the last step, or of an evaluation where none was taken
    checkpoint: str | None  # the newest complete one
    now: float
    hosts: tuple[str, ...] = ()  # every host of the run
    guard: GuardState | None = None  # as last heard from it here; None: none was asked for
    blames: tuple[Blame, ...] = ()  # of its last attempts that failed, oldest first
    world: int = 0  # ranks on all its hosts
    save_s: float = 0.0  # how long its saves usually take; 0: unknown
    unsaved: str = ""  # the newest step that could not be saved since, and why
    unsent: str = ""  # where ``checkpoint.after_save`` fails, and why
    copied: Copied | None = None  # what the next host has of this one's checkpoints; None: nothing is copied
    tmux: str = ""  # the name of its tmux server there
    mesh: Axes | None = None  # of its ranks; None: of another program
    launching: bool = False  # whoever launches it has not been told by all hosts yet that they have started

    def __post_init__(self) -> None:
        """Refuse what cannot be true.

        Raises:
            ValueError: The checkpoint has another name than checkpoints have.
        """
        if self.checkpoint and not STEP_DIR.fullmatch(self.checkpoint.rpartition("/")[2]):
            raise ValueError("its checkpoint is not step-<8 digits>")


@dataclasses.dataclass(frozen=True, slots=True)
class StatusReply:
    """The host's runs, newest first."""

    runs: tuple[HostRun, ...]
    strangers: tuple[str, ...] = ()  # the hosts of the run that was asked for, if its files are here, but no part of it
