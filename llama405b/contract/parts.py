"""A part of a checkpoint: of every tensor the rows that the ranks of one host own. Pure.

It lies in a directory of its own below the checkpoint's, ``ranks-0-7-of-64``, as safetensors files that any reader can
open; each says in its header's metadata which rows of which checkpoint it has.
"""

import dataclasses
import re

PART_NAME = re.compile(r"ranks-(\d{1,6})-(\d{1,6})-of-(\d{1,6})")
ROWS = "llama405b.rows"  # in a header's metadata: by tensor, its first row in the file and its number of rows in all
WHOLE = "llama405b.whole"  # in a header's metadata: the fingerprint of the checkpoint


def rows_of(n_rows: int, rank: int, world: int) -> tuple[int, int]:
    """Return the rows ``[start, stop)`` of a rank: torch.chunk's split, which DTensor's Shard(0) uses."""
    each = -(-n_rows // world)
    return min(rank * each, n_rows), min((rank + 1) * each, n_rows)


def is_for(name: str, rank: int, world: int) -> bool:
    """Return whether the part in a directory of this name is for a rank: one for another number of ranks may be of an older model."""
    found = PART_NAME.fullmatch(name)
    return found is not None and int(found[3]) == world and int(found[1]) <= rank <= int(found[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What the ranks from ``first`` to ``last`` of ``world`` own."""

    first: int
    last: int
    world: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"ranks-{self.first}-{self.last}-of-{self.world}"

    def rows(self, n_rows: int) -> tuple[int, int]:
        """Return its rows ``[start, stop)`` of a tensor with so many."""
        return rows_of(n_rows, self.first, self.world)[0], rows_of(n_rows, self.last, self.world)[1]
