"""The types of ``plan.json``, which says what runs on which host, and their reader."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import AS_WRITTEN
from llama405b.settings.axes import Axes
from llama405b.settings.renamed import translate_flags

if TYPE_CHECKING:
    from llama405b.settings.schema import Parallel

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OWN_THREADS = "LLAMA405B_OWN_THREADS"  # in the ranks' environment, if OMP_NUM_THREADS there is the user's
REHEARSAL = "-rehearsal"  # suffix of a run's name: its checkpoints may be deleted


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One host's part of a run."""

    name: str
    slots: int
    first_rank: int
    workdir: str
    python: str
    address: str  # on the training network
    interface: str  # has that address
    env: Mapping[str, str] = dataclasses.field(metadata=AS_WRITTEN)

    @property
    def ranks(self) -> range:
        """The ranks on this host."""
        return range(self.first_rank, self.first_rank + self.slots)


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What a launch predicted of its run, as the run measures it; 0: it did not predict that. Times are in seconds."""

    step_s: float = 0.0
    shortest: float = 1.0  # likely times, as shares of those that are predicted
    longest: float = 1.0
    allocated_bytes: float = 0.0  # of a rank's GPU, by PyTorch
    peak_bytes: float = 0.0  # the same, with what it keeps; without a GPU, of a rank's memory
    start_s: float = 0.0  # reading weights and pinning memory
    save_s: float = 0.0  # to write a checkpoint
    save_wait_s: float = 0.0  # of that, training waits
    seal: str = ""  # SHA-256 of the run's name and all else here, so that a score is of what was predicted

    def sealed(self, run: str) -> "Expected":
        """Return it with its seal."""
        return dataclasses.replace(self, seal=self._digest(run))

    def is_sealed(self, run: str) -> bool:
        """Whether nothing here was changed after the launch of this run."""
        return self.seal == self._digest(run)

    def _digest(self, run: str) -> str:
        content = dataclasses.asdict(dataclasses.replace(self, seal=""))
        return hashlib.sha256(json.dumps([run, content], sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """``plan.json``: everything a node runner needs to know."""

    run: str
    attempt: int
    created: float  # operator's clock, seconds since the epoch
    rdzv_id: str  # new for every attempt
    endpoint: str  # host:port of the rendezvous store, on the head
    program: tuple[str, ...] = dataclasses.field(metadata=AS_WRITTEN)  # follows torchrun's own arguments
    secrets: tuple[str, ...]  # names only
    nodes: tuple[Node, ...]
    checkpoint_dir: str = ""
    owner: str = ""  # who launched it, shown to others who find it running
    setup: str = dataclasses.field(default="", metadata=AS_WRITTEN)  # a shell line that runs before torchrun
    refuse_sockets: bool = False  # end the run if NCCL falls back to TCP although there is RDMA
    grace_s: float = 0.0  # for the trainer to save, if SIGTERM comes without a stop request
    slurm_job: str = ""  # the job it runs in, if any
    replicates: bool = False  # checkpoints are copied from host to host
    spread: bool = False  # each host has a part of them
    expected: Expected = Expected()
    load_s: float = 0.0  # timeouts.load; 0: unknown
    mesh: Axes | None = None  # of its ranks; None: of another program

    @property
    def trains(self) -> bool:
        """Whether the program is our trainer, which saves on a stop request and writes heartbeats."""
        return self.program[:2] == ("-m", "llama405b.train")

    @property
    def saves_at_sigterm(self) -> bool:
        """Whether SIGTERM means save: Slurm sends it to all processes of a job that it preempts or cancels."""
        return bool(self.slurm_job) and self.trains

    @property
    def world_size(self) -> int:
        """Number of ranks over all hosts."""
        return sum(node.slots for node in self.nodes)

    def axes(self, parallel: "Parallel") -> Axes:
        """Return the mesh that settings make of the plan's ranks.

        Raises:
            UserError: They cannot be divided so.
        """
        return Axes.from_parallel(parallel, self.world_size, max((node.slots for node in self.nodes), default=1))

    def node(self, name: str) -> Node:
        """Return a host's part of the plan; the host must be in it."""
        return next(node for node in self.nodes if node.name == name)

    def find_node(self, name: str) -> Node | None:
        """Return a host's part of the plan; None if the host is not in it."""
        return next((node for node in self.nodes if node.name == name), None)


NO_PLAN = Plan("", 0, 0.0, "", "", (), (), ())


def read_plan(run_dir: RunDir) -> Plan:
    """Read the newest plan of a run; ``NO_PLAN``, which has no nodes, if none can be read. Settings get their present names."""
    plan = read_record(Plan, run_dir.plan) or NO_PLAN
    return dataclasses.replace(plan, program=(*translate_flags(plan.program),)) if plan.trains else plan


def check_run_name(run_name: str) -> str:
    """Return the name if it is valid.

    Raises:
        UserError: It is not usable as a directory and a tmux server name.
    """
    if not RUN_NAME.fullmatch(run_name):
        raise UserError(
            f"--run: {run_name!r} is not a valid run name; use letters, digits, '.', '_' and '-', at most 100"
        )
    return run_name
