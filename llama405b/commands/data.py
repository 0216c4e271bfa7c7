"""``llama405b data show | tokenize``: show what a run would train on; tokenize texts once."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llama405b import extend
from llama405b.contract.errors import UserError, counted
from llama405b.data.batches import (
    Batches,
    batches_of,
    describe_held_out,
    describe_reading,
    read_skips,
    warnings_of_ends,
    without,
)
from llama405b.data.chat_template import UnusableError, dated
from llama405b.data.demo_model import make_demo
from llama405b.data.documents import Documents, FilePart, file_parts, with_forms
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT, Encoder
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import Report, encoded, tokenised, tokenize
from llama405b.formats.conversation import Chat
from llama405b.formats.corpus import is_splittable, is_tokenized
from llama405b.settings.config import DEMO_MODEL
from llama405b.settings.schema import Config, Data
from llama405b.spec import models

SAMPLE_BYTES = 1 << 30
PROVED = 1000  # records to search for a conversation
CACHE = Path("runs/.cache")  # token cache of runs started in this directory
GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
COLORED, BARE = (
    (GREEN, PLAIN, DIM, PLAIN),
    ("⟦", "⟧", "", ""),
)  # around tokens that are trained on, and around the others
BEGINS = "━" * 40


def main(args: argparse.Namespace, config: Config) -> int:
    """Run the verb with a run's settings; return the exit code."""
    extend.use(config.training.extend)
    model = Path(config.model.path)
    if model == Path(DEMO_MODEL) and not model.exists():
        print(f"making the demo's model and tokenizer in {model}")
        make_demo(model)
    models.check_directory(model)
    with _small_files(config) as place:
        if args.what == "tokenize":
            _say_if_too_long(model, config.data.seq_len)
            _tokenize(config.data, place, args.out, args.workers)
        else:
            models.check_seq_len(models.read_llama(model), config.data.seq_len)
            _show(config, place, args.sequences)
    return 0


@contextlib.contextmanager
def _small_files(config: Config) -> Iterator[Path]:
    """Yield a temporary directory with the model's files except weights, as a run would have them."""
    with tempfile.TemporaryDirectory(prefix="llama405b-data-") as place:
        resize = config.model.resize_vocabulary
        for name, content in models.small_contents(
            Path(config.model.path), config.data.chat_template, resize=resize
        ).items():
            (Path(place) / name).write_bytes(content)
        try:
            yield Path(place)
        except UserError as error:
            raise UserError(str(error).replace(place, config.model.path)) from None


class Corpus(NamedTuple):
    """The size of a run's data, for the plan."""

    tokens: int  # of all steps, with padding
    epochs: float
    share: float  # fraction of the bytes that were counted; the rest is assumed to be alike


def count(config: Config) -> Corpus:
    """Count the tokens of a run with the model's tokenizer.

    Beyond ``SAMPLE_BYTES`` only the first texts are counted.

    Raises:
        UserError: The data or the tokenizer is missing here or cannot be used.
    """
    model, data, training = Path(config.model.path), config.data, config.training
    models.check_directory(model)
    report = Report(lambda *_: None, lambda: None, lambda line: print(line, file=sys.stderr))
    n_read, n_bytes, files = 0, 0, []
    with _small_files(config) as place:
        tokenizer = read_tokenizer(place)
        for part in data.by_source:
            if is_tokenized(part.paths):
                files.append(tokenised(part, place, CACHE, report))
                continue
            whole = file_parts(part.paths)
            some = list(_first(whole, SAMPLE_BYTES // len(data.by_source)))
            n_read, n_bytes = n_read + sum(each.size for each in some), n_bytes + sum(each.size for each in whole)
            files.append(encoded(some, dated(part, tokenizer), tokenizer, CACHE, report))
    n_bytes = min(n_bytes, data.max_bytes or n_bytes)
    share = min(1.0, n_read / n_bytes) if n_bytes else 1.0
    n_sequences = batches_of(data, CACHE, files).n_sequences / share * (1 - config.evaluation.fraction)
    steps = training.max_steps or max(1, int(training.epochs * n_sequences // training.global_batch_size))
    n_sequences_read = steps * training.global_batch_size
    return Corpus(n_sequences_read * data.seq_len, n_sequences_read / n_sequences, share)


def _first(parts: Iterable[FilePart], n_bytes: int) -> Iterator[FilePart]:
    """Yield the first files up to about ``n_bytes``.

    Of a large file with one record per line only its first lines.
    """
    for part in parts:
        if n_bytes <= 0:
            return
        splits = part.size > n_bytes and is_splittable(part.file)
        yield FilePart(part.file, 0, n_bytes) if splits else part
        n_bytes -= part.size


def _say_if_too_long(model: Path, seq_len: int) -> None:
    """Print a warning if a run would refuse this sequence length; tokens do not depend on it."""
    if not (model / "config.json").is_file():
        return
    llama = models.read_llama(model)
    try:
        models.check_seq_len(llama, seq_len)
    except UserError as error:
        print(f"{error} for a run; the tokens do not depend on it")


def _tokenize(config: Data, tokenizer: Path, out: Path, workers: int) -> None:
    began = time.monotonic()

    def told(done: int, total: int, n_tokens: int) -> None:
        rate = done / (time.monotonic() - began)
        left_s = (total - done) / rate if rate else 0.0
        print(
            f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB: {n_tokens:,} tokens, {rate / 1e6:.1f} MB/s, {left_s:,.0f} s left",
            flush=True,
        )

    made = tokenize(config, tokenizer, out, workers, told)
    print(made.counts)
    print(
        f"{out}: {made.n_tokens:,} tokens; train on them with --data.paths {out} and the same model and data settings"
    )


def _show(config: Config, tokenizer_dir: Path, n_sequences: int) -> None:
    report = Report(lambda *_: None, lambda: None, print)
    files = [tokenised(part, tokenizer_dir, CACHE, report) for part in config.data.by_source]
    batches = batches_of(config.data, CACHE, files)
    if config.data.skip:
        batches = dataclasses.replace(batches, mixture=without(batches.mixture, read_skips(Path(config.data.skip))))
    evaluation = config.evaluation
    said = warnings_of_ends(config.data, batches, tokenizer_dir)
    if evaluation.evaluates and not evaluation.paths:
        batches, held_out = batches.hold_out(evaluation.fraction)
        said += describe_held_out(config.data, held_out)
    said += filter(None, (_proof(part, tokenizer_dir) for part in config.data.by_source))
    marks = COLORED if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else BARE
    decode = read_tokenizer(tokenizer_dir).decode
    steps = config.training.max_steps or batches.steps(config.training.epochs, config.training.global_batch_size or 1)
    tokens = steps * config.training.global_batch_size * config.data.seq_len
    told = f"{tokens:,} tokens with padding; plan --tokens {tokens} prints hours and cost"
    if tokens:  # 0 if the batch size depends on the number of ranks
        said.append(f"the run: {counted(steps, 'step', grouped=True)}, {told}")
    for line in (*said, *describe_reading(config.data, batches), *_shown(batches, n_sequences, decode, marks)):
        print(line)


def _proof(config: Data, tokenizer_dir: Path) -> str:
    """Return a sentence on whether a conversation's answers follow exactly the tokens of inference.

    Checks the first conversation of these texts; '' if there is none.
    """
    if is_tokenized(config.paths):
        return ""
    tokenizer = read_tokenizer(tokenizer_dir)
    parts, chat = list(with_forms(file_parts(config.paths))), config.prompts == "chat"
    texts = Documents(parts, config.max_bytes, skip=True, names=config.fields, chat=chat)
    encoder = Encoder(tokenizer, dated(config, tokenizer), texts, lambda *_: None)
    for found in itertools.islice(texts, PROVED):
        with contextlib.suppress(UnusableError):  # already counted
            if isinstance(found.document, Chat):
                exact, n = encoder.proof(found, found.document)
                follows = (
                    f"{counted(n, 'answer')} of {found.place} {'follows' if exact == 1 else 'follow'} the exact tokens"
                )
                return f"chat template: {exact} of {follows} that apply_chat_template(add_generation_prompt=True) gives a model"
    return ""


def _shown(
    batches: Batches, n_sequences: int, decode: Callable[[NDArray[np.uint32]], str], marks: tuple[str, str, str, str]
) -> Iterator[str]:
    for number in range(min(n_sequences, batches.n_sequences)):
        window_N = batches.mixture.window(number)[: batches.mixture.filled(number)]
        targets = int((batches.read([number]).targets_BS >= 0).sum())
        documents = np.split(window_N, np.flatnonzero(window_N & FIRST))
        documents = [each for each in documents if len(each)]
        what = f"{counted(len(documents), 'document')}, {len(window_N):,} tokens, {counted(targets, 'target', grouped=True)}"
        yield f"sequence {number + 1} of {batches.n_sequences:,}: {what}"
        for document_N in documents:
            yield BEGINS if document_N[0] & FIRST else f"{BEGINS} (continued from another sequence)"
            yield "".join(_parts(document_N, decode, marks))
        yield ""


def _parts(
    document_N: NDArray[np.uint32], decode: Callable[[NDArray[np.uint32]], str], marks: tuple[str, str, str, str]
) -> Iterator[str]:
    """Yield the text in runs of trained and untrained tokens, with marks; control characters become dots."""
    for learnt, group in itertools.groupby(document_N, lambda token: not token & NOT_LEARNT):
        text = decode(np.array(list(group)) & ~MARKS)
        before, after = marks[:2] if learnt else marks[2:]
        yield before + "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text) + after
