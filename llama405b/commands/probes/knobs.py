"""What a step takes with each setting alone and together, beside what the plan says of it.

First the knobs that the recipe leaves to whoever runs it: the embedding as a unit of its own, and offload; of FSDP1 also forward
prefetch, and all-gathers that are not limited: FSDP2 gathers the next unit by itself, and never more than that. Then, for FSDP2, the
settings that trade memory for speed.
"""

import dataclasses
import functools
import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch

from llama405b.capacity.estimate import RUNTIME_BYTES, Cluster
from llama405b.capacity.hardware import gpu_like, read_gpus
from llama405b.capacity.outlook import WHOLE, Outlook
from llama405b.commands.probes.steps import PLAIN, STEPS, Workload, take_steps
from llama405b.commands.probes.timing import GB
from llama405b.contract.probes import Figure
from llama405b.contract.schema import Model, Parallel
from llama405b.contract.strategies import Name
from llama405b.distributed.ranks import Rank
from llama405b.model import compiling, fp8

# With an embedding of true size, and layers enough for inputs to come back one layer ahead.
MODEL = Workload("llama3.1-8b", layers=4, batch=2, seq_len=4096, attention="sdpa", vocab=128_256)


BASE = Parallel(wrap=WHOLE[:1])  # a layer is a unit
Knobs = dict[str, dict[str, Any]]  # settings of [parallel] and [model], by a name
FSDP2: Knobs = {"embedding": {"wrap": WHOLE}, "offload": {"offload": "all"}}
FSDP1 = FSDP2 | {
    "forward prefetch": {"forward_prefetch": True},
    "all-gathers not limited": {"limit_all_gathers": False},
}
MORE: Knobs = {
    "loss in parts": {"loss": "parts"},
    "operators": {"activation_checkpointing": "operators"},
    "no checkpointing": {"activation_checkpointing": "none"},
    "fused": {"fused": True},
    "layer inputs on the host": {"activations": "host"},
    "pure-bf16": {"numerics": "pure-bf16"},
    "bf16-stochastic": {"numerics": "bf16-stochastic"},
}
COMPILED: Knobs = {"compiled": {"compile": True}}
FP8: Knobs = COMPILED | {"fp8": {"numerics": "fp8"}}
TOGETHER = ("loss in parts", "no checkpointing", "compiled")


def recipes(strategy: Name) -> dict[str, Knobs]:
    """Return what the recipe of a strategy leaves open, by name: none of its knobs, each alone, and all."""
    knobs = FSDP1 if strategy == "fsdp1" else FSDP2
    return {"none of them": {}} | {name: {name: knobs[name]} for name in knobs} | {"all of them": knobs}


def trades(device: torch.device) -> dict[str, Knobs]:
    """Return what else of FSDP2 runs here, by name: each alone, and some together."""
    alone = MORE if compiling.lack(device) else MORE | COMPILED
    sets: list[Knobs] = [{name: alone[name]} for name in alone]
    sets += [{name: alone[name] for name in TOGETHER if name in alone}]
    sets += [FP8] if "compiled" in alone and not fp8.lack(device) else []
    return {" + ".join(each): each for each in sets}


def knobs(me: Rank) -> list[Figure]:
    """Take steps with each setting of the recipe, for FSDP2, and on GPUs for FSDP1, which torch has for no CPU: seconds and GB."""
    found = _table("fsdp2", recipes("fsdp2"), me)
    return found + _table("fsdp1", recipes("fsdp1"), me) if me.on_gpu else found


def more_knobs(me: Rank) -> list[Figure]:
    """Take steps with each setting that trades memory for speed."""
    return _table("fsdp2", trades(me.device), me)


def _table(strategy: Name, named: Mapping[str, Knobs], me: Rank) -> list[Figure]:
    figures = []
    for name, together in named.items():
        values: dict[str, Any] = functools.reduce(operator.or_, together.values(), {"strategy": strategy})
        of_model = {key: value for key, value in values.items() if hasattr(PLAIN, key)}
        parallel = dataclasses.replace(BASE, **{key: values[key] for key in values.keys() - of_model.keys()})
        figures += (found := _measured(f"{strategy}, {name}", parallel, dataclasses.replace(PLAIN, **of_model), me))
        if me.is_rank0:  # all comes at the end, if it comes to an end
            print("; ".join(f"{each.name} {each.value:.3g} {each.unit}" for each in found), file=sys.stderr, flush=True)
    return figures


def _measured(name: str, parallel: Parallel, model: Model, me: Rank) -> list[Figure]:
    if me.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _, timed = take_steps(MODEL, parallel, me, 1 + STEPS, model)
    found = [Figure(f"{name}: {part}", timed.seconds[part], "s") for part in ("forward", "backward")]
    found.append(Figure(f"{name}: step", timed.whole_s, "s"))
    if not me.on_gpu:
        return found
    found.append(Figure(f"{name}: peak", torch.cuda.max_memory_allocated() / GB, "GB"))
    found.append(Figure(f"{name}: reserved", torch.cuda.max_memory_reserved() / GB, "GB"))
    return found if parallel.by_fsdp1 else found + _planned(name, parallel, model, me)


def _planned(name: str, parallel: Parallel, model: Model, me: Rank) -> list[Figure]:
    """What the plan says of it, if it knows the GPU; FSDP1 is not predicted."""
    of = torch.cuda.get_device_properties(me.device)
    gpu = gpu_like(of.name, of.total_memory, read_gpus())
    run = MODEL.run_shape(parallel, me, model)
    needs = Outlook.of(run, Cluster(gpu) if gpu else Cluster()).needs
    found = [Figure(f"{name}: planned peak", (needs.gpu_bytes - RUNTIME_BYTES) / GB, "GB")]
    if needs.reserved:
        found.append(Figure(f"{name}: planned reserved", sum(needs.reserved.values()) / GB, "GB"))
    return [*found, Figure(f"{name}: planned step", needs.step_s, "s")] if gpu and needs.step_s else found
