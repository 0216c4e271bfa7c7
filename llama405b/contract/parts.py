"""A part of a checkpoint: of every tensor what the ranks of one host own. Pure.

It lies in a directory of its own below the checkpoint's, ``ranks-0-7-of-64``, as safetensors files that any reader can
open; each says in its header's metadata which pieces of which checkpoint it has.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from llama405b.contract.mesh import Axes
from llama405b.contract.shards import Box, Holdings, merged

PART_NAME = re.compile(r"ranks-(\d{1,6})-(\d{1,6})-of-(\d{1,6})")
# in a header's metadata: by entry, its tensor's name and shape, and which box of that it is
PIECES = "llama405b.pieces"
WHOLE = "llama405b.whole"  # in a header's metadata: the fingerprint of the checkpoint


def is_for(name: str, rank: int, world: int) -> bool:
    """Return whether the part in a directory of this name is for a rank: one for another number of ranks may be of an older model."""
    found = PART_NAME.fullmatch(name)
    return found is not None and int(found[3]) == world and int(found[1]) <= rank <= int(found[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What the ranks from ``first`` to ``last`` of a mesh own."""

    first: int
    last: int
    axes: Axes
    chunks: int = 1  # pipeline stages of each rank

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"ranks-{self.first}-{self.last}-of-{self.axes.world}"

    def boxes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Box]]:
        """Return what it has of each tensor of a model, in as few pieces as neighbors make; those of other stages are left out."""
        holdings, ranks = Holdings.of(shapes, self.axes, self.chunks), range(self.first, self.last + 1)
        return {
            name: merged(holdings.box(name, shape, rank) for rank in ranks)
            for name, shape in shapes.items()
            if any(holdings.has(name, rank) for rank in ranks)
        }
