"""Which way of loading suits the hosts: what rank 0 would have to send, and how to spare that. Pure."""

from collections.abc import Mapping

from llama405b.contract.phrases import given
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.typed import hosts_argument
from llama405b_tools.remote.messages.launch import LaunchFacts
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.text.fold import fold_names

WORTH_BYTES = 10 * 10**9  # below, nobody waits for it


def loading_note(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> str:
    """Say how loading would be faster; '' if it would not, or hardly.

    Where all hosts have the weights, each rank reads its own rows. Otherwise rank 0 sends every other host its rows, which takes
    at least their bytes over the speed of rank 0's link. With fsdp1 it always does.
    """
    head, *others = plan.nodes
    how, parallel = request.settings.model.load, request.settings.parallel
    whole = answers[head.name].weights_bytes
    sent = whole * (plan.world - head.slots) // plan.world
    if request.resume != "no" or sent < WORTH_BYTES or how == "local" or parallel.fsdp == "fsdp1":
        return ""
    least = given(", at least {:.0f} s", _seconds(sent, answers[head.name], head.interface))
    lacking = [node.name for node in others if not answers[node.name].weights_bytes]
    if lacking:
        path = request.settings.model.path
        return (
            f"note: {fold_names(lacking)} without the weights: rank 0 sends {sent / 1e9:,.0f} GB{least}; "
            f"`llama405b push --shards {head.name}:{path}{hosts_argument(request.hosts_file)}` gives each host its own rows once"
        )
    if how == "rank0":
        return f"note: all hosts have the weights; --model.load auto would spare sending {sent / 1e9:,.0f} GB from rank 0{least}"
    return ""


def _seconds(n_bytes: int, head: LaunchFacts, interface: str) -> float:
    """How long a host's link takes for that; 0 if its speed is not known."""
    speeds = [int(each.mbit) for each in head.own if each.interface == interface and each.mbit.isdigit()]
    return n_bytes * 8 / (speeds[0] * 1e6) if speeds and speeds[0] else 0.0
