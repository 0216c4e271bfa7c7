"""What ``parallel.strategy`` auto and 3d stand for on some machines: the mesh, and the micro-batch that goes with it. Pure."""

import dataclasses

from llama405b.capacity.estimate import Cluster
from llama405b.capacity.outlook import Fit, Outlook
from llama405b.capacity.run_shape import RunShape
from llama405b.capacity.search import fastest_first
from llama405b.contract.config import on_ranks
from llama405b.contract.errors import UserError
from llama405b.contract.mesh import Axes
from llama405b.contract.phrases import counted
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
    """Return a configuration with its mesh in place of a strategy that leaves it to the plan; others as they are.

    auto: FSDP over all ranks if that fits, as no GPU has run more; else the fastest mesh that fits. 3d: the fastest with tp and pp.
    On CPUs, and on GPUs that are in no table, what is the fastest on H100s; where nothing fits, what a GPU holds least of.

    Raises:
        UserError: The model cannot be split so over these ranks.
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
    outlooks = [asked.of_load(each) for each in found]
    fits = [each for each in outlooks if each.fit >= Fit.RETRIES]
    best = fits[0] if fits else min(outlooks, key=lambda each: each.needs.gpu_bytes)
    parallel = dataclasses.replace(best.load.parallel(plain.parallel), numerics=plain.parallel.numerics)
    training = dataclasses.replace(plain.training, micro_batch_size=best.load.micro_batch)
    return dataclasses.replace(plain, parallel=parallel, training=training)
