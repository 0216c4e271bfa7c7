"""Weights and checkpoints on disks: how long they take, and what they hold of a host's memory meanwhile. Pure."""

import dataclasses
import math

from llama405b.capacity.memory import Pieces
from llama405b.contract.cadence import best_interval
from llama405b.contract.weights import Llama

BYTES = 2  # of a weight in the files: BF16
WAITS = 0.1  # of what writing takes, training waits for a save beside it: 0.013 to 0.096 in docs/measurements


@dataclasses.dataclass(frozen=True, slots=True)
class LoadingCost:
    """Before the first step."""

    rank0_s: float  # the first host reads and sends everything
    local_s: float  # every host reads its own rows
    host_bytes: float  # of memory on the first host while it sends, beside the shards


@dataclasses.dataclass(frozen=True, slots=True)
class SavingCost:
    """A checkpoint; of each host."""

    n_bytes: float
    write_s: float  # beside training
    waits_s: float  # of which training waits
    unwritten_bytes: float  # when the next update comes
    staged_bytes: float  # of them, what is copied into memory meanwhile; the update waits for the others
    best_interval_s: float  # between saves that lose the least (``checkpoint.every = auto``)


def loading(llama: Llama, hosts: int, disk: float, nic: float) -> LoadingCost:
    """Predict it; ``disk``, ``nic``: bytes/s of a host. Two units are in memory at a time: one is read while the other is sent."""
    n_bytes, pieces = BYTES * llama.parameters, Pieces.of(llama)
    slowest = min(disk, nic) if hosts > 1 else disk
    return LoadingCost(
        n_bytes / slowest, n_bytes / hosts / disk, 2 * BYTES * max(pieces.layer, pieces.embedding, pieces.head)
    )


def saving(n_bytes: float, disk: float, step_s: float | None, mtbf_s: float, room: float = math.inf) -> SavingCost:
    """Predict it; ``n_bytes``: a host's part; ``step_s``: of training; ``mtbf_s``: between failures of the run; ``room``: for copies."""
    write_s = n_bytes / disk
    unwritten = n_bytes * max(0.0, 1 - step_s / write_s) if step_s else 0.0
    staged = min(unwritten, room)
    waits_s = WAITS * write_s + (unwritten - staged) / disk
    return SavingCost(n_bytes, write_s, waits_s, unwritten, staged, best_interval(max(1.0, waits_s), write_s, mtbf_s))
