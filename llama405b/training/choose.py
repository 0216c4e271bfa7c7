"""What is left to the plan, where no launch has chosen it: under Slurm, and with plain torchrun."""

import torch

from llama405b.capacity.choice import chosen
from llama405b.capacity.estimate import Cluster
from llama405b.capacity.hardware import gpu_like, read_gpus
from llama405b.capacity.known import known_shape
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank, ranks_per_host


def choose_for_ranks(config: Config, preset: str, me: Rank) -> Config:
    """Return the configuration with what the plan chooses for these ranks; rank 0, which has the model's files, does. All ranks call it.

    Raises:
        UserError: The model's shape is not known, or it cannot be split so.
        FollowedError: So it is on rank 0.
    """
    if not config.left_to_plan:
        return config
    per_host = ranks_per_host()
    with collectives.raise_on_all_ranks():
        if me.is_rank0:
            config = _chosen(config, preset, me, per_host)
    return collectives.broadcast_object(config)


def _chosen(config: Config, preset: str, me: Rank, per_host: int) -> Config:
    llama = known_shape(config, preset)
    if llama is None:
        raise UserError(
            f"{config.left_to_plan}: it needs the model's shape, and {config.model.path} has no config.json; download it first, add "
            "--preset, or write another value"
        )
    gpu = None
    if me.on_gpu:
        of = torch.cuda.get_device_properties(me.device)
        gpu = gpu_like(of.name, of.total_memory, read_gpus())
    return chosen(config, llama, me.world, per_host, Cluster(gpu) if gpu else None)
