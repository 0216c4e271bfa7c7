"""The process groups of ranks that differ in one axis of the mesh alone."""

import torch.distributed as dist

from llama405b.contract.mesh import NAMES, Axes


def ranks_along(axes: Axes, axis: str) -> list[list[int]]:
    """Return the ranks of each group, in the order of their places along the axis."""
    others = [name for name in NAMES if name != axis]
    groups: dict[int, list[int]] = {}
    for rank in range(axes.world):
        groups.setdefault(axes.place(rank, others).rank, []).append(rank)
    return list(groups.values())


def group_along(axes: Axes, axis: str) -> dist.ProcessGroup:
    """Make the groups, on all ranks; returns this rank's."""
    own, _ = dist.new_subgroups_by_enumeration(ranks_along(axes, axis))
    assert own
    return own
