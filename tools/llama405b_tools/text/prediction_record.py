"""A prediction of the plan as JSON, for programs. Pure."""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.machines import Machines
from llama405b.capacity.outlook import Outlook
from llama405b_tools.text.predictions import Asked

SCHEMA = 1  # of the record: raised when a field is renamed, removed, or means something else
UNITS = {  # of fields, by their name or how it ends
    "_bytes": "bytes",
    "_s": "seconds",
    "tokens_per_s": "tokens per second, of all GPUs",
    "_bytes_per_s": "bytes per second, one direction",
    "_spread": "share of the value that it may be too high or too low",
    "share": "share of the time",
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


def record(outlook: Outlook, machines: Machines, asked: Asked) -> dict[str, object]:
    """Return a prediction, beside what it is of."""
    needs, load = outlook.needs, outlook.load
    hours, goodput = outlook.hours(asked.tokens) or None, outlook.goodput(asked.tokens)
    gpu_hours = hours * load.world if hours else None
    return {
        "inputs": _inputs(outlook, machines, asked),
        "fits": outlook.fit.name.lower(), "gpu_bytes": needs.gpu_bytes, "host_bytes": outlook.host_bytes,
        "gpu_held_bytes": needs.peak.held, "peak_moment": needs.peak.moment, "host_held_bytes": outlook.host_held_bytes,
        "loading": dataclasses.asdict(needs.loading), "saving": dataclasses.asdict(needs.saving),
        "memory_spread": outlook.memory_spread, "time_spread": outlook.time_spread, "calibrated": bool(outlook.calibration),
        "time": dataclasses.asdict(needs.time) | {"step_s": needs.step_s} if needs.time else None,
        "floor_s": outlook.floor_s, "tokens_per_s": outlook.tokens_per_s, "mfu": outlook.mfu, "hfu": outlook.hfu,
        "goodput": dataclasses.asdict(goodput) if goodput else None,
        "hours": hours, "gpu_hours": gpu_hours, "cost": gpu_hours * asked.price if gpu_hours and asked.price else None,
        "cost_per_day": 24 * load.world * asked.price if asked.price else None, "checkpoint_bytes": load.checkpoint_bytes,
        "settings": {"offload": load.offload, "moments": load.moments, "wrap": load.wrap, "micro_batch_size": load.micro_batch},
    }  # fmt: skip


def _inputs(outlook: Outlook, machines: Machines, asked: Asked) -> Mapping[str, object]:
    """What a prediction is of: machines, model, and settings that count."""
    load = outlook.load
    return {
        "nodes": machines.nodes, "slots": machines.slots, "gpu": outlook.cluster.gpu.name,
        "gpu_memory_bytes": outlook.cluster.gpu.memory_bytes, "ram_bytes": machines.ram_bytes or None,
        "nic_bytes_per_s": machines.nic_bytes_per_s, "disk_bytes_per_s": machines.disk_bytes_per_s,
        "parameters": load.llama.parameters, "layers": load.llama.layers, "numerics": load.numerics, "overlap": load.overlap,
        "seq_len": load.seq_len, "global_batch_size": outlook.batch, "attention": load.attention, "packing": load.packing,
        "keep": load.keep, "every": load.every, "mtbf_s": load.mtbf_s, "staging_bytes": load.staging_bytes,
        "tokens": asked.tokens or None, "price": asked.price or None, "measured_s": asked.measured or None,
    }  # fmt: skip
