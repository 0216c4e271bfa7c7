"""Which hosts' disks cannot hold the checkpoints of a run that is to begin. Pure."""

from collections.abc import Mapping

from llama405b.capacity.estimate import checkpoint_bytes_per_parameter
from llama405b.capacity.room import room_fault
from llama405b.contract.plan import Plan
from llama405b_tools.remote.messages.launch import LaunchFacts
from llama405b_tools.run.request import LaunchRequest


def room_faults(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> dict[str, str]:
    """Return why, by host; of a directory that all share, on the head alone.

    A run that is resumed has checkpoints there already, of which the trainer knows: it checks as well.
    """
    head = plan.nodes[0]
    if not request.saves or request.resume != "no":
        return {}
    llama = answers[head.name].llama
    checkpoint, parallel = request.settings.checkpoint, request.settings.parallel
    each_bytes = checkpoint_bytes_per_parameter(parallel.numerics, parallel.moments) * (
        llama.parameters if llama else 0
    )
    if checkpoint.storage == "shared":
        takes = {head.name: each_bytes}
    else:
        copies = checkpoint.copies * (len(plan.nodes) > 1)
        ring = zip(plan.nodes, (plan.nodes[-1], *plan.nodes), strict=False)  # each with the one before it
        takes = {node.name: each_bytes * (node.slots + copies * before.slots) // plan.world for node, before in ring}
    faults = {}
    for name, n_bytes in takes.items():
        place = answers[name].places.get("--checkpoint.dir", answers[name].run_place)
        best = checkpoint.keep_best
        if why := room_fault(place.free_bytes, n_bytes, checkpoint.keep + best, best=best):
            faults[name] = f"--checkpoint.dir: {place.path} {why}"
    return faults
