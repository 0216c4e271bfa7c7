"""Weights and checkpoints on disks: how long they take, what they hold of a host's memory meanwhile, and whether a disk holds them.

Pure.
"""

import dataclasses
import math

from llama405b.capacity.part import Part, UnitSizes
from llama405b.contract.cadence import best_interval
from llama405b.contract.checkpoints import LEAST_KEPT
from llama405b.contract.units import size_words
from llama405b.contract.weights import Llama

BYTES = 2  # of a weight in the files: BF16
WAITS = 0.1  # of what writing takes, training waits for a save beside it: 0.013 to 0.096 in docs/measurements
LOW_SHARE, LOW_BYTES = 0.02, 1 << 30  # free, of all


@dataclasses.dataclass(frozen=True, slots=True)
class LoadingCost:
    """Before the first step."""

    rank0_s: float  # the first host reads and sends everything
    local_s: float  # every host reads its own part
    host_bytes: float  # of memory on the first host while it sends, beside the shards


@dataclasses.dataclass(frozen=True, slots=True)
class SavingCost:
    """A checkpoint; of each host."""

    n_bytes: float
    write_s: float  # beside training
    waits_s: float  # of which training waits
    wanted_bytes: float  # what copies would take: of what is not written when the next update comes, or of all
    staged_bytes: float  # of them, what they take; the update waits for what is neither written nor copied
    best_interval_s: float  # between saves that lose the least (``checkpoint.every = auto``)


def loading(llama: Llama, hosts: int, disk: float, nic: float) -> LoadingCost:
    """Predict it; ``disk``, ``nic``: bytes/s of a host. Two units are in memory at a time: one is read while the other is sent."""
    n_bytes, pieces = BYTES * llama.parameters, UnitSizes.of(Part(llama))
    slowest = min(disk, nic) if hosts > 1 else disk
    return LoadingCost(
        n_bytes / slowest, n_bytes / hosts / disk, 2 * BYTES * max(pieces.layer, pieces.embedding, pieces.head)
    )


def saving(
    n_bytes: float, disk: float, step_s: float | None, mtbf_s: float, room: float = math.inf, *, at_once: bool = False
) -> SavingCost:
    """Predict it; ``n_bytes``: a host's part; ``step_s``: of training; ``mtbf_s``: between failures of the run; ``room``: for copies.

    ``at_once``: the state is on GPUs, from where all is copied that there is room for.
    """
    write_s = n_bytes / disk
    unwritten = n_bytes * max(0.0, 1 - step_s / write_s) if step_s else 0.0
    wanted = n_bytes if at_once else unwritten
    waits_s = WAITS * write_s + max(0.0, unwritten - room) / disk
    interval_s = best_interval(max(1.0, waits_s), write_s, mtbf_s)
    return SavingCost(n_bytes, write_s, waits_s, wanted, min(wanted, room), interval_s)


def nearly_full(free_bytes: int, total_bytes: int) -> bool:
    """Whether a disk that a run writes to is about to fill."""
    return free_bytes < LOW_BYTES or free_bytes < LOW_SHARE * total_bytes


class NoRoomError(Exception):
    """A disk cannot hold the checkpoints of a run; says why and what to do, as a clause about the directory."""


def check_room(free_bytes: int, each_bytes: int, keep: int, there: int = 0, *, best: bool = False) -> None:
    """Check that a disk can hold ``keep`` checkpoints and one that is being written.

    ``each_bytes``: what one takes there, with the copy of another host's part; ``there``: how many it has already; ``best``: whether
    one of those that are kept is the best.
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
