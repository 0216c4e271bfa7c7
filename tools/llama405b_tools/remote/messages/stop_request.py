"""Messages for ending a run on a host, and finding what others left. Pure."""

import dataclasses

from llama405b.contract.phrases import given
from llama405b.contract.records import Blame
from llama405b_tools.remote.messages.host_run import HostRun

KILL_AFTER_S = 10.0  # between SIGTERM and SIGKILL
RUNNER_ENDS_S = 2 * KILL_AFTER_S  # after the grace period, until a node runner has ended its processes and said how
ANSWER_S = 3 * RUNNER_ENDS_S  # after the grace period, until a host has ended what is left and answered
CUT = "cut\n"  # sent to a tether, so that it ends nothing


@dataclasses.dataclass(frozen=True, slots=True)
class StopRequest:
    """End a run on this host."""

    run: str
    host: str
    only: str | None = None  # the rendezvous id of one launch; another launch is not touched
    by: str = ""  # who stopped it for good; then no restart follows
    grace_s: float = 0.0  # for the trainer to save first
    blame: Blame | None = None  # why the attempt is ended, if it failed; the first one is kept
    hard: bool = False  # as a crash would
    discard: bool = False  # delete a rehearsal's checkpoints


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
    def remains(self) -> str:
        """What could not be ended; '' if nothing is left."""
        if self.job_left:
            return "the job"
        return given("processes {}", ", ".join(map(str, self.left)))


@dataclasses.dataclass(frozen=True, slots=True)
class OrphansRequest:
    """Ask what is left of runs whose node runner is gone."""

    end: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """The processes of one run on this host."""

    value: str  # <run directory>:<host>
    pids: tuple[int, ...]
    what: str  # the first one's command line
    left: tuple[int, ...]  # after ending them, if that was requested


@dataclasses.dataclass(frozen=True, slots=True)
class OrphansReply:
    """What is left, by run."""

    orphans: tuple[Orphan, ...]
