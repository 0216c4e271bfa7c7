"""What a prediction needs to know of hosts, from the facts that they gave. The least of them counts."""

from collections.abc import Mapping, Sequence

from llama405b.capacity.hardware import Gpu, gpu_like
from llama405b.capacity.machines import Machines
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import and_more
from llama405b_tools.doctor.host_facts import HostFacts
from llama405b_tools.hosts.inventory import Host


def machines_of(hosts: Sequence[Host], facts: Mapping[str, HostFacts], gpus: dict[str, Gpu]) -> Machines:
    """Return what the hosts have.

    Raises:
        UserError: Some have other GPUs than the others, or one that is not in the table, or other numbers of them.
    """
    kinds: dict[str, list[str]] = {}
    slots: dict[int, list[str]] = {}
    for host in hosts:
        devices = facts[host.name].devices
        for device in devices[:1]:
            size = (device.memory_mib or 0) * 1024 * 1024
            known = gpu_like(device.name, size, gpus) if size else None
            kinds.setdefault(known.name if known else f"{device.name}, {size >> 30} GiB", []).append(host.name)
        slots.setdefault(host.slots or len(devices) or 1, []).append(host.name)
    for what, of in (("GPU", kinds), ("number of ranks", slots)):
        if len(of) > 1:
            told = "; ".join(f"{kind} on {names[0]}{and_more(names)}" for kind, names in of.items())
            raise UserError(f"hosts differ in their {what} ({told}); predict them apart, with hosts files of their own")
    kind = next(iter(kinds), "")
    if kind and kind not in gpus:
        raise UserError(
            f"{hosts[0].name}: its GPU ({kind}) is not in the table; describe it with --hardware and name it with --gpu"
        )
    return Machines(
        nodes=len(hosts),
        slots=next(iter(slots)),
        gpu=gpus[kind] if kind else None,
        ram_bytes=min((found.memory.total for found in facts.values() if found.memory), default=0),
        nic_bytes_per_s=min(sum(port.gbit for port in facts[host.name].rdma_ports if port.up) for host in hosts)
        * 1e9
        / 8,
        versions=facts[hosts[0].name].packages,
    )
