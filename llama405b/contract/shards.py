"""What each rank holds of each tensor: a box, one range of indices per dimension. Pure.

All that reads, sends, packs or checks weights by rank asks this. Of a matrix that tensor parallelism splits, a rank has one block
of rows or columns; of that, and of all else, FSDP gives it a block of rows. Of a pipeline, a rank has the tensors of its stages.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from llama405b.contract.mesh import SHARD, Axes
from llama405b.contract.stages import stage_of, stages_of

Range = tuple[int, int]  # [start, stop)
Box = tuple[Range, ...]  # by dimension
# Which dimension of a module's weight tensor parallelism splits (arXiv 1909.08053, section 3): its outputs, or its inputs.
OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
INPUTS = ("o_proj", "down_proj")


def tp_dimension(name: str) -> int | None:
    """Return the dimension of a tensor that tensor parallelism splits; None: each of its ranks has all of it."""
    module, _, kind = name.rpartition(".")
    module, _, factor = module.partition(".lora_")  # an adapter's A has the inputs of its matrix, and its B the outputs
    last = module.rpartition(".")[2]
    if last in OUTPUTS:
        return 0 if factor != "A" else None
    return 1 if last in INPUTS and kind == "weight" and factor != "B" else None


def chunk(size: int, rank: int, n_ranks: int) -> Range:
    """Return a rank's indices: torch.chunk's split, which DTensor's Shard uses."""
    each = -(-size // n_ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What the ranks of a mesh hold of a model."""

    axes: Axes
    stages: tuple[tuple[int, ...], ...] = ((),)  # the layers of each pipeline stage; one stage has all
    names: tuple[str, ...] = ()  # of a pipeline's parameters, in the order of use

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], axes: Axes, chunks: int = 1) -> "Holdings":
        """Return those of a model with these parameters; ``chunks``: stages of each rank of a pipeline."""
        return cls(axes, stages_of(shapes, axes.pp * chunks), tuple(shapes)) if axes.pp > 1 else cls(axes)

    def has(self, name: str, rank: int) -> bool:
        """Return whether a tensor is in one of a rank's stages."""
        if self.axes.pp == 1:
            return True
        return stage_of(name, self.stages) % self.axes.pp == self.axes.place(rank, ("pp",)).rank

    def box(self, name: str, shape: Sequence[int], rank: int) -> Box:
        """Return what a rank holds of a tensor; of another stage's, nothing."""
        box = list(whole_box(shape))
        if not box:
            return ()
        tp, shard = self.axes.place(rank, ("tp",)), self.axes.place(rank, SHARD)
        dimension = tp_dimension(name)
        if dimension is not None:
            box[dimension] = chunk(shape[dimension], tp.rank, tp.size)
        first, last = box[0]
        start, stop = chunk(last - first, shard.rank, shard.size)
        box[0] = (first + start, first + stop) if self.has(name, rank) else (0, 0)
        return tuple(box)


def whole_box(shape: Sequence[int]) -> Box:
    """Return that of a whole tensor."""
    return tuple((0, size) for size in shape)


def elements(box: Box) -> int:
    """Return how many a box has."""
    return math.prod(stop - start for start, stop in box)


def contains(box: Box, other: Box) -> bool:
    """Return whether all elements of another one are in a box."""
    return not elements(other) or all(a <= c and d <= b for (a, b), (c, d) in zip(box, other, strict=True))


def within(box: Box, other: Box) -> Box:
    """Return where another box, which it contains, is in a box that begins at 0."""
    return tuple((c - a, d - a) for (a, _), (c, d) in zip(box, other, strict=True))


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Return as few boxes as neighbors make; there is one at least, which may be empty."""
    given = list(boxes)
    found = sorted({box for box in given if elements(box)}) or given[:1]
    for dimension in reversed(range(len(found[0]))):
        joined: list[Box] = []

        def others(box: Box, at: int = dimension) -> Box:
            return (*box[:at], *box[at + 1 :])

        for _, group in itertools.groupby(sorted(found, key=lambda box: (others(box), box[dimension])), others):
            for box in group:
                last = joined[-1] if joined else None
                if last and others(last) == others(box) and last[dimension][1] == box[dimension][0]:
                    both = (last[dimension][0], box[dimension][1])
                    joined[-1] = (*last[:dimension], both, *last[dimension + 1 :])
                else:
                    joined.append(box)
        found = sorted(joined)
    return found


def runs(shape: Sequence[int], box: Box) -> list[tuple[int, int]]:
    """Return the elements of a box as runs of neighbors in the whole tensor: where each begins, and how long it is, in order."""
    if not elements(box):
        return []
    inner = len(shape)  # dimensions from here on are whole
    while inner and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    sizes = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    if not inner:
        return [(0, math.prod(shape))]
    start, stop = box[inner - 1]
    length = (stop - start) * sizes[inner - 1]
    outer = itertools.product(*(range(*box[dimension]) for dimension in range(inner - 1)))
    return [
        (sum(at * sizes[dimension] for dimension, at in enumerate(place)) + start * sizes[inner - 1], length)
        for place in outer
    ]
