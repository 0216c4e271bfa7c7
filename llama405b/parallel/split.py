"""Split a model over the mesh: its layers over ``pp``, matrices over ``tp``, sequences over ``cp``, and what is left over the shards."""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from llama405b.contract.schema import Parallel
from llama405b.contract.shards import Holdings
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.parallel.context import split_sequences
from llama405b.parallel.fsdp2 import check_wrap, device_mesh, shard
from llama405b.parallel.groups import group_along
from llama405b.parallel.stage import Stage
from llama405b.parallel.tensor import split_matrices


def split(
    model: PreTrainedModel, parallel: Parallel, me: Rank, before_shards: Callable[[nn.Module], None] = lambda _: None
) -> nn.Module:
    """Split a model that is on the meta device; returns what this rank computes with.

    ``before_shards``: changes that, once its matrices are split.

    Raises:
        UserError: ``parallel.wrap`` names a class that the model does not have, or units that share parameters.
    """
    check_wrap(model, parallel.wrap)
    mesh, axes = device_mesh(me.axes, me.device.type), me.axes
    own: nn.Module = model
    if axes.cp > 1:
        split_sequences(model, group_along(axes, "cp"))
    if axes.pp > 1:
        stages, place = holdings_of(model, parallel, me).stages, axes.place(me.rank, ("pp",))
        mine = stages[place.rank :: place.size]
        own = Stage(model, mine, first=place.rank == 0, last=place.rank == place.size - 1)
    if axes.tp > 1:
        split_matrices(own, mesh["tp"], parallel.loss)
    before_shards(own)
    shard(own, parallel, me.device, mesh)
    ranks.share_timeout()
    return own


def holdings_of(model: PreTrainedModel, parallel: Parallel, me: Rank) -> Holdings:
    """Return what all ranks hold of a model that is still whole."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Holdings.of(shapes, me.axes, parallel.chunks)
