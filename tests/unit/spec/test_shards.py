"""What the ranks of any mesh hold: each element of a copy of the model once."""

import itertools
import random

import pytest
import torch

from llama405b.settings.axes import Axes
from llama405b.spec.models import Llama
from llama405b.spec.tensors import (
    Holdings,
    chunk,
    contains,
    elements,
    merged,
    runs,
    stage_of,
    stages_of,
    whole_box,
    within,
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
    holdings = Holdings.of(shapes, axes, chunks)
    for name, shape in shapes.items():
        counts = torch.zeros(shape, dtype=torch.int32)
        for rank in range(axes.world):
            counts[tuple(slice(*each) for each in holdings.box(name, shape, rank))] += 1
        splits = holdings.box(name, shape, 0)
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
        (chunk(shape[0], i, rows), chunk(shape[1], j, columns))
        for i, j in itertools.product(range(rows), range(columns))
    ]
    assert merged(given.sample(grid, len(grid))) == [whole_box(shape)]
    some = given.sample(grid, given.randint(1, len(grid)))
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    assert sum(map(elements, merged(some))) == sum(map(elements, set(some)))
    for box in merged(some):
        read = [whole.flatten()[begin : begin + length] for begin, length in runs(shape, box)]
        assert torch.equal(
            torch.cat([torch.empty(0, dtype=torch.int64), *read]), whole[tuple(slice(*r) for r in box)].flatten()
        )
    for box in some:
        assert any(contains(each, box) for each in merged(some))


def test_a_box_within_another_begins_there():
    assert contains(((2, 8), (0, 4)), ((3, 5), (1, 4)))
    assert not contains(((2, 8), (0, 4)), ((1, 5), (1, 4)))
    assert within(((2, 8), (0, 4)), ((3, 5), (1, 4))) == ((1, 3), (1, 4))


def test_the_405b_shape_is_balanced_over_stages():
    llama = Llama(126, 16384, 53248, 128, 8, 128, 128256, False, False, False, 131072)
    stages = stages_of(llama.tensors(), 8)
    assert [len(layers) for layers in stages] == [15, 16, 16, 16, 16, 16, 16, 15]
    assert list(itertools.chain(*stages)) == list(range(126))
    assert stage_of("model.embed_tokens.weight", stages) == 0
    assert stage_of("model.layers.17.mlp.up_proj.weight", stages) == 1
    assert stage_of("lm_head.weight", stages) == stage_of("model.norm.weight", stages) == 7
