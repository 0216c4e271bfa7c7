"""What the ranks of any mesh hold: each element of a copy of the model once."""

import itertools
import random

import pytest
import torch

from llama405b.settings.axes import Axes
from llama405b.spec.models import Llama
from llama405b.spec.tensors import (
    ShardLayout,
    contiguous_runs,
    count_elements,
    find_stage,
    full_slice,
    merge_slices,
    relative_slice,
    shard_range,
    slice_contains,
    split_layers,
)


def a_llama(random):
    heads = random.choice((4, 8))
    return Llama(
        layers=random.randint(1, 9), hidden=random.randint(5, 40), intermediate=8 * random.randint(1, 9), heads=heads, kv_heads=4,
        head_dim=random.choice((2, 4)), vocab=8 * random.randint(3, 20), tied=random.random() < 0.5, attention_bias=random.random() < 0.3,
        mlp_bias=random.random() < 0.3, max_positions=64,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_mesh_holds_each_element_once_in_each_copy(seed):
    given = random.Random(seed)
    axes = Axes(*(given.randint(1, 3) for _ in range(3)), cp=given.choice((1, 2)), tp=given.choice((1, 2, 4)))
    shapes, chunks = a_llama(given).tensors(), given.choice((1, 2))
    holdings = ShardLayout.from_shapes(shapes, axes, chunks)
    for name, shape in shapes.items():
        counts = torch.zeros(shape, dtype=torch.int32)
        for rank in range(axes.world_size):
            counts[tuple(slice(*each) for each in holdings.slice_of(name, shape, rank))] += 1
        splits = holdings.slice_of(name, shape, 0)
        copies = axes.dp_replicate * (
            axes.tp if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")) else 1
        )
        assert (counts == copies).all(), (axes, name, splits)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_that_are_neighbors_become_one_and_are_read_in_runs(seed):
    given = random.Random(seed)
    shape = given.randint(1, 12), given.randint(1, 9)
    rows, columns = given.randint(1, 4), given.randint(1, 3)
    grid = [
        (shard_range(shape[0], i, rows), shard_range(shape[1], j, columns))
        for i, j in itertools.product(range(rows), range(columns))
    ]
    assert merge_slices(given.sample(grid, len(grid))) == [full_slice(shape)]
    some = given.sample(grid, given.randint(1, len(grid)))
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    assert sum(map(count_elements, merge_slices(some))) == sum(map(count_elements, set(some)))
    for box in merge_slices(some):
        read = [whole.flatten()[begin : begin + length] for begin, length in contiguous_runs(shape, box)]
        assert torch.equal(
            torch.cat([torch.empty(0, dtype=torch.int64), *read]), whole[tuple(slice(*r) for r in box)].flatten()
        )
    for box in some:
        assert any(slice_contains(each, box) for each in merge_slices(some))


def test_a_box_within_another_begins_there():
    assert slice_contains(((2, 8), (0, 4)), ((3, 5), (1, 4)))
    assert not slice_contains(((2, 8), (0, 4)), ((1, 5), (1, 4)))
    assert relative_slice(((2, 8), (0, 4)), ((3, 5), (1, 4))) == ((1, 3), (1, 4))


def test_the_405b_shape_is_balanced_over_stages():
    llama = Llama(126, 16384, 53248, 128, 8, 128, 128256, False, False, False, 131072)
    stages = split_layers(llama.tensors(), 8)
    assert [len(layers) for layers in stages] == [15, 16, 16, 16, 16, 16, 16, 15]
    assert list(itertools.chain(*stages)) == list(range(126))
    assert find_stage("model.embed_tokens.weight", stages) == 0
    assert find_stage("model.layers.17.mlp.up_proj.weight", stages) == 1
    assert find_stage("lm_head.weight", stages) == find_stage("model.norm.weight", stages) == 7
