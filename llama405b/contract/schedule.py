"""In which order a rank of a pipeline takes the forwards and backwards of its micro-batches. Pure.

gpipe: arXiv 1811.06965. 1f1b: arXiv 2006.09503. interleaved: arXiv 2104.04473, with two stages on each rank, and with a last group of
micro-batches that may be smaller than the others.
"""

import dataclasses
import functools
import itertools


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A forward, or a backward, of one micro-batch through one of a rank's stages."""

    backward: bool
    chunk: int
    micro: int


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """What waits for its backward while a rank computes another one."""

    chunk: int  # of the backward
    others: tuple[int, ...]  # micro-batches that wait, by chunk
    done: tuple[bool, ...]  # whether a chunk had a backward before, by chunk
    forward: bool = True  # whether a forward comes between it and the backward before

    def is_less(self, other: "InFlight") -> bool:
        """Whether something else needs more memory in any case: at least as much waits and is done."""
        mine, others = (*self.others, *self.done, self.forward), (*other.others, *other.done, other.forward)
        return self.chunk == other.chunk and mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


@functools.lru_cache(1024)
def in_flight(schedule: str, n_ranks: int, n_chunks: int, rank: int, n_micro: int) -> frozenset[InFlight]:
    """Return what occurs in a step, but for what is less than something else that does; see ``order_of``."""
    waiting, done = [0] * n_chunks, [False] * n_chunks
    found = set()
    forward = False
    for each in order_of(schedule, n_ranks, n_chunks, rank, n_micro):
        if each.backward:
            waiting[each.chunk] -= 1
            found.add(InFlight(each.chunk, tuple(waiting), tuple(done), forward))
            done[each.chunk] = True
        else:
            waiting[each.chunk] += 1
        forward = not each.backward
    return frozenset(each for each in found if not any(each.is_less(other) for other in found))


def order_of(schedule: str, n_ranks: int, n_chunks: int, rank: int, n_micro: int) -> list[Pass]:
    """Return what a rank does, one after the other.

    ``n_ranks``: of the pipeline; ``n_chunks``: stages on each; stage k is chunk k // n_ranks of rank k % n_ranks.
    """
    groups = [range(begin, min(begin + n_ranks, n_micro)) for begin in range(0, n_micro, n_ranks)]
    if n_chunks == 1:
        groups = [range(n_micro)]
    forwards = [Pass(False, chunk, micro) for group in groups for chunk in range(n_chunks) for micro in group]
    backwards = [Pass(True, chunk, micro) for group in groups for chunk in reversed(range(n_chunks)) for micro in group]
    ahead = _ahead(schedule, n_ranks, n_chunks, rank, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *itertools.chain(*pairs), *backwards[len(forwards) - ahead :]]


def _ahead(schedule: str, n_ranks: int, n_chunks: int, rank: int, n_forwards: int) -> int:
    """How many forwards a rank of a pipeline takes before the first pair of a forward and a backward."""
    if schedule == "gpipe":
        return n_forwards
    if n_chunks == 1:
        return min(n_forwards, n_ranks - rank - 1)
    return min(n_forwards, 2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks)
