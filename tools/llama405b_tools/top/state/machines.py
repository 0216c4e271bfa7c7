"""What the hosts of a run are together: their GPUs' peak, their network, machines counted once. Pure."""

from collections.abc import Callable, Iterable, Sequence

from llama405b_tools.machine import gpus
from llama405b_tools.top.state.hostview import HostView


def mfu_pct(
    tokens_per_s: float | None, flops_per_token: float | None, ours: Sequence[HostView], world: int
) -> float | None:
    """Model FLOPs utilization: those of the model over the most that the GPUs could do, all of one kind."""
    peaks = {gpus.bf16_flops(gpu.name) for host in ours for gpu in host.gpus}
    peak = peaks.pop() if len(peaks) == 1 else None
    if not (tokens_per_s and flops_per_token and peak and world):
        return None
    return 100 * tokens_per_s * flops_per_token / (peak * world)


def network(ours: Sequence[HostView], run_name: str) -> str:
    """What the training's collectives use: "IB 8x400", "SOCKET"; "" where it is not known."""
    said = {run.net for host in ours if (run := host.run(run_name)) and run.net}
    if "SOCKET" in said:
        return "SOCKET"
    plans = (host.plans.get(run_name) for host in ours)
    named = next((plan.nccl.get("NCCL_IB_HCA", "") for plan in plans if plan), "")
    if said or named:
        rates = _rates(ours[0], named)
        kind = min(said, default="IB")
        return f"{kind} {len(rates)}x{rates[0]}" if rates else kind
    without = [not host.gpus and host.frame is not None and host.frame.pci_gpus is not None for host in ours]
    return "gloo" if without and all(without) else ""


def _rates(host: HostView, named: str) -> list[str]:
    """Gb/s of each active port of a host; of those that are named, where any is."""
    ports = [port for port in (host.frame.ib if host.frame else ()) if "ACTIVE" in port.state and port.rate.strip()]
    return [port.rate.split()[0] for port in ports if not named or port.device in named]


def distinct(hosts: Iterable[HostView], count: Callable[[HostView], int]) -> int:
    """Summed over machines: two names of the hosts file may be one machine."""
    machines: dict[str, int] = {}
    for host in hosts:
        if host.frame:
            machines[host.frame.machine] = max(machines.get(host.frame.machine, 0), count(host))
    return sum(machines.values())
