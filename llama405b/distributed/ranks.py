"""This process's place among the ranks, the process group that they form, and the cores that it runs on.

Knows torchrun's environment; not what is exchanged. Ranks follow the order of the hosts file: the node
runner sets each host's first rank (``LLAMA405B_FIRST_RANK``), because the c10d rendezvous orders hosts by address
and process id.

Which cores a rank's threads run on: its own, of its GPU's NUMA node. Knows /sys and the scheduler.

What a thread touches first is placed on its own node, so the pinned memory of weights and moments is near as well. The
CPU's AdamW is bound by memory: half of its bytes from the other socket cost more than half of its speed.
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
    """This process's place among the ranks."""

    rank: int
    world: int
    local_rank: int
    host: str  # the name in the hosts file
    device: torch.device
    attempt: int = 1  # launches of this run so far
    mesh: Axes | None = None  # of all ranks; None: each is a shard

    @property
    def axes(self) -> Axes:
        """The mesh of all ranks."""
        return self.mesh or Axes(dp_shard=self.world)

    @property
    def dp(self) -> Place:
        """Place among the ranks that split the batch."""
        return self.axes.place(self.rank, DP)

    @property
    def shard(self) -> Place:
        """Place among the ranks that shard each parameter."""
        return self.axes.place(self.rank, SHARD)

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def gpu(self) -> str:
        """The number of its GPU on the host; "" without one."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        shown = visible[self.local_rank : self.local_rank + 1] if visible[0] else [str(self.local_rank)]
        return "".join(shown) if self.on_gpu else ""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


# What torch reads when CUDA and NCCL begin, unless the user has set it: less fragmentation; and when a collective times out,
# a record of the last ones (where ``record_flights`` says).
CUDA_ENV = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
BESIDE = "beside training"  # the description of a group that keeps the timeout it was made with
OLDER = {  # names that users may have set, and of which torch warns
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


def on_mesh(me: Rank, parallel: Parallel) -> Rank:
    """Give a rank the mesh that settings make of all ranks.

    Raises:
        UserError: They cannot be divided so.
    """
    return dataclasses.replace(me, mesh=Axes.of(parallel, me.world, ranks_per_host()))


def ranks_per_host() -> int:
    """Return how many ranks a host has, as torchrun says; the most of any host. All ranks call it."""
    [most] = collectives.all_reduce_max([int(os.environ.get("LOCAL_WORLD_SIZE", 1))])
    return most


def join(device: str, timeout_s: int) -> Rank:
    """Join the process group: gloo for CPU tensors, and on CUDA also NCCL.

    Without torchrun's environment this is a run of one rank.

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
        store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),
        rank=me.rank,
        world_size=me.world,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=me.device if me.on_gpu else None,  # or each peer of a send gets an NCCL communicator of its own
    )
    return me


def set_unless_set(variables: Mapping[str, str]) -> None:
    """Set variables of the environment that the user has not set, by these or their older names."""
    for name, value in variables.items():
        if OLDER.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


def record_flights(record: Path) -> None:
    """Have NCCL's flight recorder write to ``record``, which ends in this rank's number, also when a byte is written to its pipe beside it.

    Call it before ``join``. torch ends a process that cannot make its pipe, so where a filesystem has none it is not asked to.
    """
    if not torch.cuda.is_available():
        return
    stem, pipe = str(record)[: -len(str(place().rank))], Path(f"{record}.pipe")
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)  # which torch makes again
        set_unless_set({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem, "TORCH_FR_DUMP_TEMP_FILE": stem})


def place(*, cuda: bool = False) -> Rank:
    """Read this process's place from the environment alone."""
    local_rank, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first = os.environ.get("LLAMA405B_FIRST_RANK")
    rank = int(os.environ.get("RANK", 0)) if first is None else int(first) + local_rank
    host = os.environ.get("LLAMA405B_HOST", socket.gethostname())
    attempt = int(os.environ.get("LLAMA405B_ATTEMPT", 1))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return Rank(rank, world, local_rank, host, device, attempt)


def set_timeout(timeout_s: int) -> None:
    """Change the timeout of all groups that steps use: loading is slow and uneven between ranks, steps are not."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)
    share_timeout()


def share_timeout() -> None:
    """Give the default group's timeout to all others, but those ``BESIDE`` training; a mesh makes its own with torch's."""
    world = dist.group.WORLD
    assert world
    options = world._get_backend(torch.device("cpu")).options  # a fake group has none
    for group in dist.distributed_c10d._world.pg_map if options else ():
        if group.group_desc != BESIDE:
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


SYS = Path("/sys")


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The CPUs that a rank may run on: all threads of its own physical cores."""

    node: int  # -1: unknown
    cpus: frozenset[int]
    cores: int

    def __str__(self) -> str:
        where = (
            f"NUMA node {self.node} of its GPU" if self.node >= 0 else "this machine: its GPU's NUMA node is not known"
        )
        return f"bound to {counted(self.cores, 'core')} ({counted(len(self.cpus), 'CPU')}) of {where}"


def bind(me: Rank) -> str:
    """Bind this process to cores of its GPU's NUMA node, before torch starts threads; returns what was done, for the log."""
    if not me.on_gpu:
        return ""
    nodes = [numa_node(bus_id(i)) for i in range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]
    found = binding_of(nodes, me.local_rank, os.sched_getaffinity(0))
    os.sched_setaffinity(0, found.cpus)
    if OWN_THREADS not in os.environ:
        torch.set_num_threads(found.cores)
    return f"cores: {found}; {torch.get_num_threads()} threads{' (OMP_NUM_THREADS)' * (OWN_THREADS in os.environ)}"


def bus_id(device: int) -> str:
    """Return a GPU's address on the PCI bus, as /sys names it."""
    of = torch.cuda.get_device_properties(device)
    return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"


def numa_node(bus_id: str, sys: Path = SYS) -> int:
    """Return the NUMA node of a PCI device; -1 if it is not known."""
    try:
        return int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def binding_of(nodes: Sequence[int], local_rank: int, allowed: Collection[int], sys: Path = SYS) -> Binding:
    """Choose the cores of a rank, of those that are allowed. ``nodes``: of the GPU of each rank on the host; -1: unknown.

    Ranks share their node's physical cores evenly, and those whose node is unknown, or has no allowed core, all of them. Where
    there are fewer cores than ranks, each may run on any.
    """
    usable = [node if _cores(node, allowed, sys) else -1 for node in nodes]
    node = usable[local_rank]
    cores, sharing = _cores(node, allowed, sys), usable.count(node)
    place = usable[:local_rank].count(node)
    own = cores[place * len(cores) // sharing : (place + 1) * len(cores) // sharing] if len(cores) >= sharing else cores
    return Binding(node, frozenset().union(*own), len(own) if len(cores) >= sharing else 1)


def _cores(node: int, allowed: Collection[int], sys: Path) -> list[frozenset[int]]:
    """Return the allowed CPUs of a node (-1: of all), grouped by physical core."""
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
