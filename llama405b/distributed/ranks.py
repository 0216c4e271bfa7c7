"""This process's rank, the process group, and the CPU cores that the rank runs on.

Ranks follow the order of the hosts file: the node runner sets each host's first rank (``LLAMA405B_FIRST_RANK``), because the c10d
rendezvous orders hosts by address and process id.

A rank's threads run on cores of its GPU's NUMA node. Linux places memory on the node of the thread that first touches it, so the pinned
memory of weights and moments is local too. AdamW on the CPU is bound by memory bandwidth: with half of its bytes on the other socket it
loses more than half of its speed.

Knows torchrun's environment, /sys and the scheduler; not what ranks exchange.
"""

import contextlib
import dataclasses
import datetime
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from llama405b.contract.errors import UserError, counted
from llama405b.distributed import collectives
from llama405b.settings.axes import DP, SHARD, Axes, Place
from llama405b.settings.schema import Parallel
from llama405b.spec.plan import OWN_THREADS


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """This process's place among all ranks."""

    rank: int
    world: int
    local_rank: int
    host: str  # the name in the hosts file
    device: torch.device
    attempt: int = 1  # number of this launch of the run, from 1
    mesh: Axes | None = None  # of all ranks; None: plain FSDP over all of them

    @property
    def axes(self) -> Axes:
        """The mesh of all ranks."""
        return self.mesh or Axes(dp_shard=self.world)

    @property
    def dp(self) -> Place:
        """Coordinate among the ranks that split the batch."""
        return self.axes.place(self.rank, DP)

    @property
    def shard(self) -> Place:
        """Coordinate among the ranks that shard each parameter."""
        return self.axes.place(self.rank, SHARD)

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def gpu(self) -> str:
        """The index of its GPU on the host; "" without one."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        shown = visible[self.local_rank : self.local_rank + 1] if visible[0] else [str(self.local_rank)]
        return "".join(shown) if self.on_gpu else ""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


# Defaults of variables that CUDA and NCCL read at start: less fragmentation, and a dump of the last collectives when one times out
# (where ``record_flights`` says).
CUDA_ENV = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
BESIDE = "beside training"  # description of a process group that keeps its own timeout
OLDER = {  # deprecated names that users may have set
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


def on_mesh(me: Rank, parallel: Parallel) -> Rank:
    """Return the rank with the mesh that the settings ask for.

    Raises:
        UserError: The number of ranks does not fit the mesh.
    """
    return dataclasses.replace(me, mesh=Axes.of(parallel, me.world, ranks_per_host()))


def ranks_per_host() -> int:
    """Return the largest number of ranks on any host, as torchrun says. All ranks must call it."""
    [most] = collectives.all_reduce_max([int(os.environ.get("LOCAL_WORLD_SIZE", 1))])
    return most


def join(device: str, timeout_s: int) -> Rank:
    """Join the process group: gloo for CPU tensors and, with CUDA, NCCL.

    Without torchrun's environment the run has one rank.

    Raises:
        UserError: CUDA was requested and is not available.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("--parallel.device: cuda was requested, but torch sees no GPU; use cpu, or fix the driver")
    me = place(cuda=cuda and device != "cpu")
    if me.on_gpu:
        set_unless_set(CUDA_ENV)
        torch.cuda.set_device(me.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if me.on_gpu else "gloo",
        # None: the store of torchrun, from the environment; a single process without torchrun uses a store of its own.
        store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),
        rank=me.rank,
        world_size=me.world,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=me.device if me.on_gpu else None,  # otherwise NCCL makes a communicator for each peer of a send
    )
    return me


def set_unless_set(variables: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set under these or their deprecated names."""
    for name, value in variables.items():
        if OLDER.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


def record_flights(record: Path) -> None:
    """Have NCCL's flight recorder write to ``record`` on a timeout, and when a byte is written to its pipe.

    The pipe is next to the file; the file's name must end in this rank's number.

    Call it before ``join``. torch ends a process that cannot create its pipe, so the recorder is not enabled on a filesystem without pipes.
    """
    if not torch.cuda.is_available():
        return
    stem, pipe = str(record)[: -len(str(place().rank))], Path(f"{record}.pipe")
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)  # test that pipes work here; torch makes it again
        set_unless_set({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem, "TORCH_FR_DUMP_TEMP_FILE": stem})


def place(*, cuda: bool = False) -> Rank:
    """Return this process's rank from its environment, without a process group."""
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first = os.environ.get("LLAMA405B_FIRST_RANK")
    rank = int(os.environ.get("RANK", 0)) if first is None else int(first) + local_rank
    host = os.environ.get("LLAMA405B_HOST", socket.gethostname())
    attempt = int(os.environ.get("LLAMA405B_ATTEMPT", 1))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return Rank(rank, world, local_rank, host, device, attempt)


def set_timeout(timeout_s: int) -> None:
    """Set the timeout of all groups that steps use: loading is slow and uneven between ranks, steps are not."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)
    share_timeout()


def share_timeout() -> None:
    """Set the default group's timeout on all other groups except ``BESIDE``; a mesh creates its groups with torch's default timeout."""
    world = dist.group.WORLD
    assert world
    options = world._get_backend(torch.device("cpu")).options  # None in a fake group
    for group in dist.distributed_c10d._world.pg_map if options else ():
        if group.group_desc != BESIDE:
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


SYS = Path("/sys")


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The CPUs that a rank may run on: all hardware threads of its physical cores."""

    node: int  # -1: unknown
    cpus: frozenset[int]
    cores: int

    def __str__(self) -> str:
        where = f"NUMA node {self.node} of its GPU" if self.node >= 0 else "this machine (NUMA node of its GPU unknown)"
        return f"bound to {counted(self.cores, 'core')} ({counted(len(self.cpus), 'CPU')}) of {where}"


def bind(me: Rank) -> str:
    """Bind this process to cores of its GPU's NUMA node; return a line for the log. Call it before torch starts threads."""
    if not me.on_gpu:
        return ""
    nodes = [numa_node(bus_id(i)) for i in range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]
    found = binding_of(nodes, me.local_rank, os.sched_getaffinity(0))
    os.sched_setaffinity(0, found.cpus)
    if OWN_THREADS not in os.environ:
        torch.set_num_threads(found.cores)
    return f"cores: {found}; {torch.get_num_threads()} threads{' (OMP_NUM_THREADS)' * (OWN_THREADS in os.environ)}"


def bus_id(device: int) -> str:
    """Return a GPU's PCI address in the notation of /sys."""
    of = torch.cuda.get_device_properties(device)
    return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"


def numa_node(bus_id: str, sys: Path = SYS) -> int:
    """Return the NUMA node of a PCI device; -1 if unknown."""
    try:
        return int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def binding_of(nodes: Sequence[int], local_rank: int, allowed: Collection[int], sys: Path = SYS) -> Binding:
    """Choose the cores of a rank among the allowed CPUs; ``nodes``: NUMA node of each rank's GPU on this host (-1: unknown).

    Ranks of a node divide its physical cores evenly. Ranks whose node is unknown or has no allowed core divide all allowed cores.
    If there are fewer cores than ranks, each rank may run on all of them.
    """
    usable = [node if _cores(node, allowed, sys) else -1 for node in nodes]
    node = usable[local_rank]
    cores, sharing = _cores(node, allowed, sys), usable.count(node)
    place = usable[:local_rank].count(node)
    own = cores[place * len(cores) // sharing : (place + 1) * len(cores) // sharing] if len(cores) >= sharing else cores
    return Binding(node, frozenset().union(*own), len(own) if len(cores) >= sharing else 1)


def _cores(node: int, allowed: Collection[int], sys: Path) -> list[frozenset[int]]:
    """Return the allowed CPUs of a node (-1: all nodes), grouped by physical core."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(allowed):
        if node < 0 or (sys / f"devices/system/node/node{node}/cpu{cpu}").exists():
            cores.setdefault(_siblings(cpu, sys), set()).add(cpu)
    return [frozenset(core) for core in cores.values()]


def _siblings(cpu: int, sys: Path) -> str:
    try:
        return (sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)
