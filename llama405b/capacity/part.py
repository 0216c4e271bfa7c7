"""What one rank computes and keeps of a model: a stage of its layers, and of each matrix the part that ``tp`` leaves it. Pure."""

import dataclasses
import functools
import math
from collections.abc import Iterable

from llama405b.contract.adapters import factors
from llama405b.contract.mesh import SHARD, Axes
from llama405b.contract.schema import Adapter
from llama405b.contract.stages import stages_of
from llama405b.contract.weights import EMBEDDING, HEAD, Llama

WITHOUT = Adapter()
FINAL_NORM = "model.norm.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a rank computes without another one between: all its layers, or of an interleaved pipeline some of them."""

    llama: Llama  # its layers, and its share of heads, inner features and vocabulary
    embedding: bool = True  # whether it begins with that
    head: bool = True  # whether it ends with that, and its norm

    @property
    def names(self) -> list[str]:
        """Names of its parameters but for the layers'."""
        return [EMBEDDING] * self.embedding + [FINAL_NORM, *[HEAD] * (not self.llama.tied)] * self.head


def parts_of(llama: Llama, axes: Axes, stage: int, chunks: int = 1) -> tuple[Part, ...]:
    """Return what a rank of this place along ``pp`` computes, one after the other; ``chunks``: stages of each rank."""
    own = dataclasses.replace(
        llama,
        heads=llama.heads // axes.tp,
        kv_heads=llama.kv_heads // axes.tp,
        intermediate=llama.intermediate // axes.tp,
        vocab=llama.vocab // axes.tp,
    )
    if axes.pp == 1:
        return (Part(own),)
    layers = layers_of_stages(llama, axes.pp * chunks)
    return tuple(
        Part(dataclasses.replace(own, layers=layers[each]), each == 0, each == len(layers) - 1)
        for each in range(stage, len(layers), axes.pp)
    )


@functools.lru_cache(64)
def layers_of_stages(llama: Llama, n_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has."""
    return tuple(len(stage) for stage in stages_of(llama.tensors(), n_stages))


@dataclasses.dataclass(frozen=True, slots=True)
class UnitSizes:
    """Parameters by what FSDP gathers in one piece; numbers of elements."""

    attention: int
    mlp: int
    norms: int  # of a layer
    embedding: int
    head: int  # with the last norm; 0: the embedding is the head

    @classmethod
    def of(cls, part: Part, adapter: Adapter = WITHOUT) -> "UnitSizes":
        """Count those of a part, with its adapters."""
        layer = {name: math.prod(shape) for name, shape in layer_shapes(part.llama).items()}
        others = {name: math.prod(shape) for name, shape in other_shapes(part).items()}
        tied = part.llama.tied
        added = cls.of_adapter(part, adapter)
        return cls(
            attention=added.attention + sum(size for name, size in layer.items() if ".self_attn." in name),
            mlp=added.mlp + sum(size for name, size in layer.items() if ".mlp." in name),
            norms=sum(size for name, size in layer.items() if "layernorm" in name),
            embedding=sum(others.values()) if tied else others.pop(EMBEDDING, 0),
            head=0 if tied else sum(others.values()),
        )

    @classmethod
    def of_adapter(cls, part: Part, adapter: Adapter) -> "UnitSizes":
        """Count those of adapters alone."""
        layer = {name: math.prod(shape) for name, shape in adapter_shapes(part, adapter).items()}
        of = {
            block: sum(size for name, size in layer.items() if f".{block}." in name) for block in ("self_attn", "mlp")
        }
        return cls(attention=of["self_attn"], mlp=of["mlp"], norms=0, embedding=0, head=0)

    @classmethod
    def trained(cls, part: Part, adapter: Adapter) -> "UnitSizes":
        """Count those that take gradients."""
        return cls.of_adapter(part, adapter) if adapter.trains else cls.of(part)

    @property
    def layer(self) -> int:
        """Of a decoder layer."""
        return self.attention + self.mlp + self.norms


@functools.lru_cache(256)
def _shapes(llama: Llama) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes, of one layer alone."""
    return dataclasses.replace(llama, layers=1).tensors()


def layer_shapes(llama: Llama) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's parameters."""
    return {name: shape for name, shape in _shapes(llama).items() if name.startswith("model.layers.")}


def other_shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """Return those of all other parameters."""
    return {name: _shapes(part.llama)[name] for name in part.names}


def adapter_shapes(part: Part, adapter: Adapter) -> dict[str, tuple[int, int]]:
    """Return those of a layer's adapters."""
    return factors(dataclasses.replace(part.llama, layers=1), adapter)


def shard_elements(part: Part, shards: int) -> int:
    """Return how many elements a rank keeps of all parameters but adapters: FSDP2 shards the first dimension, and pads it."""
    return _sharded(other_shapes(part).values(), shards) + part.llama.layers * _sharded(
        layer_shapes(part.llama).values(), shards
    )


def trained_elements(part: Part, shards: int, adapter: Adapter) -> int:
    """Return how many it keeps of those that take gradients."""
    if not adapter.trains:
        return shard_elements(part, shards)
    return part.llama.layers * _sharded(adapter_shapes(part, adapter).values(), shards)


def _sharded(shapes: Iterable[tuple[int, ...]], shards: int) -> int:
    return sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes)


def norm_elements(part: Part, shards: int) -> int:
    """Return how many elements a rank keeps of all norms."""
    of_layer = sum(math.ceil(size / shards) for name, (size, *_) in layer_shapes(part.llama).items() if "norm" in name)
    return part.llama.layers * of_layer + part.head * math.ceil(part.llama.hidden / shards)


def held_elements(llama: Llama, axes: Axes, rank: int, chunks: int = 1) -> int:
    """Return how many elements a rank keeps of all parameters on any mesh, with the rows that FSDP2 pads; ``chunks``: see ``parts_of``."""
    parts = parts_of(llama, axes, axes.place(rank, ("pp",)).rank, chunks)
    return sum(shard_elements(part, axes.size(SHARD)) for part in parts)
