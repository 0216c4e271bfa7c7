"""Decode the sequences that a run trains on, with what is trained on marked, for ``data show``, a run's log and its report.

Knows tokens and their order; not ranks. Shape suffixes: N tokens.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from llama405b.contract.errors import pluralize, printable_name
from llama405b.contract.records import DocumentPreview, SequencePreview, TextPart
from llama405b.data.batches import Batches
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED
from llama405b.data.sources import document_names_at

N_SHOWN = 3  # sequences of a run that are shown at its start
MAX_DOCUMENTS = 4  # shown of a sequence
FIRST_PARTS, LAST_PARTS, MAX_PART_CHARS = 4, 2, 400  # of a document; the middle of what is longer is left out
Decode = Callable[[NDArray[np.uint32]], str]


class Marks(NamedTuple):
    """What is written around text that is trained on, and around the rest."""

    trained: tuple[str, str]
    context: tuple[str, str]

    @classmethod
    def for_stream(cls, stream: TextIO) -> "Marks":
        """Return colors for a terminal, unless NO_COLOR is set, else brackets."""
        return COLOR_MARKS if stream.isatty() and not os.environ.get("NO_COLOR") else BRACKETS


COLOR_MARKS = Marks(("\x1b[32m", "\x1b[0m"), ("\x1b[2m", "\x1b[0m"))
BRACKETS = Marks(("⟦", "⟧"), ("", ""))


def preview_sequences(
    batches: Batches, indices: Iterable[int], decode: Decode, *, shorten: bool = True
) -> Iterator[SequencePreview]:
    """Yield the sequences at these indices of the order. ``shorten``: only the beginning and end of what is long."""
    limit = MAX_DOCUMENTS if shorten else None
    for index in indices:
        names = [*map(printable_name, document_names_at(batches.mixture, [index]))]
        if shorten and len(names) > MAX_DOCUMENTS:
            names[MAX_DOCUMENTS:] = ["…"]
        window_N, n_tokens = batches.mixture.window(index), batches.mixture.n_filled(index)
        tokens_N = window_N[:n_tokens]
        documents = [part_N for part_N in np.split(tokens_N, np.flatnonzero(tokens_N & DOCUMENT_START)) if len(part_N)]
        yield SequencePreview(
            index=index,
            n_tokens=n_tokens,
            n_targets=int((batches.make_batch(window_N[None]).targets_BS >= 0).sum()),
            n_documents=len(documents),
            names=tuple(names),
            documents=tuple(
                DocumentPreview(
                    is_continued=not document_N[0] & DOCUMENT_START,
                    parts=tuple(_decode_parts(document_N, decode, shorten=shorten)),
                )
                for document_N in documents[:limit]
            ),
        )


def _decode_parts(document_N: NDArray[np.uint32], decode: Decode, *, shorten: bool) -> Iterator[TextPart]:
    """Yield the text in parts that are trained on or not; control characters become dots."""
    parts = [(t, [*group]) for t, group in itertools.groupby(document_N, lambda token: not token & NOT_TRAINED)]
    n_left_out = len(parts) - FIRST_PARTS - LAST_PARTS if shorten else 0
    for number, (is_trained, tokens) in enumerate(parts):
        if number == FIRST_PARTS and n_left_out > 0:
            yield TextPart(f" [… {n_left_out:,} parts …] ", is_trained=False)
        if not FIRST_PARTS <= number < FIRST_PARTS + n_left_out:
            text = decode(np.array(tokens) & ~MARKS)
            text = _without_middle(text) if shorten else text
            yield TextPart("".join(c if c.isprintable() or c in "\n\t" else "·" for c in text), bool(is_trained))


def _without_middle(text: str) -> str:
    n_left_out, half = len(text) - MAX_PART_CHARS, MAX_PART_CHARS // 2
    return f"{text[:half]} [… {n_left_out:,} characters …] {text[-half:]}" if n_left_out > 0 else text


def format_preview(preview: SequencePreview, n_sequences: int, marks: Marks = BRACKETS) -> Iterator[str]:
    """Yield a sequence's lines: its numbers, then its documents. ``n_sequences``: of an epoch."""
    yield f"sequence {preview.index + 1} of {n_sequences:,}: {preview.summary}"
    for document in preview.documents:
        yield f"{SEPARATOR} (continued from another sequence)" if document.is_continued else SEPARATOR
        marked = ((marks.trained if part.is_trained else marks.context, part.text) for part in document.parts)
        yield from "".join(f"{before}{text}{after}" for (before, after), text in marked).split("\n")
    if n_more := preview.n_documents - len(preview.documents):
        yield f"{SEPARATOR} (and {pluralize(n_more, 'more document', 'more documents')})"


SEPARATOR = "━" * 40
