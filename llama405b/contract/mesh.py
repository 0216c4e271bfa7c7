"""The ranks as a mesh with named axes: arithmetic only. Knows sizes and places; nothing of torch or groups.

Axes from the outermost to the innermost: ``pp`` pipeline stages, ``dp_replicate`` copies of the model, ``dp_shard`` shards of each copy,
``cp`` parts of a sequence, ``tp`` parts of each matrix. Innermost neighbors have adjacent ranks, and so share a host.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted, last_of
from llama405b.contract.strategies import STRATEGIES

if TYPE_CHECKING:  # every agent on a host imports this
    from llama405b.contract.schema import Parallel

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DP = ("dp_replicate", "dp_shard")  # split the batch
SHARD = ("dp_shard", "cp")  # split each parameter


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is along one or more axes."""

    rank: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Axes:
    """Number of ranks along each axis."""

    dp_shard: int
    pp: int = 1
    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, parallel: "Parallel", world: int, ranks_per_host: int) -> "Axes":
        """Return the mesh that settings make of so many ranks: what the other axes leave is ``dp_shard``.

        Raises:
            UserError: They cannot be divided so; names what would work.
        """
        inner = parallel.pp * parallel.cp * parallel.tp
        copies = STRATEGIES[parallel.strategy].copies
        hosts = max(1, world // ranks_per_host)
        replicas = parallel.dp_replicate or {"one": 1, "hosts": hosts, "ranks": max(1, world // inner)}[copies]
        if world % (inner * replicas):
            axes = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp, "dp_replicate": replicas}
            sizes = {name: size for name, size in axes.items() if size > 1}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            name = last_of(list(sizes))
            raise UserError(
                f"--parallel.{name}: {counted(world, 'rank')} cannot be divided by {product}; "
                f"use {_nearest(world, inner * replicas // sizes[name], sizes[name], name)}"
            )
        if copies == "ranks" and replicas * inner != world:
            raise UserError(
                f"--parallel.dp_replicate: ddp has a copy of the model on each of {counted(world // inner, 'rank')}, not {replicas}; "
                "leave it out, or use hsdp"
            )
        return cls(world // (inner * replicas), parallel.pp, replicas, parallel.cp, parallel.tp)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in NAMES}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp_shard 1"

    def where(self, rank: int) -> str:
        """Say where a rank is along the axes that have several: ``pp 1, dp 2, tp 5``."""
        places = {"pp": self.place(rank, ("pp",)), "dp": self.place(rank, DP)}
        places |= {name: self.place(rank, (name,)) for name in ("cp", "tp")}
        return ", ".join(f"{name} {place.rank}" for name, place in places.items() if place.size > 1)

    @property
    def told(self) -> str:
        """The axes; '' if there is nothing to tell, as every rank has a shard of one copy."""
        return str(self) if self.dp_shard != self.world else ""

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.size(NAMES)

    def size(self, names: Sequence[str]) -> int:
        """Return the number of ranks along these axes together."""
        return math.prod(getattr(self, name) for name in names)

    def place(self, rank: int, names: Sequence[str]) -> Place:
        """Return a rank's place along these axes together, the first of them outermost."""
        found, rest = 0, rank
        indices = {}
        for name in reversed(NAMES):
            rest, indices[name] = divmod(rest, getattr(self, name))
        for name in names:
            found = found * getattr(self, name) + indices[name]
        return Place(found, self.size(names))


def _nearest(world: int, others: int, size: int, name: str) -> str:
    """Say which size of an axis would work, beside what the other axes take."""
    if world % others:
        return "sizes whose product divides the number of ranks"
    return f"{name} {nearest_divisor(world // others, size)}"


def nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of a size that is nearest to what is wanted."""
    return min((each for each in range(1, size + 1) if size % each == 0), key=lambda each: abs(each - wanted))
