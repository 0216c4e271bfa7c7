"""What the probe says of a host: ``hostprobe``'s answer, as types. What could not be told is None, and ``failed`` says why."""

import dataclasses
from collections.abc import Mapping, Sequence

from llama405b_tools.machine.addresses import Address
from llama405b_tools.machine.fabric import Rdma, RdmaPort
from llama405b_tools.machine.gpus import Gpu, SmiAnswer, read_smi


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who and what the machine is."""

    hostname: str
    os: str
    kernel: str
    user: str
    tools: Mapping[str, bool]  # program -> whether it is there
    arch: str = ""
    machine: str = ""
    cores: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """The Python that is to train, and the project's code."""

    workdir: str
    workdir_exists: bool
    packages: Mapping[str, str] | None  # name -> version or "missing"; None: its python cannot be run
    code: str  # the checkout's commit
    writable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Own IPv4 addresses, and the default route's interface."""

    addresses: tuple[Address, ...]
    default: str


@dataclasses.dataclass(frozen=True, slots=True)
class TmuxLimits:
    """Limits as a process inside tmux has them, as ulimit writes them; or why tmux does not start."""

    memlock_kib: str = ""
    open_files: str = ""
    failed: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """In bytes."""

    total: int
    available: int
    shm_free: int


@dataclasses.dataclass(frozen=True, slots=True)
class Filesystem:
    """A mounted one (``mount``, ``type``, ``size``), or the one below a directory that is asked for (``path``)."""

    free: int  # bytes
    mount: str = ""
    type: str = ""
    size: int = 0
    path: str = ""
    writable: bool = True
    write_per_s: float | None = None  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class BareDisk:
    """A disk without a filesystem."""

    device: str
    size: int  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Disks:
    """Where weights and checkpoints could go."""

    filesystems: tuple[Filesystem, ...]
    unmounted_nvme: tuple[BareDisk, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint's files, as far as their sizes (or hashes) tell."""

    path: str
    present: bool
    files: int = 0
    bytes: int = 0
    faults: tuple[str, ...] = ()
    unhashed: int = 0  # of whose content no SHA-256 is known


NOBODY = Identity("", "", "", "", {})
NOWHERE = Environment("", workdir_exists=False, packages=None, code="", writable=False)
NO_NETWORK, NO_DISKS = Network((), ""), Disks((), ())


@dataclasses.dataclass(frozen=True, slots=True)
class HostFacts:
    """One host."""

    identity: Identity | None = None
    environment: Environment | None = None
    gpus: SmiAnswer | None = None
    rdma: Rdma | None = None
    network: Network | None = None
    tmux: TmuxLimits | None = None
    memory: Memory | None = None
    disks: Disks | None = None
    weights: Weights | None = None
    leftovers: Mapping[str, tuple[int, ...]] | None = None  # <run directory>:<host> -> processes
    kill_user_processes: bool | None = None
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # part -> why it could not be told
    port_fault: str = ""
    ports: tuple[int, ...] = ()  # on which it listens for the others: the rendezvous port, and any other
    now: float = 0.0  # its clock, seconds since the epoch

    @property
    def packages(self) -> Mapping[str, str]:
        """Name -> version or "missing"; empty where its Python cannot tell."""
        return (self.environment or NOWHERE).packages or {}

    @property
    def devices(self) -> Sequence[Gpu]:
        """Its GPUs, as far as nvidia-smi tells of them."""
        smi = self.gpus or SmiAnswer()
        return read_smi(smi.smi, smi.fields)[0]

    @property
    def rdma_ports(self) -> Sequence[RdmaPort]:
        """The ports of its RDMA devices, as far as they are known."""
        return (self.rdma or Rdma()).ports

    @property
    def addresses(self) -> Sequence[Address]:
        """Its own IPv4 addresses, as far as they are known."""
        return (self.network or NO_NETWORK).addresses

    @property
    def filesystems(self) -> Sequence[Filesystem]:
        """Those that are mounted, and those below the directories that were asked for."""
        return (self.disks or NO_DISKS).filesystems

    @property
    def working_disk(self) -> Filesystem | None:
        """The filesystem of its working directory."""
        return next((entry for entry in self.filesystems if entry.path), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Reached:
    """The way to one address and port of another host."""

    fault: str  # "": it answers with its token
    mine: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerReach:
    """The ways from one host to another."""

    resolves: tuple[str, float] | None  # what its name resolves to, and in how many seconds
    reached: Mapping[str, Reached]  # by address:port


@dataclasses.dataclass(frozen=True, slots=True)
class PeersReply:
    """The ways from one host to all others, by name."""

    peers: Mapping[str, PeerReach]
