"""The knobs that the recipe leaves to whoever runs it, each alone and all together: what a step takes, beside what the plan says.

Of FSDP1: the embedding as a unit of its own, forward prefetch, all-gathers that are not limited, and offload. FSDP2 has no
second and third: it gathers the next unit by itself, and never more than that.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch

from llama405b.capacity.estimate import RUNTIME_BYTES, Cluster
from llama405b.capacity.hardware import gpu_like, read_gpus
from llama405b.capacity.outlook import WHOLE, Outlook
from llama405b.capacity.run_shape import RunShape
from llama405b.commands.probes.steps import STEPS, Workload, take_steps
from llama405b.commands.probes.timing import GB
from llama405b.contract import weights
from llama405b.contract.probes import Figure
from llama405b.contract.schema import Parallel
from llama405b.contract.strategies import Name
from llama405b.distributed.ranks import Rank

# With an embedding of true size.
MODEL = Workload("llama3.1-8b", layers=2, batch=2, seq_len=4096, attention="sdpa", vocab=128_256)
LAYERS_ALONE = WHOLE[:1]
FSDP2: dict[str, dict[str, Any]] = {"embedding": {"wrap": WHOLE}, "offload": {"offload": "all"}}
FSDP1 = FSDP2 | {
    "forward prefetch": {"forward_prefetch": True},
    "all-gathers not limited": {"limit_all_gathers": False},
}


def settings_of(strategy: Name) -> Iterator[tuple[str, Parallel]]:
    """Yield the settings of a strategy, by their names: with none of its knobs, with each alone, and with all."""
    base = Parallel(strategy=strategy, wrap=LAYERS_ALONE)
    knobs = FSDP1 if base.by_fsdp1 else FSDP2
    yield f"{strategy}, none of them", base
    for name, values in knobs.items():
        yield f"{strategy}, {name}", dataclasses.replace(base, **values)
    everything = functools.reduce(operator.or_, knobs.values())
    yield f"{strategy}, all of them", dataclasses.replace(base, **everything)


def knobs(me: Rank) -> list[Figure]:
    """Take steps with each setting of FSDP2, and on GPUs of FSDP1, which torch has for no CPU: seconds, and GB of this rank's GPU."""
    figures = []
    strategies: tuple[Name, ...] = ("fsdp2", "fsdp1") if me.on_gpu else ("fsdp2",)
    for strategy in strategies:
        for name, parallel in settings_of(strategy):
            figures += _measured(name, parallel, me)
    return figures


def _measured(name: str, parallel: Parallel, me: Rank) -> list[Figure]:
    if me.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _, timed = take_steps(MODEL, parallel, me, 1 + STEPS)
    found = [Figure(f"{name}: step", timed.whole_s, "s")]
    if not me.on_gpu:
        return found
    found.append(Figure(f"{name}: peak", torch.cuda.max_memory_allocated() / GB, "GB"))
    return found if parallel.by_fsdp1 else found + _planned(name, parallel, me)


def _planned(name: str, parallel: Parallel, me: Rank) -> list[Figure]:
    """What the plan says of it, if it knows the GPU; FSDP1 is not predicted."""
    of = torch.cuda.get_device_properties(me.device)
    gpu = gpu_like(of.name, of.total_memory, read_gpus())
    llama = weights.parse_llama(MODEL.config(me).to_dict() | {"architectures": None}, "the model")
    load = RunShape(
        llama,
        parallel.numerics,
        parallel.offload,
        me.world,
        MODEL.seq_len,
        MODEL.batch,
        MODEL.batch * me.world,
        wrap=parallel.wrap,
    )
    needs = Outlook.of(load, Cluster(gpu) if gpu else Cluster()).needs
    found = [Figure(f"{name}: planned peak", (needs.gpu_bytes - RUNTIME_BYTES) / GB, "GB")]
    return [*found, Figure(f"{name}: planned step", needs.step_s, "s")] if gpu and needs.step_s else found
