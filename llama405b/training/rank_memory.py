"""Write what a rank shows of itself (``contract.rank_memory``). Linux; elsewhere nothing is shown."""

import contextlib
import faulthandler
import fcntl
import mmap
import os
import sys

from llama405b.contract.rank_memory import NAME, PLACE, PLACE_BYTES, SIGNAL, UNIT_BYTES


class RankMemory:
    """The step and the unit that this rank is in; from its creation on a signal has faulthandler write all stacks behind them.

    faulthandler needs neither the interpreter's lock nor memory, so it also tells of a rank that holds the lock for ever,
    or that waits in a collective.
    """

    def __init__(self) -> None:
        self.place: mmap.mmap | bytearray = bytearray(PLACE_BYTES)
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # no memory, or no more open files allowed: a rank can train without
            file = os.memfd_create(NAME)
            os.ftruncate(file, PLACE_BYTES)
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that a reader may cut what it has read
            self.place = mmap.mmap(file, PLACE_BYTES)
            faulthandler.register(SIGNAL, file=file, all_threads=True)

    def step(self, step: int) -> None:
        """Show which step is under way, and that it is in no unit yet."""
        PLACE.pack_into(self.place, 0, step, NO_UNIT)

    def unit(self, label: bytes) -> None:
        """Show which unit is computed, by its ``unit_label``: one copy of 64 bytes."""
        self.place[-UNIT_BYTES:] = label


def unit_label(name: str, way: str) -> bytes:
    """Return how a unit is shown: its last part that fits."""
    return f"{name} {way}".encode()[-UNIT_BYTES:].ljust(UNIT_BYTES, b"\0")


NO_UNIT = bytes(UNIT_BYTES)
