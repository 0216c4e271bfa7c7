"""What a run will take on hosts that have answered: memory and time, disk space, loading; and what was measured there."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.capacity.calibration import Calibration
from llama405b.capacity.choice import chosen
from llama405b.capacity.disk import NoRoomError, check_room
from llama405b.capacity.estimate import Cluster
from llama405b.capacity.hardware import GIB, Gpu, gpu_like, read_gpus
from llama405b.capacity.outlook import Fit, Outlook, is_predicted
from llama405b.capacity.run_shape import RunShape, checkpoint_bytes_per_parameter
from llama405b.contract import reader
from llama405b.contract.adapters import n_trained
from llama405b.contract.config import mesh_flags, on_ranks, split_flags_of
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_atomic
from llama405b.contract.phrases import given
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.printed_commands import hosts_argument
from llama405b_tools.machine.network import training_ports
from llama405b_tools.remote.messages.probe import LaunchFacts
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.text.fold import fold_names

WORTH_BYTES = 10 * 10**9  # below, nobody waits for it


def save_calibration(hosts_file: Path, calibration: Calibration) -> None:
    """Keep it beside the hosts file."""
    write_atomic(_file_of(hosts_file), reader.dumps(calibration) + "\n")


def read_calibration(hosts_file: Path, hosts: Sequence[Host]) -> Calibration | None:
    """Return what was kept there; None: nothing, or of another version, or of other hosts."""
    try:
        calibration = reader.loads(Calibration, _file_of(hosts_file).read_text(encoding="utf-8"), "a calibration")
    except (OSError, UnicodeDecodeError, reader.MalformedError):
        return None
    return calibration if {host.name for host in hosts} <= {*calibration.hosts} else None


def has_calibration(hosts_file: Path) -> bool:
    """Whether anything was kept."""
    return _file_of(hosts_file).exists()


def _file_of(hosts_file: Path) -> Path:
    return hosts_file.with_name(f"{hosts_file.name}.calibration.json")


def with_split(
    request: LaunchRequest, hosts: Sequence[Host], answers: Mapping[str, LaunchFacts], interfaces: Mapping[str, str]
) -> LaunchRequest:
    """Return a request with what the plan chooses in place of what is left to it; others as they are."""
    config, llama = request.config, answers[hosts[0].name].llama
    if config is None or not config.left_to_plan:
        return request
    if llama is None:
        raise UserError(f"{config.left_to_plan}: it needs the model's config.json on the hosts; write another value")
    slots = [host.slots or max(1, answers[host.name].gpus) for host in hosts]
    gpu = None if request.on_cpu else _gpu_of(answers)
    cluster = (
        Cluster(gpu, min(_link(answers[host.name], interfaces[host.name]) for host in hosts)) if gpu else Cluster()
    )
    ram_bytes = min(facts.memory_bytes for facts in answers.values()) if gpu else 0.0
    config = chosen(config, llama, sum(slots), max(slots), cluster, ram_bytes)
    return dataclasses.replace(request, config=config, flags=(*request.flags, *split_flags_of(config)))


def expected(
    request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts], measured: Calibration | None
) -> Outlook | None:
    """Return what to expect of it, with what was ``measured`` on its hosts; None if that is not known.

    It is not of CPUs, unless they were measured, of GPUs that differ or are in no table, of other FSDP units than are predicted, of
    an evaluation without training, and of other programs.
    """
    config, llama = request.config, answers[plan.nodes[0].name].llama
    if config is None or llama is None or request.evaluates or not is_predicted(config):
        return None
    slots = max(node.slots for node in plan.nodes)
    ram_bytes = min(facts.memory_bytes for facts in answers.values())
    gpu = Gpu.of_cpu(ram_bytes / slots) if request.on_cpu else _gpu_of(answers)
    if gpu is None:
        return None
    axes = plan.axes(config.parallel)
    load = dataclasses.replace(RunShape.of(llama, on_ranks(config, axes), plan.world, axes), ranks_per_host=slots)
    cluster = Cluster(gpu, min(_link(answers[node.name], node.interface) for node in plan.nodes))
    outlook = Outlook.of(load, cluster, ram_bytes)
    outlook = outlook.calibrated(measured) if measured else outlook
    return None if gpu.is_cpu and not outlook.calibration else outlook


def _gpu_of(answers: Mapping[str, LaunchFacts]) -> Gpu | None:
    """Return the GPU that all hosts have; None if they differ, or it is in no table."""
    kinds = {(facts.gpu, facts.gpu_bytes) for facts in answers.values()}
    name, n_bytes = next(iter(kinds))
    return gpu_like(name, n_bytes, read_gpus()) if n_bytes and len(kinds) == 1 else None


def refuse_misfit(outlook: Outlook) -> None:
    """Refuse what does not fit: a host's memory by more than the prediction may be wrong, a GPU's by what must be allocated."""
    needs = outlook.needs
    if outlook.gpu is Fit.NO:
        has, takes = outlook.cluster.gpu.memory_bytes / GIB, needs.gpu_bytes / GIB
        why = f"a GPU has {has:,.1f} GiB, but a rank would allocate about {takes:,.1f} at {needs.peak.moment}"
    elif outlook.ram is Fit.NO:
        has, takes = outlook.ram_bytes / GIB, outlook.host_bytes / GIB
        why = f"a host has {has:,.0f} GiB of memory, but the run would take about {takes:,.0f}"
    else:
        return
    raise UserError(
        f"{why}; `llama405b plan` says what would fit, and --allow-misfit starts it nonetheless. Nothing was started"
    )


def _link(answer: LaunchFacts, interface: str) -> float:
    """Bytes/s that a host sends at most to others; the default where its kernel does not say."""
    gbit = sum(port.gbit for port in training_ports(answer.rdma.ports))
    speeds = [int(each.mbit) / 1000 for each in answer.own if each.interface == interface and each.mbit.isdecimal()]
    return (gbit or max(speeds, default=0.0)) * 1e9 / 8 or Cluster().nic_bytes_per_s


def room_faults(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> dict[str, str]:
    """Return why, by host; of a directory that all share, on the head alone.

    A run that is resumed has checkpoints there already, of which the trainer knows: it checks as well.
    """
    head = plan.nodes[0]
    if not request.saves or request.resume != "no":
        return {}
    llama = answers[head.name].llama
    checkpoint, parallel = request.settings.checkpoint, request.settings.parallel
    n_saved = n_trained(llama, request.settings.adapter) if llama else 0
    each_bytes = checkpoint_bytes_per_parameter(parallel.numerics, parallel.moments) * n_saved
    if checkpoint.storage == "shared":
        takes = {head.name: each_bytes}
    else:
        copies = checkpoint.copies * (len(plan.nodes) > 1)
        ring = zip(plan.nodes, (plan.nodes[-1], *plan.nodes), strict=False)  # each with the one before it
        takes = {node.name: each_bytes * (node.slots + copies * before.slots) // plan.world for node, before in ring}
    faults = {}
    best = checkpoint.keep_best
    for name, n_bytes in takes.items():
        place = answers[name].places.get("--checkpoint.dir", answers[name].run_place)
        try:
            check_room(place.free_bytes, n_bytes, checkpoint.keep + best, best=best)
        except NoRoomError as error:
            faults[name] = f"--checkpoint.dir: {place.path} {error}"
    return faults


def loading_note(request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts]) -> str:
    """Say how loading would be faster; '' if it would not, or hardly.

    Where all hosts have the weights, each rank reads its own part. Otherwise rank 0 sends every other host its part, which takes
    at least their bytes over the speed of rank 0's link. With fsdp1 it always does.
    """
    head, *others = plan.nodes
    how, parallel = request.settings.model.load, request.settings.parallel
    whole = answers[head.name].weights_bytes
    sent = whole * (plan.world - head.slots) // plan.world
    loads = request.resume == "no" or request.settings.adapter.trains  # whose checkpoints have no weights
    if not loads or sent < WORTH_BYTES or how == "local" or parallel.by_fsdp1:
        return ""
    least = given(", at least {:.0f} s", _seconds(sent, answers[head.name], head.interface))
    lacking = [node.name for node in others if not answers[node.name].weights_bytes]
    if lacking:
        path, mesh = request.settings.model.path, "".join(f" {flag}" for flag in mesh_flags(parallel))
        return (
            f"note: {fold_names(lacking)} without the weights: rank 0 sends {sent / 1e9:,.0f} GB{least}; "
            f"`llama405b push --shards {head.name}:{path}{hosts_argument(request.hosts_file)}{mesh}` gives each host its own part once"
        )
    if how == "rank0":
        return f"note: all hosts have the weights; --model.load auto would spare sending {sent / 1e9:,.0f} GB from rank 0{least}"
    return ""


def _seconds(n_bytes: int, head: LaunchFacts, interface: str) -> float:
    """How long a host's link takes for that; 0 if its speed is not known."""
    speeds = [int(each.mbit) for each in head.own if each.interface == interface and each.mbit.isdigit()]
    return n_bytes * 8 / (speeds[0] * 1e6) if speeds and speeds[0] else 0.0
