import itertools

import pytest
import torch

from llama405b.distributed.ranks import Rank
from llama405b.settings.axes import AXIS_NAMES, DP_AXES, SHARD_AXES, Axes, Coordinate


def test_each_place_is_taken_once_and_the_innermost_axis_has_neighbours():
    axes = Axes(dp_shard=3, pp=2, dp_replicate=2, cp=2, tp=4)
    assert axes.world_size == 96
    places = [tuple(axes.coordinate(rank, (name,)).rank for name in AXIS_NAMES) for rank in range(axes.world_size)]
    assert places == list(itertools.product(range(2), range(2), range(3), range(2), range(4)))
    assert [axes.coordinate(rank, ("tp",)).rank for rank in range(8)] == [0, 1, 2, 3] * 2


def test_a_rank_is_told_by_its_place_on_each_axis():
    axes = Axes(dp_shard=3, pp=2, tp=4)
    assert [axes.describe_rank(rank) for rank in (0, 21)] == ["pp 0, dp 0, tp 0", "pp 1, dp 2, tp 1"]
    assert (Axes(8).describe_rank(5), Axes(1).describe_rank(0)) == ("dp 5", "")


def test_the_batch_goes_over_copies_and_shards():
    axes = Axes(dp_shard=3, dp_replicate=2, tp=2)
    assert [axes.coordinate(rank, DP_AXES) for rank in (0, 1, 2, 11)] == [
        Coordinate(0, 6),
        Coordinate(0, 6),
        Coordinate(1, 6),
        Coordinate(5, 6),
    ]
    assert axes.coordinate(11, SHARD_AXES) == Coordinate(2, 3)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (5, 8)])
def test_today_all_ranks_are_shards(rank, world):
    me = Rank(rank, world, 0, "h", torch.device("cpu"))
    assert me.axes.world_size == world
    assert me.dp == me.shard == Coordinate(rank, world)
