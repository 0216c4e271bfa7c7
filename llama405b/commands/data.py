"""``llama405b data show | tokenize``: show what a run would train on; tokenize texts once."""

import argparse
import contextlib
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from llama405b import extend
from llama405b.contract.errors import UserError, pluralize
from llama405b.data.batches import (
    batches_from_files,
    describe_epoch,
    describe_held_out,
    end_token_warnings,
    mask_skipped,
    read_skips,
)
from llama405b.data.chat_template import UnusableChatError, add_template_date
from llama405b.data.demo_model import make_demo
from llama405b.data.documents import Documents, FileRange, detect_formats, list_file_ranges
from llama405b.data.encode import Encoder
from llama405b.data.preview import Marks, format_preview, preview_sequences
from llama405b.data.tokenizer import read_tokenizer
from llama405b.data.tokens import ProgressReport, load_or_encode, load_or_tokenize, tokenize
from llama405b.formats.conversation import Chat
from llama405b.formats.corpus import is_splittable, is_tokenized
from llama405b.settings.config import DEMO_MODEL
from llama405b.settings.schema import Config, Data
from llama405b.spec import models

SAMPLE_BYTES = 1 << 30
MAX_CHECKED_RECORDS = 1000  # records to search for a conversation
CACHE = Path("runs/.cache")  # token cache of runs started in this directory


def main(args: argparse.Namespace, config: Config) -> int:
    """Run the verb with a run's settings; return the exit code."""
    extend.use(config.training.extend)
    model = Path(config.model.path)
    if model == Path(DEMO_MODEL) and not model.exists():
        print(f"making the demo's model and tokenizer in {model}")
        make_demo(model)
    models.check_directory(model)
    with _small_files_dir(config) as directory:
        if args.what == "tokenize":
            _warn_if_too_long(model, config.data.seq_len)
            _tokenize(config.data, directory, args.out, args.workers)
        else:
            models.check_seq_len(models.read_llama(model), config.data.seq_len)
            _show_sequences(config, directory, args.sequences)
    return 0


@contextlib.contextmanager
def _small_files_dir(config: Config) -> Iterator[Path]:
    """Yield a temporary directory with the model's files except weights, as a run would have them."""
    with tempfile.TemporaryDirectory(prefix="llama405b-data-") as directory:
        resize = config.model.resize_vocabulary
        for name, content in models.read_small_files(
            Path(config.model.path), config.data.chat_template, resize=resize
        ).items():
            (Path(directory) / name).write_bytes(content)
        try:
            yield Path(directory)
        except UserError as error:
            raise UserError(str(error).replace(directory, config.model.path)) from None


class CorpusSize(NamedTuple):
    """The size of a run's data, for the plan."""

    tokens: int  # of all steps, with padding
    epochs: float
    share: float  # fraction of the bytes that were counted; the rest is assumed to be alike


def count_tokens(config: Config) -> CorpusSize:
    """Count the tokens of a run with the model's tokenizer.

    Beyond ``SAMPLE_BYTES`` only the first texts are counted.

    Raises:
        UserError: The data or the tokenizer is missing here or cannot be used.
    """
    model, data, training = Path(config.model.path), config.data, config.training
    models.check_directory(model)
    report = ProgressReport(lambda *_: None, lambda: None, lambda line: print(line, file=sys.stderr))
    n_read, n_bytes, files = 0, 0, []
    with _small_files_dir(config) as directory:
        tokenizer = read_tokenizer(directory)
        for part in data.sources:
            if is_tokenized(part.paths):
                files.append(load_or_tokenize(part, directory, CACHE, report))
                continue
            all_parts = list_file_ranges(part.paths)
            sampled = list(_first_parts(all_parts, SAMPLE_BYTES // len(data.sources)))
            n_read, n_bytes = (
                n_read + sum(file_part.size for file_part in sampled),
                n_bytes + sum(file_part.size for file_part in all_parts),
            )
            files.append(load_or_encode(sampled, add_template_date(part, tokenizer), tokenizer, CACHE, report))
    n_bytes = min(n_bytes, data.max_bytes or n_bytes)
    share = min(1.0, n_read / n_bytes) if n_bytes else 1.0
    n_sequences = batches_from_files(data, CACHE, files).n_sequences / share * (1 - config.evaluation.fraction)
    steps = training.max_steps or max(1, int(training.epochs * n_sequences // training.global_batch_size))
    n_sequences_read = steps * training.global_batch_size
    return CorpusSize(n_sequences_read * data.seq_len, n_sequences_read / n_sequences, share)


def _first_parts(parts: Iterable[FileRange], n_bytes: int) -> Iterator[FileRange]:
    """Yield the first files up to about ``n_bytes``.

    Of a large file with one record per line only its first lines.
    """
    for part in parts:
        if n_bytes <= 0:
            return
        is_split = part.size > n_bytes and is_splittable(part.file)
        yield FileRange(part.file, 0, n_bytes) if is_split else part
        n_bytes -= part.size


def _warn_if_too_long(model: Path, seq_len: int) -> None:
    """Print a warning if a run would refuse this sequence length; tokens do not depend on it."""
    if not (model / "config.json").is_file():
        return
    llama = models.read_llama(model)
    try:
        models.check_seq_len(llama, seq_len)
    except UserError as error:
        print(f"{error} for a run; the tokens do not depend on it")


def _tokenize(config: Data, tokenizer: Path, out: Path, workers: int) -> None:
    start = time.monotonic()

    def on_progress(n_done: int, total: int, n_tokens: int) -> None:
        rate = n_done / (time.monotonic() - start)
        remaining_s = (total - n_done) / rate if rate else 0.0
        print(
            f"{n_done / 1e6:,.0f} of {total / 1e6:,.0f} MB: {n_tokens:,} tokens, {rate / 1e6:.1f} MB/s, {remaining_s:,.0f} s left",
            flush=True,
        )

    tokenized = tokenize(config, tokenizer, out, workers, on_progress)
    print(tokenized.counts)
    print(
        f"{out}: {tokenized.n_tokens:,} tokens; train on them with --data.paths {out} and the same model and data settings"
    )


def _show_sequences(config: Config, tokenizer_dir: Path, n_sequences: int) -> None:
    report = ProgressReport(lambda *_: None, lambda: None, print)
    files = [load_or_tokenize(part, tokenizer_dir, CACHE, report) for part in config.data.sources]
    batches = batches_from_files(config.data, CACHE, files)
    if config.data.skip:
        batches = dataclasses.replace(
            batches, mixture=mask_skipped(batches.mixture, read_skips(Path(config.data.skip)))
        )
    evaluation = config.evaluation
    lines = end_token_warnings(config.data, batches, tokenizer_dir)
    if evaluation.is_enabled and not evaluation.paths:
        batches, held_out = batches.hold_out(evaluation.fraction)
        lines += describe_held_out(config.data, held_out)
    lines += filter(None, (_check_chat_template(part, tokenizer_dir) for part in config.data.sources))
    indices, marks = range(min(n_sequences, batches.n_sequences)), Marks.for_stream(sys.stdout)
    previews = preview_sequences(batches, indices, read_tokenizer(tokenizer_dir).decode, shorten=False)
    steps = config.training.max_steps or batches.n_steps(config.training.epochs, config.training.global_batch_size or 1)
    tokens = steps * config.training.global_batch_size * config.data.seq_len
    cost_hint = f"{tokens:,} tokens with padding; plan --tokens {tokens} prints hours and cost"
    if tokens:  # 0 if the batch size depends on the number of ranks
        lines.append(f"the run: {pluralize(steps, 'step', thousands=True)}, {cost_hint}")
    for line in (
        *lines,
        *describe_epoch(config.data, batches),
        *(line for preview in previews for line in (*format_preview(preview, batches.n_sequences, marks), "")),
    ):
        print(line)


def _check_chat_template(config: Data, tokenizer_dir: Path) -> str:
    """Return a sentence on whether a conversation's answers follow exactly the tokens of inference.

    Checks the first conversation of these texts; '' if there is none.
    """
    if is_tokenized(config.paths):
        return ""
    tokenizer = read_tokenizer(tokenizer_dir)
    parts, chat = list(detect_formats(list_file_ranges(config.paths))), config.prompts == "chat"
    texts = Documents(parts, config.max_bytes, skip=True, names=config.fields, chat=chat)
    encoder = Encoder(tokenizer, add_template_date(config, tokenizer), texts, lambda *_: None)
    for record in itertools.islice(texts, MAX_CHECKED_RECORDS):
        with contextlib.suppress(UnusableChatError):  # already counted
            if isinstance(record.document, Chat):
                exact, n_answers = encoder.count_exact_answers(record, record.document)
                follows = f"{pluralize(n_answers, 'answer')} of {record.location} {'follows' if exact == 1 else 'follow'} the exact tokens"
                return f"chat template: {exact} of {follows} that apply_chat_template(add_generation_prompt=True) gives a model"
    return ""
