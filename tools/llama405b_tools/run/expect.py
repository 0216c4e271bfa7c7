"""What to expect of a run on hosts that have answered: whether it fits, and how long its steps take. Pure."""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.calibration import Calibration
from llama405b.capacity.estimate import Cluster, Load
from llama405b.capacity.hardware import GIB, Gpu, gpu_like, read_gpus
from llama405b.capacity.outlook import Fit, Outlook, units_fault
from llama405b.contract.config import on_ranks
from llama405b.contract.plan import Plan
from llama405b_tools.machine.fabric import training_ports
from llama405b_tools.remote.messages.launch import LaunchFacts
from llama405b_tools.run.request import LaunchRequest


def expected(
    request: LaunchRequest, plan: Plan, answers: Mapping[str, LaunchFacts], measured: Calibration | None
) -> Outlook | None:
    """Return what to expect of it, with what was ``measured`` on its hosts; None if that is not known.

    It is not of CPUs, unless they were measured, of GPUs that differ or are in no table, of other FSDP units than are predicted, of
    an evaluation without training, and of other programs.
    """
    asked, llama = request.config, answers[plan.nodes[0].name].llama
    kinds = {(answer.gpu, answer.gpu_bytes) for answer in answers.values()}
    if asked is None or llama is None or request.evaluates:
        return None
    if asked.parallel.fsdp == "fsdp1" or not asked.model.activation_checkpointing or units_fault(asked.parallel.wrap):
        return None
    slots = max(node.slots for node in plan.nodes)
    ram_bytes = min(answer.memory_bytes for answer in answers.values())
    name, n_bytes = next(iter(kinds))
    gpu = gpu_like(name, n_bytes, read_gpus()) if n_bytes and len(kinds) == 1 else None
    if request.on_cpu:
        gpu = Gpu.of_cpu(ram_bytes / slots)
    if gpu is None:
        return None
    load = Load.of(llama, on_ranks(asked, plan.world), plan.world)
    load = dataclasses.replace(load, ranks_per_host=slots)
    cluster = Cluster(gpu, min(_link(answers[node.name], node.interface) for node in plan.nodes))
    outlook = Outlook.of(load, cluster, ram_bytes)
    outlook = outlook.calibrated(measured) if measured else outlook
    return None if gpu.is_cpu and not outlook.calibration else outlook


def misfit(outlook: Outlook) -> str:
    """Say what does not fit, by more than the prediction may be wrong; '' if nothing."""
    needs, has = outlook.needs, outlook.cluster.gpu.memory_bytes / GIB
    if outlook.gpu is Fit.NO:
        return (
            f"a GPU has {has:,.0f} GiB, but a rank would take about {needs.gpu_bytes / GIB:,.0f} at {needs.peak.moment}"
        )
    if outlook.ram is Fit.NO:
        has = outlook.ram_bytes / GIB
        return f"a host has {has:,.0f} GiB of memory, but the run would take about {outlook.host_bytes / GIB:,.0f}"
    return ""


def _link(answer: LaunchFacts, interface: str) -> float:
    """Bytes/s that a host sends at most to others; the default where its kernel does not say."""
    gbit = sum(port.gbit for port in training_ports(answer.rdma.ports))
    speeds = [int(each.mbit) / 1000 for each in answer.own if each.interface == interface and each.mbit.isdecimal()]
    return (gbit or max(speeds, default=0.0)) * 1e9 / 8 or Cluster().nic_bytes_per_s
