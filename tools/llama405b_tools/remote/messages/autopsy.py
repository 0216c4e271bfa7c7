"""Asking a host what its ranks are doing right now, and its answer. Pure."""

import dataclasses

from llama405b.contract.rank_memory import Place
from llama405b.contract.reader import LINES
from llama405b_tools.machine.stacks import Thread
from llama405b_tools.remote.messages.host_run import Beat


@dataclasses.dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """Ask what a run's ranks are doing on a host."""

    run: str
    host: str
    window_s: float = 1.5  # over which is counted what they do


@dataclasses.dataclass(frozen=True, slots=True)
class Unsent:
    """A connection whose peer does not confirm what it was sent."""

    peer: str  # its address
    queued_bytes: int
    retries: int


@dataclasses.dataclass(frozen=True, slots=True)
class Doing:
    """What a process did within the window."""

    cpu_s: float = 0.0  # of all its threads
    waited_s: float = 0.0  # for a core, of all its threads
    throttled_s: float = 0.0  # that its control group had used up its share of the cores
    moved_bytes: int = 0  # read and written, of files and pipes and connections
    major_faults: int = 0  # pages that it had to wait for: from swap, or a file


@dataclasses.dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank of this host."""

    rank: int
    pid: int = 0  # 0: no process of it is left
    state: str = ""  # of its main thread, as the kernel writes it
    # the main thread's system call, with the file if it is of one; "": it runs, or that may not be seen
    waits_in: str = ""
    kernel_wait: str = ""  # the kernel's function that it waits in
    doing: Doing = dataclasses.field(default_factory=Doing)
    swapped_bytes: int = 0
    threads: tuple[Thread, ...] = ()  # the main thread first
    source: str = ""  # of the stacks: signal, py-spy, or ""
    no_stacks: str = ""  # why there are none
    place: Place | None = None  # None: the program is not our trainer
    beat: Beat | None = None
    unsent: tuple[Unsent, ...] = ()
    log: tuple[str, ...] = ()  # the last lines that it wrote
    moved: bool = False  # while it was looked at: its heartbeat is a newer one then


@dataclasses.dataclass(frozen=True, slots=True)
class DiskEvidence:
    """A filesystem that the run uses."""

    path: str
    answers: bool  # within a second
    free_bytes: int | None = None  # None: unknown, as of a directory that is not there


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How the run goes, as its head knows; None: unknown."""

    last_step: int | None = None  # of this attempt
    last_step_age_s: float | None = None
    usual_step_s: float | None = None  # in the median of this attempt's last steps
    usual_save_s: float | None = None
    unsaved: str = ""  # why the newest save failed, or that it is late
    load_s: float = 0.0  # the run's timeouts.load; 0: unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What stands around a host's ranks."""

    link_up: bool | None = None  # of the training network; None: unknown
    load: float = 0.0
    cores: int = 0
    available_bytes: int = 0  # of memory
    swap_used_bytes: int = 0
    disks: tuple[DiskEvidence, ...] = ()
    # what it said lately of GPUs, memory, disks, links; None: this user may not read it
    kernel: tuple[str, ...] | None = None
    nccl: str = dataclasses.field(default="", metadata=LINES)  # what NCCL's RAS says, if it is there
    flight_records: tuple[str, ...] = ()  # files that NCCL's flight recorder wrote in this attempt


@dataclasses.dataclass(frozen=True, slots=True)
class HostEvidence:
    """What one host knows of a run at one moment."""

    host: str
    now: float
    attempt: int = 0
    alive: bool = False  # its node runner
    address: str = ""  # on the training network
    interface: str = ""
    window_s: float = 0.0
    ranks: tuple[RankEvidence, ...] = ()
    progress: Progress = dataclasses.field(default_factory=Progress)
    around: Surroundings = dataclasses.field(default_factory=Surroundings)
