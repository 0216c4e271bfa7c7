"""What is left to the plan, on some machines: the mesh of strategy auto and 3d with its micro-batch, and what is computed again. Pure."""

import dataclasses
from collections.abc import Sequence

from llama405b.capacity.changes import keeping_most
from llama405b.capacity.estimate import Cluster
from llama405b.capacity.outlook import Fit, Outlook, is_predicted
from llama405b.capacity.run_shape import RunShape
from llama405b.capacity.search import fastest_first
from llama405b.contract.config import on_ranks
from llama405b.contract.errors import UserError
from llama405b.contract.mesh import Axes
from llama405b.contract.phrases import counted
from llama405b.contract.recompute import FULL
from llama405b.contract.schema import Config
from llama405b.contract.weights import Llama


def chosen(
    config: Config,
    llama: Llama,
    world: int,
    ranks_per_host: int,
    cluster: Cluster | None = None,
    ram_bytes: float = 0.0,
) -> Config:
    """Return a configuration with what the plan chooses in place of what is left to it; others as they are.

    Activation checkpointing: what is the fastest that fits, of what is predicted; full on CPUs, and on GPUs that are in no table.

    Raises:
        UserError: The model cannot be split so over these ranks.
    """
    config = _with_mesh(config, llama, world, ranks_per_host, cluster, ram_bytes)
    if not config.model.chooses_recompute:
        return config
    found = FULL
    if cluster and not cluster.gpu.is_cpu and is_predicted(config):
        axes = Axes.of(config.parallel, world, ranks_per_host)
        load = RunShape.of(llama, on_ranks(config, axes), world, axes)
        outlook = Outlook.of(dataclasses.replace(load, ranks_per_host=ranks_per_host), cluster, ram_bytes)
        found = keeping_most(outlook).load.recompute
    return dataclasses.replace(config, model=dataclasses.replace(config.model, activation_checkpointing=str(found)))


def _with_mesh(
    config: Config,
    llama: Llama,
    world: int,
    ranks_per_host: int,
    cluster: Cluster | None,
    ram_bytes: float,
) -> Config:
    """Return it with its mesh.

    auto: FSDP over all ranks if that fits, as no GPU has run more; else the fastest mesh that fits. 3d: the fastest with tp and pp.
    On CPUs, and on GPUs that are in no table, what is the fastest on H100s; where nothing fits, what a GPU holds least of.
    """
    strategy = config.parallel.strategy
    if not config.parallel.of_strategy.chosen:
        return config
    plain = on_ranks(
        dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, strategy="fsdp2")), Axes(world)
    )
    known = (
        dataclasses.replace(plain.parallel, numerics="fp32-master")
        if plain.parallel.numerics == "fp32"
        else plain.parallel
    )
    load = RunShape.of(llama, dataclasses.replace(plain, parallel=known), world)
    asked = Outlook.of(dataclasses.replace(load, ranks_per_host=ranks_per_host), cluster or Cluster(), ram_bytes)
    if strategy == "auto" and asked.fit >= Fit.RETRIES:
        return plain
    tried = fastest_first(asked, (load.offload,))
    found = [each for each in tried if strategy == "auto" or min(each.tp, each.pp) > 1]
    if not found and strategy == "auto":
        return plain
    if not found:
        raise UserError(
            f"--parallel.strategy: {counted(world, 'rank')} of this model cannot be split by tp and pp, as 3d does; use auto, or fsdp2"
        )
    best = _first_that_fits(asked, found)
    parallel = dataclasses.replace(best.load.parallel(plain.parallel), numerics=plain.parallel.numerics)
    training = dataclasses.replace(plain.training, micro_batch_size=best.load.micro_batch)
    return dataclasses.replace(plain, parallel=parallel, training=training)


def _first_that_fits(asked: Outlook, loads: Sequence[RunShape]) -> Outlook:
    """Return the first of these that fits; of none, what a GPU holds least of. What one sequence is too much for is not tried with more."""
    least: dict[RunShape, Outlook] = {}
    for load in loads:
        one = dataclasses.replace(load, micro_batch=1)
        if one not in least:
            least[one] = asked.of_load(one)
        found = least[one] if load == one or least[one].fit < Fit.RETRIES else asked.of_load(load)
        if found.fit >= Fit.RETRIES:
            return found
    return min(least.values(), key=lambda each: each.needs.gpu_bytes)
