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


def whole_spans(tokens_N: NDArray[np.uint32], seq_len: int, *, truncate: bool) -> NDArray[np.int64]:
    """Return first token and end of each sequence, (N, 2): as many documents one after another as fit whole into it.

    One that is longer than a sequence goes on in the next ones, unless it is truncated.
    """
    parts = [np.flatnonzero(tokens_N[i : i + CHUNK] & FIRST) + i for i in range(0, len(tokens_N), CHUNK)]
    bounds = [*np.concatenate(parts).tolist(), len(tokens_N)]
    spans, begin = list[tuple[int, int]](), 0
    while begin < len(tokens_N):
        last = bounds[bisect.bisect_right(bounds, begin + seq_len) - 1]  # the last end of a document that fits
        end = last if last > begin else begin + seq_len
        spans.append((begin, end))
        begin = bounds[bisect.bisect_right(bounds, begin)] if truncate and last <= begin else end
    return np.array(spans, dtype=np.int64).reshape(-1, 2)
