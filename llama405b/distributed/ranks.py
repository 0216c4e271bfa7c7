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

from llama405b.contract.errors import UserError, pluralize
from llama405b.distributed import collectives, host_memory
from llama405b.settings.axes import DP_AXES, SHARD_AXES, Axes, Coordinate
from llama405b.settings.schema import Parallel
from llama405b.spec.plan import OWN_THREADS


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """This process's place among all ranks."""

    index: int
    world_size: int
    local_rank: int
    host: str  # the name in the hosts file
    device: torch.device
    attempt: int = 1  # number of this launch of the run, from 1
    mesh: Axes | None = None  # of all ranks; None: plain FSDP over all of them

    @property
    def axes(self) -> Axes:
        """The mesh of all ranks."""
        return self.mesh or Axes(dp_shard=self.world_size)

    @property
    def dp(self) -> Coordinate:
        """Coordinate among the ranks that split the batch."""
        return self.axes.coordinate(self.index, DP_AXES)

    @property
    def shard(self) -> Coordinate:
        """Coordinate among the ranks that shard each parameter."""
        return self.axes.coordinate(self.index, SHARD_AXES)

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def gpu(self) -> str:
        """The index of its GPU on the host; "" without one."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpu_numbers = visible[self.local_rank : self.local_rank + 1] if visible[0] else [str(self.local_rank)]
        return "".join(gpu_numbers) if self.on_gpu else ""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0."""
        return self.index == 0


# Defaults of variables that CUDA and NCCL read at start: less fragmentation, and a dump of the last collectives when one times out
# (where ``enable_flight_recorder`` says).
CUDA_ENV = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
BACKGROUND_GROUP = "beside training"  # description of a process group that keeps its own timeout
OLDER_NAMES = {  # deprecated names that users may have set
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


def with_mesh(rank: Rank, parallel: Parallel) -> Rank:
    """Return the rank with the mesh that the settings ask for.

    Raises:
        UserError: The number of ranks does not fit the mesh.
    """
    return dataclasses.replace(rank, mesh=Axes.from_parallel(parallel, rank.world_size, ranks_per_host()))


def ranks_per_host() -> int:
    """Return the largest number of ranks on any host, as torchrun says. All ranks must call it."""
    [max_ranks] = collectives.all_reduce_max([int(os.environ.get("LOCAL_WORLD_SIZE", 1))])
    return max_ranks


def join_process_group(device: str, timeout_s: int) -> Rank:
    """Join the process group: gloo for CPU tensors and, with CUDA, NCCL.

    Without torchrun's environment the run has one rank.

    Raises:
        UserError: CUDA was requested and is not available.
    """
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("--parallel.device: cuda was requested, but torch sees no GPU; use cpu, or fix the driver")
    rank = rank_from_environment(cuda=cuda and device != "cpu")
    if rank.on_gpu:
        set_default_env(CUDA_ENV)
        torch.cuda.set_device(rank.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if rank.on_gpu else "gloo",
        # None: the store of torchrun, from the environment; a single process without torchrun uses a store of its own.
        store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),
        rank=rank.index,
        world_size=rank.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=rank.device if rank.on_gpu else None,  # otherwise NCCL makes a communicator for each peer of a send
    )
    return rank


def set_default_env(variables: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set under these or their deprecated names."""
    for name, value in variables.items():
        if OLDER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


def set_gpu_env(parallel: Parallel) -> None:
    """Set the variables of CUDA and NCCL that settings ask for. Call it before ``join_process_group``, which starts both."""
    asked = {"CUDA_DEVICE_MAX_CONNECTIONS": parallel.cuda_connections, "NCCL_MAX_CTAS": parallel.nccl_ctas}
    os.environ.update({name: str(value) for name, value in asked.items() if value})


def enable_flight_recorder(path: Path) -> None:
    """Have NCCL's flight recorder write to ``path`` on a timeout, and when a byte is written to its pipe.

    The pipe is next to the file; the file's name must end in this rank's number.

    Call it before ``join_process_group``. torch ends a process that cannot create its pipe, so the recorder is not enabled on a
    filesystem without pipes.
    """
    if not torch.cuda.is_available():
        return
    stem, pipe = str(path)[: -len(str(rank_from_environment().index))], Path(f"{path}.pipe")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)  # test that pipes work here; torch makes it again
        set_default_env({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem, "TORCH_FR_DUMP_TEMP_FILE": stem})


def rank_from_environment(*, cuda: bool = False) -> Rank:
    """Return this process's rank from its environment, without a process group."""
    local_rank, world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    first_rank = os.environ.get("LLAMA405B_FIRST_RANK")
    rank = int(os.environ.get("RANK", 0)) if first_rank is None else int(first_rank) + local_rank
    host = os.environ.get("LLAMA405B_HOST", socket.gethostname())
    attempt = int(os.environ.get("LLAMA405B_ATTEMPT", 1))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return Rank(rank, world_size, local_rank, host, device, attempt)


def set_timeout(timeout_s: int) -> None:
    """Set the timeout of all groups that steps use: loading is slow and uneven between ranks, steps are not."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)
    share_timeout()


def share_timeout() -> None:
    """Set the default group's timeout on all groups but ``BACKGROUND_GROUP``: a mesh creates its groups with torch's default."""
    world = dist.group.WORLD
    assert world
    options = world._get_backend(torch.device("cpu")).options  # None in a fake group
    for group in dist.distributed_c10d._world.pg_map if options else ():
        if group.group_desc != BACKGROUND_GROUP:
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def leave_other_groups() -> None:
    """Destroy all groups but that of all ranks and those of meshes: each keeps connections.

    torch names a mesh's groups by how many there are, and caches operations by meshes that are equal: those must stay.
    """
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD and not group.group_desc.startswith("mesh_"):
            dist.destroy_process_group(group)


def leave_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


SYS = Path("/sys")


@dataclasses.dataclass(frozen=True, slots=True)
class CpuBinding:
    """The CPUs that a rank may run on: all hardware threads of its physical cores."""

    node: int  # -1: unknown
    cpus: frozenset[int]
    cores: int

    def __str__(self) -> str:
        location = (
            f"NUMA node {self.node} of its GPU" if self.node >= 0 else "this machine (NUMA node of its GPU unknown)"
        )
        return f"bound to {pluralize(self.cores, 'core')} ({pluralize(len(self.cpus), 'CPU')}) of {location}"


def bind_cores(rank: Rank) -> str:
    """Bind this process to cores of its GPU's NUMA node; return a line for the log. Call it before torch starts threads."""
    if not rank.on_gpu:
        return ""
    nodes = [numa_node(bus_id(i)) for i in range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]
    binding = choose_binding(nodes, rank.local_rank, os.sched_getaffinity(0))
    os.sched_setaffinity(0, binding.cpus)
    memory = ""
    if binding.node >= 0:
        try:
            host_memory.prefer_numa_node(binding.node)
        except OSError as error:
            memory = f"; memory wherever Linux puts it ({error.strerror})"
    if OWN_THREADS not in os.environ:
        torch.set_num_threads(binding.cores)
    threads = f"{torch.get_num_threads()} threads{' (OMP_NUM_THREADS)' * (OWN_THREADS in os.environ)}"
    return f"cores: {binding}; {threads}{memory}"


MAX_FAR_SHARE = 0.05  # of a rank's memory on other NUMA nodes than its GPU's, of which nothing is said


def describe_memory_nodes(rank: Rank, numa_maps: Path = Path("/proc/self/numa_maps")) -> str:
    """Return a line on how much of the ranks' memory is on other NUMA nodes than their GPUs'; "" if there is one node, or none is known."""
    sizes, node = dict[int, int](), -1
    with contextlib.suppress(OSError):
        node = numa_node(bus_id(rank.device.index or 0)) if rank.on_gpu else -1
        sizes = host_memory.bytes_by_numa_node(numa_maps.read_text(encoding="utf-8", errors="replace"))
    total = sum(sizes.values())
    is_known = node >= 0 and total > 0
    far_share = 1 - sizes.get(node, 0) / total if is_known else 0.0
    found = collectives.all_gather_objects((far_share, total, is_known and len(sizes) > 1))
    worst, (far_share, total, _) = max(enumerate(found), key=lambda item: item[1][0])
    if not any(has_choice for *_, has_choice in found):
        return ""
    if far_share <= MAX_FAR_SHARE:
        return f"memory: at least {100 * (1 - far_share):.0f}% of each rank's is on the NUMA node of its GPU"
    return (
        f"WARNING: {100 * far_share:.0f}% of the {total / host_memory.GIB:.0f} GiB of rank {worst} is on another NUMA node than its GPU, "
        "which slows updates there; if the page cache filled its node, run `echo 1 > /proc/sys/vm/drop_caches` as root, and launch again"
    )


def bus_id(device: int) -> str:
    """Return a GPU's PCI address in the notation of /sys."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def numa_node(bus_id: str, sys: Path = SYS) -> int:
    """Return the NUMA node of a PCI device; -1 if unknown."""
    try:
        return int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def choose_binding(nodes: Sequence[int], local_rank: int, allowed: Collection[int], sys: Path = SYS) -> CpuBinding:
    """Choose the cores of a rank among the allowed CPUs; ``nodes``: NUMA node of each rank's GPU on this host (-1: unknown).

    Ranks of a node divide its physical cores evenly. Ranks whose node is unknown or has no allowed core divide all allowed cores.
    If there are fewer cores than ranks, each rank may run on all of them.
    """
    usable = [node if _cores_of_node(node, allowed, sys) else -1 for node in nodes]
    node = usable[local_rank]
    cores, n_sharing = _cores_of_node(node, allowed, sys), usable.count(node)
    index = usable[:local_rank].count(node)
    rank_cores = (
        cores[index * len(cores) // n_sharing : (index + 1) * len(cores) // n_sharing]
        if len(cores) >= n_sharing
        else cores
    )
    return CpuBinding(node, frozenset().union(*rank_cores), len(rank_cores) if len(cores) >= n_sharing else 1)


def _cores_of_node(node: int, allowed: Collection[int], sys: Path) -> list[frozenset[int]]:
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
