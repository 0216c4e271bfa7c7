"""What a rank shows while it cannot speak: the unit that it computes, and on a signal the stacks of its threads.

It is a file in memory, open in the rank as long as that lives, and readable by its user through ``/proc/PID/fd``: a disk may be
what hangs. A ``Place`` stands at its beginning; whatever faulthandler writes follows.
Whoever has no such file open does not catch the signal, which would end it.
"""

import dataclasses
import struct

SIGNAL = 39  # a real-time signal: Python, torch, CUDA and NCCL use none
NAME = "llama405b-rank"
UNIT_BYTES = 64
PLACE = struct.Struct(f"<q{UNIT_BYTES}s")
PLACE_BYTES = PLACE.size


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in the training a rank is."""

    step: int = 0  # under way, or the last one
    unit: str = ""  # of FSDP, and which way: ``layers.71 backward``; "": in none


def read_place(raw: bytes) -> Place:
    """Read the beginning of a rank's memory; ``Place()`` if it is cut short."""
    if len(raw) < PLACE_BYTES:
        return Place()
    step, unit = PLACE.unpack(raw[:PLACE_BYTES])
    return Place(step, unit.rstrip(b"\0").decode("utf-8", "replace"))
