"""Typed facts about a host, as ``hostprobe`` reports them, and the machines that a prediction needs.

A fact that could not be read is None; ``failed`` says why.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import UserError, and_more
from llama405b.predict.estimate import Machines
from llama405b.predict.hardware import Gpu, match_gpu
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.parsers import MIG_ON, Address, GpuReport, Rdma, RdmaPort, SmiAnswer, parse_smi


@dataclasses.dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Identity of the machine and user."""

    hostname: str
    os: str
    kernel: str
    user: str
    tools: Mapping[str, bool]  # program -> whether it is installed
    arch: str = ""
    machine: str = ""
    cores: int = 0
    upgraded_by: str = ""  # a service that installs upgrades by itself, the driver's too
    must_reboot: bool = False  # for upgrades that are installed


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """The Python to train with, and the project's code."""

    workdir: str
    workdir_exists: bool
    packages: Mapping[str, str] | None  # name -> version or "missing"; None: its python cannot be run
    code: str  # the checkout's commit
    allocator: str = ""  # what the user set of PyTorch's (PYTORCH_ALLOC_CONF); "": nothing
    max_connections: str = ""  # CUDA_DEVICE_MAX_CONNECTIONS; "": not set


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """The host's IPv4 addresses, and the default route's interface."""

    addresses: tuple[Address, ...]
    default: str


@dataclasses.dataclass(frozen=True, slots=True)
class TmuxLimits:
    """Limits of a process inside tmux, in ulimit's format; or why tmux does not start."""

    memlock_kib: str = ""
    open_files: str = ""
    failed: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NumaNode:
    """Memory of a NUMA node, in bytes."""

    number: int
    total: int
    cached: int  # of files


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory, in bytes."""

    total: int
    available: int
    shm_free: int
    zone_reclaim: bool = False  # whether the kernel frees a node's page cache before it takes another node's memory
    nodes: tuple[NumaNode, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Filesystem:
    """A mounted filesystem (``mount``, ``type``), or the one that holds a requested directory (``path``)."""

    free: int | None  # bytes; None: unknown
    mount: str = ""
    type: str = ""
    size: int = 0  # bytes; 0: unknown
    path: str = ""
    writable: bool = True
    read_only: bool = False  # for everybody
    write_per_s: float | None = None  # bytes
    free_files: int | None = None  # None: no limit, or unknown
    refuses: str = ""  # what a run cannot do there, and why


@dataclasses.dataclass(frozen=True, slots=True)
class BareDisk:
    """A disk without a filesystem."""

    device: str
    size: int  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Disks:
    """The disks that could hold weights and checkpoints."""

    filesystems: tuple[Filesystem, ...]
    unmounted_nvme: tuple[BareDisk, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFiles:
    """State of a checkpoint's files, judged by size (or hash)."""

    path: str
    present: bool
    files: int = 0
    bytes: int = 0
    faults: tuple[str, ...] = ()
    unhashed: int = 0  # files without a known SHA-256


UNKNOWN_IDENTITY = MachineIdentity("", "", "", "", {})
UNKNOWN_ENVIRONMENT = Environment("", workdir_exists=False, packages=None, code="")
NO_NETWORK, NO_DISKS = Network((), ""), Disks((), ())


@dataclasses.dataclass(frozen=True, slots=True)
class HostFacts:
    """All facts about one host."""

    identity: MachineIdentity | None = None
    environment: Environment | None = None
    gpus: SmiAnswer | None = None
    rdma: Rdma | None = None
    network: Network | None = None
    tmux: TmuxLimits | None = None
    memory: Memory | None = None
    disks: Disks | None = None
    weights: WeightFiles | None = None
    leftovers: Mapping[str, tuple[int, ...]] | None = None  # <run directory>:<host> -> processes
    kill_user_processes: bool | None = None
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # part -> why it is unknown
    slots: int = 0  # in the hosts file; 0: as many as it has GPUs
    port_fault: str = ""
    marked: str = ""  # the directory of checkpoints, if it left a file there for the others to see
    ports: tuple[int, ...] = ()  # it listens on these for the others: the rendezvous port, and any other
    now: float = 0.0  # its clock, seconds since the epoch

    @property
    def packages(self) -> Mapping[str, str]:
        """Name -> version or "missing"; empty if its Python cannot be run."""
        return (self.environment or UNKNOWN_ENVIRONMENT).packages or {}

    @property
    def devices(self) -> Sequence[GpuReport]:
        """Working GPUs that nvidia-smi reports."""
        smi = self.gpus or SmiAnswer()
        return [gpu for gpu in parse_smi(smi.smi, smi.fields)[0] if not gpu.fault]

    @property
    def rdma_ports(self) -> Sequence[RdmaPort]:
        """The ports of its RDMA devices, as far as known."""
        return (self.rdma or Rdma()).ports

    @property
    def rdma_gbit(self) -> float:
        """Total rate of its active RDMA ports, in Gb/s."""
        return sum(port.gbit for port in self.rdma_ports if port.is_up)

    @property
    def addresses(self) -> Sequence[Address]:
        """Its IPv4 addresses, as far as known."""
        return (self.network or NO_NETWORK).addresses

    @property
    def filesystems(self) -> Sequence[Filesystem]:
        """The mounted filesystems, and those that hold the requested directories."""
        return (self.disks or NO_DISKS).filesystems

    @property
    def working_disk(self) -> Filesystem | None:
        """The filesystem of its working directory."""
        return next((entry for entry in self.filesystems if entry.path), None)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """Reachability of one address and port of another host."""

    fault: str  # "": it answers with its token
    mine: str = ""
    unresolved: bool = False  # the fault is that the name has no address there


@dataclasses.dataclass(frozen=True, slots=True)
class PeerReach:
    """Reachability of one host from another."""

    resolves: tuple[str, float] | None  # the address its name resolves to, and the seconds that took
    reached: Mapping[str, ConnectAttempt]  # by address:port


@dataclasses.dataclass(frozen=True, slots=True)
class PeersReply:
    """Reachability of all other hosts from one host, by name."""

    peers: Mapping[str, PeerReach]
    sees: bool | None = None  # what the first host wrote where the checkpoints go; None: unknown


def machines_of(hosts: Sequence[Host], facts: Mapping[str, HostFacts], gpus: dict[str, Gpu]) -> Machines:
    """Return the hosts as machines for a prediction.

    Raises:
        UserError: The hosts differ in GPU model or number of ranks, or their GPU is not in the table.
    """
    hosts_by_kind: dict[str, list[str]] = {}
    hosts_by_slots: dict[int, list[str]] = {}
    for host in hosts:
        devices = facts[host.name].devices
        if host.slots != 1 and any(device.mig for device in devices):
            raise UserError(f"{host.name}: {MIG_ON[0]}; {MIG_ON[1]}, or set slots=1 to use one device of it")
        for device in devices[:1]:
            hosts_by_kind.setdefault(_gpu_kind(device, gpus), []).append(host.name)
        hosts_by_slots.setdefault(host.slots or len(devices) or 1, []).append(host.name)
    _refuse_differences("GPU", hosts_by_kind)
    _refuse_differences("number of ranks", hosts_by_slots)
    gpu_kind = next(iter(hosts_by_kind), "")
    if gpu_kind and gpu_kind not in gpus:
        raise UserError(
            f"{hosts[0].name}: its GPU ({gpu_kind}) is not in the table; describe it with --hardware and name it with --gpu"
        )
    gpu = gpus.get(gpu_kind)
    if gpu:  # the smallest of all, and no more than torch sees
        sizes = [device.memory_mib << 20 for host in hosts for device in facts[host.name].devices if device.memory_mib]
        gpu = dataclasses.replace(gpu, memory_bytes=min([gpu.memory_bytes, *sizes]))
    return Machines(
        nodes=len(hosts),
        slots=next(iter(hosts_by_slots)),
        gpu=gpu,
        ram_bytes=min((host_facts.memory.total for host_facts in facts.values() if host_facts.memory), default=0),
        nic_bytes_per_s=min(facts[host.name].rdma_gbit for host in hosts) * 1e9 / 8,
        versions=facts[hosts[0].name].packages,
    )


def _gpu_kind(device: GpuReport, gpus: dict[str, Gpu]) -> str:
    """Return a GPU's name in the table; for an unknown one, nvidia-smi's name and its memory."""
    size = (device.memory_mib or 0) * 1024 * 1024
    gpu = match_gpu(device.name, size, gpus) if size else None
    memory = f"{size >> 30} GiB" if size else "memory unknown"
    return gpu.name if gpu else f"{device.name}, {memory}"


def _refuse_differences(quantity: str, hosts_by_value: Mapping[str, list[str]] | Mapping[int, list[str]]) -> None:
    """Refuse hosts that differ; ``hosts_by_value``: by value, the hosts that have it."""
    if len(hosts_by_value) > 1:
        values = "; ".join(f"{value} on {names[0]}{and_more(names)}" for value, names in hosts_by_value.items())
        raise UserError(
            f"hosts differ in their {quantity} ({values}); predict each kind separately, with its own hosts file"
        )
