"""Who writes what of a checkpoint, and whether the parts are the whole."""

import itertools
import random

import pytest

from llama405b.checkpoint.index import Chunk, FileKind, Held, Holdings, Index, SavedTensor, plan_index
from llama405b.contract import reader
from llama405b.contract.reader import MalformedError
from llama405b.settings.axes import Axes
from llama405b.spec.tensors import ShardLayout

SHAPES = {
    "model.embed_tokens.weight": (50, 12),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(3)
        for name, shape in {"self_attn.q_proj": (12, 12), "mlp.down_proj": (12, 20), "input_layernorm": (12,)}.items()
    },
    "lm_head.weight": (50, 12),
}


def held_by_ranks(axes, scale=1):
    """What each rank of a mesh has of a small model and of its moments, and of a step count, which all have."""
    shapes = {name: (shape[0] * scale, *shape[1:]) for name, shape in SHAPES.items()}
    layout = ShardLayout.from_shapes(shapes, axes)
    ranks = []
    for rank in range(axes.world_size):
        held = {}
        for name, shape in shapes.items():
            if layout.has_tensor(name, rank):
                box = layout.slice_of(name, shape, rank)
                held[f"model.{name}"] = held[f"optimizer.state.{name}.exp_avg"] = Held("F32", shape, (box,))
                held[f"optimizer.state.{name}.step"] = Held("F32", (), ((),))
        held[f"rng.{rank}.cpu"] = Held("U8", (7,), (((0, 7),),))
        ranks.append(held)
    return ranks


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 1},
        {"dp_shard": 4},
        {"dp_shard": 3, "tp": 2},
        {"dp_shard": 2, "dp_replicate": 4},
        {"dp_shard": 1, "dp_replicate": 5},
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 64},
    ],
    ids=str,
)
def test_each_element_is_written_by_one_of_those_that_have_it(axes):
    ranks = held_by_ranks(Axes(**axes))
    index = plan_index([Holdings.of(held) for held in ranks])
    assert reader.loads(Index, reader.dumps(index), "index.json") == index
    assert set(index.tensors) == set().union(*ranks)
    assert all(map(index.is_covered, index.tensors))
    written = [list(index.parts_of(rank)) for rank in range(len(ranks))]
    for held, parts in zip(ranks, written, strict=True):
        assert all(part.box in held[part.name].boxes for part in parts)
        keys = [part.key for part in parts]
        assert len(keys) == len(set(keys))
    sizes = [sum(part.n_bytes for part in parts if part.kind is FileKind.WEIGHTS) for parts in written]
    if axes.get("dp_replicate"):  # none writes for all
        assert max(sizes) < 2 * sum(sizes) / len(sizes)


def test_tensors_that_are_split_alike_share_a_layout():
    index = plan_index([Holdings.of(held) for held in held_by_ranks(Axes(dp_shard=64))])
    assert len(index.layouts) == 4 + 1 + 64  # by shape, of the step counts, of each rank's generator


def test_two_parts_of_a_rank_have_two_names():
    halves = Held("F32", (8,), (((0, 2),), ((6, 8),)))
    index = plan_index([Holdings.of({"a": halves}), Holdings.of({"a": Held("F32", (8,), (((2, 6),),))})])
    assert [(part.key, part.box) for part in index.parts_of(0)] == [
        ("a", ((0, 2),)),
        ("a#1", ((6, 8),)),
    ]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (Held("F32", (8,), (((5, 8),),)), "the ranks' parts of a are not the whole tensor"),
        (Held("F32", (8,), (((3, 8),),)), "the ranks' parts of a are not the whole tensor"),
        (Held("F32", (9,), (((4, 9),),)), "a is not alike on all ranks"),
        (Held("BF16", (8,), (((4, 8),),)), "a is not alike on all ranks"),
    ],
)
def test_what_no_ranks_have_together_is_not_planned(second, why):
    first = Held("F32", (8,), (((0, 4),),))
    with pytest.raises(ValueError, match=why):
        plan_index([Holdings.of({"a": first}), Holdings.of({"a": second})])


def _is_covered(shape, boxes):
    layout = tuple(Chunk(rank, box) for rank, box in enumerate(boxes))
    return Index((layout,), {"a": SavedTensor("F32", shape, 0)}).is_covered("a")


def test_parts_are_the_whole_if_each_element_is_in_one_of_them():
    """Against counting the elements, for random boxes: most are none, and some are."""
    chosen, n_whole = random.Random(0), 0
    for _ in range(4_000):
        shape = tuple(chosen.randint(0, 3) for _ in range(chosen.randint(0, 3)))
        boxes = [
            tuple(
                sorted((chosen.randint(0, size), chosen.randint(0, size + (chosen.random() < 0.05)))) for size in shape
            )
            for _ in range(chosen.randint(0, 3))
        ]
        boxes = [tuple((start, stop) for start, stop in box) for box in boxes]
        counts = {}
        for box in boxes:
            for element in itertools.product(*(range(*ends) for ends in box)):
                counts[element] = counts.get(element, 0) + 1
        inside = all(stop <= size for box in boxes for (_, stop), size in zip(box, shape, strict=True))
        whole = inside and counts == dict.fromkeys(itertools.product(*map(range, shape)), 1)
        if inside:
            assert _is_covered(shape, boxes) == whole, (shape, boxes)
        n_whole += whole
    assert 100 < n_whole < 3_900
    assert not _is_covered((4,), [((0, 2),), ((2, 5),)])
    assert not _is_covered((4,), [((0, 4), (0, 1))])


@pytest.mark.parametrize(
    "text",
    [
        '{"layouts":[[{"rank":-1,"box":[[0,4]]}]],"tensors":{}}',
        '{"layouts":[[{"rank":0,"box":[[3,1]]}]],"tensors":{}}',
        '{"layouts":[[{"rank":0,"box":[[-1,4]]}]],"tensors":{}}',
        '{"layouts":[],"tensors":{"a":{"dtype":"F32","shape":[4],"layout":0}}}',
        '{"layouts":[[]],"tensors":{"a":{"dtype":"F32","shape":[4],"layout":-1}}}',
        '{"layouts":[[]],"tensors":{"a":{"dtype":"Q4","shape":[4],"layout":0}}}',
        '{"layouts":[[]],"tensors":{"a":{"dtype":"F32","shape":[4.5],"layout":0}}}',
        '{"layouts":[[]]}',
        "[]",
    ],
)
def test_an_index_that_makes_no_sense_is_refused(text):
    with pytest.raises(MalformedError):
        reader.loads(Index, text, "index.json")
