"""Where sequences begin and end in a stream of documents. Knows tokens' marks alone.

Shape suffixes: N tokens, sequences or documents.
"""

import bisect

import numpy as np
from numpy.typing import NDArray

from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT

CHUNK = 64 << 20  # tokens looked at at a time


def has_prompts(tokens_N: NDArray[np.uint32]) -> bool:
    """Whether any token but the first of a document, which nothing foretells, is only read."""
    return any(bool((tokens_N[i : i + CHUNK] & MARKS == NOT_LEARNT).any()) for i in range(0, len(tokens_N), CHUNK))


def bounds_of(tokens_N: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return where documents begin, and where the last one ends."""
    begins = [np.flatnonzero(tokens_N[i : i + CHUNK] & FIRST) + i for i in range(0, len(tokens_N), CHUNK)]
    return np.unique(np.concatenate([[0], *begins, [len(tokens_N)]]))


def filled_spans(n_tokens: int, seq_len: int) -> NDArray[np.int64]:
    """Return first token and end of each sequence, (N, 2): every ``seq_len`` tokens, and what is left."""
    begins_N = np.arange(0, n_tokens, seq_len)
    return np.stack([begins_N, np.minimum(begins_N + seq_len, n_tokens)], axis=1)


def whole_spans(bounds_N: NDArray[np.int64], seq_len: int, *, truncate: bool) -> NDArray[np.int64]:
    """Return first token and end of each sequence, (N, 2): as many documents one after another as fit whole into it.

    One that is longer than a sequence goes on in the next ones, unless it is truncated; ``bounds_N``: as ``bounds_of`` has it.
    """
    bounds = bounds_N.tolist()
    spans, begin = list[tuple[int, int]](), 0
    while begin < bounds[-1]:
        last = bounds[bisect.bisect_right(bounds, begin + seq_len) - 1]  # the last end of a document that fits
        end = last if last > begin else begin + seq_len
        spans.append((begin, end))
        begin = bounds[bisect.bisect_right(bounds, begin)] if truncate and last <= begin else end
    return np.array(spans, dtype=np.int64).reshape(-1, 2)
