"""The ranks as a mesh with named axes: arithmetic only. Knows sizes and places; nothing of torch or groups.

Axes from the outermost to the innermost: ``pp`` pipeline stages, ``dp_replicate`` copies of the model, ``dp_shard`` shards of each copy,
``cp`` parts of a sequence, ``tp`` parts of each matrix. Innermost neighbors have adjacent ranks, and so share a host.
"""

import dataclasses
import math
from collections.abc import Sequence

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DP = ("dp_replicate", "dp_shard")  # split the batch
SHARD = ("dp_shard",)  # split each parameter


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
