"""Which cores a rank's threads run on: those of its GPU's NUMA node. Knows /sys and the scheduler.

What a thread touches first is placed on its own node, so the pinned memory of weights and moments is near as well. The
CPU's AdamW is bound by memory: half of its bytes from the other socket cost more than half of its speed.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from llama405b.contract.plan import OWN_THREADS
from llama405b.distributed.ranks import Rank

SYS = Path("/sys")


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """The CPUs that a rank may run on, and how many threads compute there."""

    node: int
    cpus: frozenset[int]
    threads: int  # one per physical core, shared fairly by the ranks of the node


def bind(me: Rank) -> str:
    """Bind this process to its GPU's NUMA node, before torch starts threads; returns what was done, for the log."""
    if not me.on_gpu:
        return ""
    nodes = [numa_node(bus_id(i)) for i in range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]
    found = binding_of(nodes, me.local_rank, os.sched_getaffinity(0))
    if found is None:
        return "cores: the NUMA node of this GPU is not known; not bound"
    os.sched_setaffinity(0, found.cpus)
    if OWN_THREADS not in os.environ:
        torch.set_num_threads(found.threads)
    threads = f"{torch.get_num_threads()} threads{' (OMP_NUM_THREADS)' * (OWN_THREADS in os.environ)}"
    return f"cores: bound to NUMA node {found.node} of its GPU ({len(found.cpus)} CPUs), {threads}"


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


def binding_of(nodes: Sequence[int], local_rank: int, allowed: set[int], sys: Path = SYS) -> Binding | None:
    """Choose the CPUs of a rank, of those that are allowed. ``nodes``: of the GPU of each rank on the host.

    None if the GPU's node is not known, or none of its CPUs is allowed.
    """
    node = nodes[local_rank]
    cpus = frozenset(cpu for cpu in allowed if (sys / f"devices/system/node/node{node}/cpu{cpu}").exists())
    if node < 0 or not cpus:
        return None
    physical = {(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus}
    return Binding(node, cpus, max(1, len(physical) // nodes.count(node)))
