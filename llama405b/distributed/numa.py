"""Which cores a rank's threads run on: its own, of its GPU's NUMA node. Knows /sys and the scheduler.

What a thread touches first is placed on its own node, so the pinned memory of weights and moments is near as well. The
CPU's AdamW is bound by memory: half of its bytes from the other socket cost more than half of its speed.
"""

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from llama405b.contract.phrases import counted
from llama405b.contract.plan import OWN_THREADS
from llama405b.distributed.ranks import Rank

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
