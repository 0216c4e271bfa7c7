"""``llama405b data show SETTINGS``: what a training run would learn, without a GPU and without weights.

SETTINGS are those of `llama405b train`: --config my.toml, --data.paths …. The first sequences of training are printed as the model
will read them; what is learnt is green (without color: between ⟦ and ⟧), the rest is only read, and ━ begins a document.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from llama405b.contract import command, weights
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted
from llama405b.data.batches import Batches, batches_of, described
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT
from llama405b.data.tokens import Report, tokenised

CACHE = Path("runs/.cache")  # of runs that are started in this directory
GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
COLORED, BARE = (GREEN, PLAIN, DIM, PLAIN), ("⟦", "⟧", "", "")  # before and after what is learnt, and the rest
BEGINS = "━" * 40


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    parser = OneLineParser(
        prog="llama405b data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("show",), help="show: print sequences, and what is learnt of them")
    parser.add_argument("--sequences", type=int, default=2, metavar="N", help="how many to print [2]")
    args, settings = parser.parse_known_args(argv)
    config = command.parse(settings).config
    if args.sequences < 0:
        raise UserError(f"--sequences: {args.sequences} is negative; use 0 or more")
    with tempfile.TemporaryDirectory(prefix="llama405b-data-") as place:
        for name, path in weights.small_files(Path(config.model.path), config.data.chat_template).items():
            shutil.copy(path, Path(place) / name)
        report = Report(lambda *_: None, lambda: None, print)
        batches = batches_of(
            config.data, CACHE, [tokenised(part, Path(place), CACHE, report) for part in config.data.by_source]
        )
        tokenizer = AutoTokenizer.from_pretrained(place)
    marks = COLORED if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else BARE
    for line in (*described(config.data, batches), *_shown(batches, args.sequences, tokenizer.decode, marks)):
        print(line)
    return 0


def _shown(
    batches: Batches, n_sequences: int, decode: Callable[[NDArray[np.uint32]], str], marks: tuple[str, str, str, str]
) -> Iterator[str]:
    for number in range(min(n_sequences, batches.n_sequences)):
        window_N = batches.mixture.window(number)[: batches.mixture.filled(number)]
        targets = int((batches.read([number]).targets_BS >= 0).sum())
        documents = np.split(window_N, np.flatnonzero(window_N & FIRST))
        documents = [each for each in documents if len(each)]
        what = f"{counted(len(documents), 'document')}, {len(window_N):,} tokens, {targets:,} targets"
        yield f"sequence {number + 1} of {batches.n_sequences:,}: {what}"
        for document_N in documents:
            yield BEGINS if document_N[0] & FIRST else f"{BEGINS} (which began in another sequence)"
            yield "".join(_parts(document_N, decode, marks))
        yield ""


def _parts(
    document_N: NDArray[np.uint32], decode: Callable[[NDArray[np.uint32]], str], marks: tuple[str, str, str, str]
) -> Iterator[str]:
    """The text of what is learnt and of what is not, in turns; control characters are dots."""
    for learnt, group in itertools.groupby(document_N, lambda token: not token & NOT_LEARNT):
        text = decode(np.array(list(group)) & ~MARKS)
        before, after = marks[:2] if learnt else marks[2:]
        yield before + "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text) + after
