"""What cluster-top knows, as metrics for Prometheus: names, labels and values. Pure.

What is unknown, and what a host no longer tells, is left out: a graph then has a gap instead of an old value.
"""

from collections.abc import Iterator
from typing import NamedTuple

from llama405b_tools.top.state.picture import HostRow, Picture, TrainingStatus

METRICS = {  # name without ``llama405b_`` -> labels, meaning
    "verdict": ("verdict", "1 for the verdict that is given now"),
    "exit_code": ("", "0 as it should be, 1 degraded or not known, 3 hung, failed or down"),
    "run_info": ("run phase network guard", "1 for the run that is shown"),
    "world_size": ("run", "Ranks of the run"),
    "restarts": ("run", "Attempts of the run before this one"),
    "step": ("run", "Last step"),
    "steps": ("run", "Steps in total"),
    "loss": ("run", "Loss of the last step"),
    "evaluation_loss": ("run", "Last loss on data that is not trained on"),
    "step_seconds": ("run", "Median of the last steps"),
    "step_planned_seconds": ("run", "A step as it was predicted at launch"),
    "step_part_seconds": ("run part", "Median of a part of the last steps: data, forward, backward, optimizer"),
    "tokens_per_second": ("run", "Of all ranks; absent while no steps are taken"),
    "mfu_ratio": ("run", "Model FLOPs over the dense BF16 peak of the GPUs"),
    "eta_seconds": ("run", "Until the last step"),
    "checkpoint_step": ("run", "Step of the newest checkpoint"),
    "goodput_ratio": ("run", "Of the time since its first launch: steps that count"),
    "steps_at_risk": ("run", "Steps since the newest checkpoint"),
    "host_up": ("host", "1 if the host is heard, else 0"),
    "host_state": ("host state", "1 for the state that the host is in"),
    "host_notes": ("host", "How many things stand out on the host"),
    "host_cpu_ratio": ("host", "Of all its cores"),
    "host_memory_used_bytes": ("host", "RAM in use"),
    "host_memory_bytes": ("host", "RAM in total"),
    "host_disk_free_bytes": ("host", "Where the run writes; of several file systems the least"),
    "host_network_bytes_per_second": ("host", "Both directions, the busiest interface"),
    "host_rdma_bytes_per_second": ("host", "Both directions, all ports"),
    "gpu_power_watts": ("host gpu rank", "Power draw"),
    "gpu_power_limit_watts": ("host gpu rank", "Power limit"),
    "gpu_utilization_ratio": ("host gpu rank", "Time in which a kernel ran"),
    "gpu_memory_used_bytes": ("host gpu rank", "Memory in use"),
    "gpu_memory_bytes": ("host gpu rank", "Memory in total"),
    "gpu_temperature_celsius": ("host gpu rank", "Temperature"),
    "gpu_clock_hertz": ("host gpu rank", "Clock of its multiprocessors"),
    "gpu_stands_out": ("host gpu rank", "1 if something about it or its rank stands out, else 0"),
    "rank_step": ("host rank", "Step of the rank's last heartbeat"),
    "rank_heartbeat_age_seconds": ("host rank", "Age of the rank's last heartbeat"),
    "rank_busy_seconds": ("host rank", "Its own computing in its last step, without waiting for other ranks"),
}
PARTS = ("data", "forward", "backward", "optimizer")


class Sample(NamedTuple):
    """One value of a metric."""

    name: str  # a key of ``METRICS``
    labels: tuple[str, ...]  # their values, in the order of ``METRICS``
    value: float


def samples(pic: Picture) -> Iterator[Sample]:
    """Yield everything that is known."""
    found: list[Found] = [("verdict", (str(pic.verdict),), 1.0), ("exit_code", (), float(pic.exit_code))]
    if pic.training:
        found += _of_run(pic.training)
    for row in pic.hosts:
        found += [("host_up", (row.name,), float(row.is_heard)), ("host_state", (row.name, str(row.state)), 1.0)]
        if row.is_heard:
            found += _of_host(row)
    yield from (Sample(name, labels, value) for name, labels, value in found if value is not None)


Found = tuple[str, tuple[str, ...], float | None]


def _of_run(run: TrainingStatus) -> Iterator[Found]:
    yield "run_info", (run.run, str(run.phase), run.network, str(run.guard)), 1.0
    values: dict[str, float | None] = {
        "world_size": run.world,
        "restarts": run.attempt - 1,
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "evaluation_loss": run.evaluation_loss,
        "step_seconds": run.step_s,
        "step_planned_seconds": run.expected_step_s,
        "tokens_per_second": run.tokens_per_s,
        "mfu_ratio": None if run.mfu_pct is None else run.mfu_pct / 100,
        "eta_seconds": run.eta_s,
        "checkpoint_step": run.checkpoint_step,
        "goodput_ratio": None if run.goodput_pct is None else run.goodput_pct / 100,
        "steps_at_risk": run.lost_steps,
    }
    for name, value in values.items():
        yield name, (run.run,), value
    for part in PARTS:
        yield "step_part_seconds", (run.run, part), getattr(run, f"{part}_s")


def _of_host(row: HostRow) -> Iterator[Found]:
    values: dict[str, float | None] = {
        "host_notes": len(row.notes),
        "host_cpu_ratio": None if row.cpu_pct is None else row.cpu_pct / 100,
        "host_memory_used_bytes": row.ram_used_bytes,
        "host_memory_bytes": row.ram_bytes,
        "host_disk_free_bytes": row.disk_free_bytes,
        "host_network_bytes_per_second": row.net_bytes_per_s,
        "host_rdma_bytes_per_second": row.ib_bytes_per_s,
    }
    for name, value in values.items():
        yield name, (row.name,), value
    for gpu in row.gpus:
        readings: dict[str, float | None] = {
            "gpu_power_watts": gpu.power_w,
            "gpu_power_limit_watts": gpu.power_limit_w,
            "gpu_utilization_ratio": None if gpu.utilization is None else gpu.utilization / 100,
            "gpu_memory_used_bytes": None if gpu.used_mib is None else gpu.used_mib * 2**20,
            "gpu_memory_bytes": None if gpu.memory_mib is None else gpu.memory_mib * 2**20,
            "gpu_temperature_celsius": gpu.temperature_c,
            "gpu_clock_hertz": None if gpu.clock_mhz is None else gpu.clock_mhz * 1e6,
            "gpu_stands_out": bool(gpu.odd),
        }
        for name, value in readings.items():
            yield name, (row.name, str(gpu.index), "" if gpu.rank is None else str(gpu.rank)), value
    for rank in row.ranks:
        for name, value in (
            ("rank_step", rank.step),
            ("rank_heartbeat_age_seconds", rank.age_s),
            ("rank_busy_seconds", rank.busy_s),
        ):
            yield name, (row.name, str(rank.rank)), value
