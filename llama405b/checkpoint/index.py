"""Describe which tensors a checkpoint holds, and which rank holds which part of each. Knows places; not files, groups or times.

Tensors that are split alike share a layout: 405B has a few, and one for each rank's random generators.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from llama405b.contract.checkpoints import WEIGHTS_PREFIX
from llama405b.spec.tensors import DTYPE_BYTES, TensorSlice, count_elements, full_slice, slice_contains

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}  # by their names in safetensors
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SMALL_BYTES = 64 << 10


class FileKind(enum.StrEnum):
    """What a file of a checkpoint holds, by the beginning of its name."""

    WEIGHTS = "weights-"
    OPTIMIZER = "optimizer-"
    SMALL = "small-"  # such as step counts, of which every rank needs all: the first that has one writes it


def kind_of(name: str, n_bytes: int) -> FileKind:
    """Return in which files a tensor is; ``n_bytes``: of the whole."""
    if name.startswith(WEIGHTS_PREFIX):
        return FileKind.WEIGHTS
    return FileKind.SMALL if n_bytes <= SMALL_BYTES else FileKind.OPTIMIZER


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, which one rank wrote as a tensor of its own."""

    rank: int
    box: TensorSlice  # of the whole tensor
    suffix: str = ""  # after the tensor's name, in the name that the part has in its file

    def __post_init__(self) -> None:
        """Refuse what is no part of a tensor."""
        if self.rank < 0 or any(not 0 <= start <= stop for start, stop in self.box):
            raise ValueError(f"{self.box} of rank {self.rank} is not a part of a tensor")


Chunks = tuple[Chunk, ...]


class Part(NamedTuple):
    """A part of a tensor that a rank writes."""

    name: str  # of the tensor
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: TensorSlice
    key: str  # its name in its file
    kind: FileKind  # of files, in one of which it is
    n_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]  # of the whole tensor
    layout: int  # the number of its layout

    @property
    def n_bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """All tensors of a checkpoint, by name, and how they are split."""

    layouts: tuple[Chunks, ...]
    tensors: Mapping[str, SavedTensor]

    def __post_init__(self) -> None:
        """Refuse tensors of types and layouts that do not exist, and parts of one name."""
        for layout in self.layouts:
            if len({(chunk.rank, chunk.suffix) for chunk in layout}) != len(layout):
                raise ValueError("a rank has two parts of one name")
        for name, saved in self.tensors.items():
            if saved.dtype not in DTYPES or not 0 <= saved.layout < len(self.layouts):
                raise ValueError(f"{name} is {saved.dtype} of layout {saved.layout}, which does not exist")

    def chunks(self, name: str) -> Chunks:
        """Return the parts of a tensor."""
        return self.layouts[self.tensors[name].layout]

    def is_covered(self, name: str) -> bool:
        """Whether the parts of a tensor hold each of its elements exactly once."""
        return _cover_exactly(self.tensors[name].shape, tuple(chunk.box for chunk in self.chunks(name)))

    def parts_of(self, rank: int) -> Iterator[Part]:
        """Yield the parts that a rank writes."""
        own = [[chunk for chunk in layout if chunk.rank == rank] for layout in self.layouts]
        for name, saved in self.tensors.items():
            for chunk in own[saved.layout]:
                n_bytes = count_elements(chunk.box) * DTYPE_BYTES[saved.dtype]
                yield Part(
                    name,
                    saved.dtype,
                    saved.shape,
                    chunk.box,
                    name + chunk.suffix,
                    kind_of(name, saved.n_bytes),
                    n_bytes,
                )


@functools.lru_cache(maxsize=256)  # a model's layers are alike
def _cover_exactly(shape: tuple[int, ...], boxes: tuple[TensorSlice, ...]) -> bool:
    """Whether boxes cover a tensor, and no two overlap: each cell of the grid of all their edges is in one box."""
    whole = full_slice(shape)
    if any(len(box) != len(shape) or not slice_contains(whole, box) for box in boxes):
        return False
    filled = [box for box in boxes if count_elements(box)]
    edges = [sorted({*whole[axis], *itertools.chain(*(box[axis] for box in filled))}) for axis in range(len(shape))]
    numbers = [{edge: number for number, edge in enumerate(axis)} for axis in edges]
    n_boxes = np.zeros([len(axis) - 1 for axis in edges], dtype=np.int32)
    for box in filled:
        n_boxes[tuple(slice(number[a], number[b]) for number, (a, b) in zip(numbers, box, strict=True))] += 1
    return bool((n_boxes == 1).all())


class Held(NamedTuple):
    """What a rank has of a tensor."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    boxes: tuple[TensorSlice, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What a rank has of all tensors; many are alike."""

    kinds: tuple[Held, ...]
    tensors: Mapping[str, int]  # by name: the number in ``kinds``

    @classmethod
    def of(cls, tensors: Mapping[str, Held]) -> "Holdings":
        """Return what a rank has, by tensor."""
        numbers: dict[Held, int] = {}
        return cls(
            tensors={name: numbers.setdefault(held, len(numbers)) for name, held in tensors.items()}, kinds=(*numbers,)
        )


def plan_index(ranks: Sequence[Holdings]) -> Index:
    """Return who writes what: each part is written once. Ranks that hold the same take turns, by bytes; the first writes small tensors.

    Raises:
        ValueError: A tensor has another shape or dtype on another rank, or parts of it are on no rank.
    """
    holders: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)  # rank, and number of the kind there
    for rank, holdings in enumerate(ranks):
        for name, number in holdings.tensors.items():
            holders[name].append((rank, number))
    plans: dict[tuple[tuple[int, int], ...], tuple[Held, list[Chunks]]] = {}
    loads: dict[int, list[int]] = {}  # of as many ranks that hold the same: the bytes that each writes
    numbers: dict[Chunks, int] = {}
    tensors: dict[str, SavedTensor] = {}
    for name, kinds in holders.items():
        if (key := tuple(kinds)) not in plans:
            plans[key] = _plan_tensor(name, {rank: ranks[rank].kinds[number] for rank, number in kinds})
        (dtype, shape, _), layouts = plans[key]
        load = loads.setdefault(len(layouts), [0] * len(layouts))
        n_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        turn = 0 if kind_of(name, n_bytes) is FileKind.SMALL else load.index(min(load))
        load[turn] += n_bytes
        tensors[name] = SavedTensor(dtype, shape, numbers.setdefault(layouts[turn], len(numbers)))
    return Index(tuple(numbers), tensors)


def _plan_tensor(name: str, held_by_rank: Mapping[int, Held]) -> tuple[Held, list[Chunks]]:
    """Return a tensor's kind, and the layouts in which the first, the second … of the ranks that hold a part writes it."""
    kind = next(iter(held_by_rank.values()))
    ranks_of: dict[TensorSlice, list[int]] = collections.defaultdict(list)
    for rank, held in held_by_rank.items():
        if held[:2] != kind[:2]:
            raise ValueError(f"{name} is not alike on all ranks")
        for box in held.boxes:
            if count_elements(box):
                ranks_of[box].append(rank)
    if not _cover_exactly(kind.shape, tuple(ranks_of)):
        raise ValueError(f"the ranks' parts of {name} are not the whole tensor")
    layouts = []
    for turn in range(max(map(len, ranks_of.values()), default=1)):
        n_chunks = collections.Counter[int]()
        chunks = []
        for box, ranks in ranks_of.items():
            rank = ranks[turn % len(ranks)]
            chunks.append(Chunk(rank, box, f"#{n_chunks[rank]}" if n_chunks[rank] else ""))
            n_chunks[rank] += 1
        layouts.append(tuple(chunks))
    return kind, layouts
