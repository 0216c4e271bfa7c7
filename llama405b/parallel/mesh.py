"""The named axes as torch's device mesh. Axes of one rank have no group: each would cost every rank a communicator."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llama405b.axes import Axes


def device_mesh(axes: Axes, device_type: str) -> DeviceMesh:
    """The mesh over which parameters are sharded; ``device_type``: torch's default takes any GPU there is.

    Raises:
        NotImplementedError: Another axis than ``dp_shard`` has more than one rank.
    """
    if axes.world != axes.dp_shard:
        raise NotImplementedError(f"only dp_shard is built so far; {axes} asks for more")
    return dist.init_device_mesh(device_type, (axes.dp_shard,), mesh_dim_names=("dp_shard",))
