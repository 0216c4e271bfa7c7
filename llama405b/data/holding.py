"""Which documents are held out of training, and the tokens of those that are left, one after another. Knows tokens' marks alone.

Shape suffixes: N tokens, documents or stretches.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from llama405b.data.spans import bounds_of

ENOUGH = 4  # documents to evaluate on, if there are as many that are short enough: one alone may be unlike all others


@dataclasses.dataclass(frozen=True, slots=True)
class Excerpt:
    """Stretches of a token file, one after another."""

    begins_N: NDArray[np.int64]  # of each stretch, in the file
    ends_N: NDArray[np.int64]  # of each stretch, among the tokens of all

    @classmethod
    def of(cls, documents_N2: NDArray[np.int64]) -> "Excerpt":
        """Take documents, by begin and end; those that follow each other are one stretch."""
        begins_N, ends_N = documents_N2.T
        apart_N = begins_N[1:] != ends_N[:-1]
        first_N, last_N = np.append(True, apart_N), np.append(apart_N, True)
        return cls(begins_N[first_N], np.cumsum(ends_N[last_N] - begins_N[first_N]))

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return int(self.ends_N[-1])

    def ranges(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return where in the file these tokens are, in their order."""
        found, number = list[tuple[int, int]](), int(np.searchsorted(self.ends_N, begin, "right"))
        while begin < end and number < len(self.ends_N):
            before = int(self.ends_N[number - 1]) if number else 0
            stop = min(end, int(self.ends_N[number]))
            start = int(self.begins_N[number]) - before
            found.append((start + begin, start + stop))
            begin, number = stop, number + 1
        return found


def divided(
    tokens_N: NDArray[np.uint32], n_held: int, draw: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide documents into those that are kept and those held out, (N, 2): begin and end of each.

    Those held out have about ``n_held`` tokens, and are short and long as the others are: of documents in the order of their sizes,
    every so many-th. Only those come into question that are short enough for ``ENOUGH`` of them, or else for one; where there are
    too few of these, the end of the longest document is held out instead.
    """
    bounds_N = bounds_of(tokens_N)
    documents_N2 = np.stack([bounds_N[:-1], bounds_N[1:]], axis=1)
    sizes_N = np.diff(bounds_N)
    for most in (n_held // ENOUGH, n_held):
        some_N = draw.permutation(np.flatnonzero(sizes_N <= most))
        some_N = some_N[sizes_N[some_N].argsort(kind="stable")]
        share = min(1.0, n_held / max(1, sizes_N[some_N].sum()))
        turns_N = np.floor(np.arange(len(some_N) + 1) * share + draw.random())
        held_N = some_N[np.diff(turns_N) > 0]
        while len(held_N) > 1 and 2 * sizes_N[held_N].sum() > 3 * n_held:
            held_N = held_N[:-1]
        held_N = np.sort(held_N)
        if 2 * abs(sizes_N[held_N].sum() - n_held) <= n_held:
            return np.delete(documents_N2, held_N, axis=0), documents_N2[held_N]
    longest = int(sizes_N.argmax())
    end = int(bounds_N[longest + 1])
    cut = end - min(n_held, int(sizes_N[longest]) // 2)
    documents_N2[longest, 1] = cut
    return documents_N2, np.array([[cut, end]])
