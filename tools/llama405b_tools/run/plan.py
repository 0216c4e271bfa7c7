"""Put a request, the hosts' answers and the way between them together as a plan. Pure."""

from collections.abc import Sequence

from llama405b.contract.errors import UserError


def first_ranks(slots: Sequence[int]) -> list[int]:
    """The rank each host begins with, in the order of the hosts file."""
    return [sum(slots[:i]) for i in range(len(slots))]


def device_env(nodes: Sequence[tuple[str, int]], gpus: Sequence[int]) -> list[dict[str, str]]:
    """Disjoint GPUs for hosts that are one machine: ``(machine, slots)`` per host -> its environment.

    Raises:
        UserError: The hosts on one machine ask for more GPUs than it has.
    """
    used: dict[str, int] = {}
    environments: list[dict[str, str]] = []
    shared = {machine for machine, _ in nodes if sum(m == machine for m, _ in nodes) > 1}
    for (machine, slots), present in zip(nodes, gpus, strict=True):
        begin = used.get(machine, 0)
        used[machine] = begin + slots
        if present and used[machine] > present:
            raise UserError(
                f"slots: {used[machine]} ranks on a machine with {present} GPUs; lower slots= in the hosts file"
            )
        ids = ",".join(str(i) for i in range(begin, begin + slots))
        environments.append({"CUDA_VISIBLE_DEVICES": ids} if present and machine in shared else {})
    return environments
