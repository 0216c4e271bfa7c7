"""Whether a disk holds the checkpoints that a run keeps, and whether it is nearly full. Pure."""

from llama405b.contract.checkpoints import LEAST_KEPT
from llama405b.contract.units import size_words

LOW_SHARE, LOW_BYTES = 0.02, 1 << 30  # of all


def nearly_full(free_bytes: int, total_bytes: int) -> bool:
    """Whether a disk that a run writes to is about to fill."""
    return free_bytes < LOW_BYTES or free_bytes < LOW_SHARE * total_bytes


class NoRoomError(Exception):
    """A disk cannot hold the checkpoints of a run; says why and what to do, as a clause about the directory."""


def check_room(free_bytes: int, each_bytes: int, keep: int, there: int = 0, *, best: bool = False) -> None:
    """Check that a disk can hold ``keep`` checkpoints and one that is being written.

    ``each_bytes``: what one takes there, with the copy of another host's part; ``there``: how many it has already; ``best``: whether
    one of those that are kept is the best.

    Raises:
        NoRoomError: It cannot.
    """
    there = min(there, keep)
    if (keep + 1 - there) * each_bytes <= free_bytes:
        return
    fits = free_bytes // each_bytes + there - 1 - best
    remedy = "use another directory"
    if fits >= LEAST_KEPT:
        remedy = f"use --checkpoint.keep {fits}, or another directory"
    raise NoRoomError(
        f"has {size_words(free_bytes)} free, but a checkpoint takes {size_words(each_bytes)}, {keep} are kept, and one more "
        f"is being written; {remedy}"
    )
