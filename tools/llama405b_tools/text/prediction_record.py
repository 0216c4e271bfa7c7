"""A prediction as a record, for programs: names, numbers and their units. Pure."""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.machines import Machines
from llama405b.capacity.outlook import Outlook
from llama405b.contract.adapters import describe
from llama405b.contract.schema import Parallel
from llama405b_tools.text.predictions import ReportOptions

SCHEMA = 2  # of the record: raised when a field is renamed, removed, or means something else
UNITS = {  # of fields, by their name or how it ends
    "_bytes": "bytes",
    "_s": "seconds",
    "tokens_per_s": "tokens per second, of all GPUs",
    "_bytes_per_s": "bytes per second, one direction",
    "_spread": "share of the value that it may be too high or too low",
    "time_range": "least and most that a time may be, as shares of it, after so many programs; null: this GPU was never measured",
    "share": "share of the time",
    "mesh": "ranks along each axis",
    "mfu": "share",
    "hfu": "share",
    "seq_len": "tokens",
    "global_batch_size": "sequences",
    "micro_batch_size": "sequences",
    "hours": "hours, with saves and failures",
    "gpu_hours": "hours of one GPU, with saves and failures",
    "price": "of a GPU for an hour",
    "cost": "as price, with saves and failures",
    "cost_per_day": "as price",
}


def record(outlook: Outlook, machines: Machines, asked: ReportOptions) -> dict[str, object]:
    """Return a prediction, beside what it is of."""
    needs, load, within = outlook.needs, outlook.load, outlook.time_range
    hours, goodput = outlook.hours(asked.tokens) or None, outlook.goodput(asked.tokens)
    gpu_hours = hours * load.world if hours else None
    return {
        "inputs": _inputs(outlook, machines, asked),
        "fits": outlook.fit.name.lower(), "gpu_bytes": needs.gpu_bytes, "host_bytes": outlook.host_bytes,
        "gpu_reserved_bytes": needs.gpu_reserved_bytes, "gpu_reserved_by_pool_bytes": needs.reserved,
        "gpu_held_bytes": needs.peak.held, "peak_moment": needs.peak.moment, "host_held_bytes": outlook.host_held_bytes,
        "loading": dataclasses.asdict(needs.loading), "saving": dataclasses.asdict(needs.saving),
        "pinned_bytes": needs.pinned_bytes, "pinning_s": needs.pinning_s,
        "memory_spread": outlook.memory_spread, "time_range": dataclasses.asdict(within) if within else None,
        "evidence": outlook.evidence, "calibrated": bool(outlook.calibration),
        "time": dataclasses.asdict(needs.time) | {"step_s": needs.step_s} if needs.time else None,
        "floor_s": outlook.floor_s, "tokens_per_s": outlook.tokens_per_s, "mfu": outlook.mfu, "hfu": outlook.hfu,
        "goodput": dataclasses.asdict(goodput) if goodput else None,
        "hours": hours, "gpu_hours": gpu_hours, "cost": gpu_hours * asked.price if gpu_hours and asked.price else None,
        "cost_per_day": 24 * load.world * asked.price if asked.price else None, "checkpoint_bytes": load.checkpoint_bytes,
        "settings": {"offload": load.offload, "moments": load.moments, "wrap": load.wrap, "micro_batch_size": load.micro_batch,
                     "strategy": load.parallel(Parallel()).strategy, "loss": load.loss,
                     "activation_checkpointing": str(load.recompute), "activations": load.activations},
        "mesh": dataclasses.asdict(load.axes),
    }  # fmt: skip


def _inputs(outlook: Outlook, machines: Machines, asked: ReportOptions) -> Mapping[str, object]:
    """What a prediction is of: machines, model, and settings that count."""
    load = outlook.load
    return {
        "nodes": machines.nodes, "slots": machines.slots, "gpu": outlook.cluster.gpu.name,
        "gpu_memory_bytes": outlook.cluster.gpu.memory_bytes, "ram_bytes": machines.ram_bytes or None,
        "nic_bytes_per_s": machines.nic_bytes_per_s, "disk_bytes_per_s": machines.disk_bytes_per_s,
        "parameters": load.llama.parameters, "layers": load.llama.layers, "numerics": load.numerics, "overlap": load.overlap,
        "adapter": describe(load.adapter),
        "seq_len": load.seq_len, "global_batch_size": outlook.load.global_batch, "attention": load.attention, "packing": load.packing,
        "keep": load.keep, "every": load.every, "mtbf_s": load.mtbf_s, "staging_bytes": load.staging_bytes,
        "tokens": asked.tokens or None, "price": asked.price or None, "measured_s": asked.measured or None,
    }  # fmt: skip
