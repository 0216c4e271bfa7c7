"""Write token files once, on rank 0 or by `llama405b data tokenize`, and share them between ranks.

Knows files, the tokenizer and ranks; not steps or batches. The token format is defined in ``encode``. A file's name has digests of
its texts and tokenizer, its length and its hash, so that a run detects a damaged file at its start and tokenizes again. A JSON file
next to it has the counts. `data tokenize` splits texts into jobs of ``PART_BYTES``, large JSON Lines into ranges. Each job writes a
token file, which a later call reuses; then they are merged, with a record of the rules that made them.

Shape suffixes: N tokens.
"""

import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from llama405b import extend
from llama405b.contract.errors import RunError, UserError, pluralize, reason_of
from llama405b.contract.files import read_record, write_json
from llama405b.contract.software import exit_with_process
from llama405b.data.chat_template import add_template_date
from llama405b.data.documents import Documents, FileRange, detect_formats, list_file_ranges
from llama405b.data.encode import Encoder, FileOffset, TokenCounts, begin_tokens
from llama405b.data.sources import read_offsets, write_offsets
from llama405b.data.tokenizer import read_tokenizer
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank
from llama405b.formats.corpus import TOKENIZED, TOKENS, is_splittable, is_tokenized
from llama405b.settings.schema import Data

TOKEN_BYTES = 4
CHUNK_TOKENS = 16 << 20  # broadcast at a time
LOG_INTERVAL_S = 30.0
DIGEST_DIGITS = 16  # of a SHA-256
RULES_VERSION = 8  # version of the tokenization rules; a new number invalidates every token file
OnProgress = Callable[[int, int], None]  # bytes done, bytes in all; 0, 0: waiting for rank 0
Say = Callable[[str], None]  # writes a log line


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizeRecord:
    """The record that `data tokenize` writes next to the tokens."""

    rules: str  # digest of the tokenization rules
    texts: str  # digest of the texts and rules
    n_tokens: int
    counts: TokenCounts
    digest: str = ""  # of the tokens; "": written by an earlier version
    template_date: str = ""  # given to the chat template; "": it uses no date


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file, which may not exist yet on this host."""

    name: str  # in the cache
    n_tokens: int
    digest: str = ""  # of its bytes; "": not known
    written_path: str = ""  # path where `data tokenize` wrote it, on hosts that can see it

    def path(self, cache: Path) -> Path:
        """Return its path on this host, where it is or will be."""
        return (
            Path(self.written_path)
            if self.written_path and self._is_complete(Path(self.written_path))
            else cache / self.name
        )

    def is_complete(self, cache: Path) -> bool:
        """Return whether this host has the file at its full size."""
        return self._is_complete(self.path(cache))

    def _is_complete(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self.n_tokens * TOKEN_BYTES

    def is_damaged(self, cache: Path, on_progress: Callable[[], None]) -> bool:
        """Return whether the hash of this host's complete file is wrong. Reads all of it and reports progress."""
        path, digest = self.path(cache), hashlib.sha256()
        if not self.digest:
            return False
        with path.open("rb") as file:
            while block := file.read(TOKEN_BYTES * CHUNK_TOKENS):
                digest.update(block)
                on_progress()
        if digest.hexdigest()[:DIGEST_DIGITS] == self.digest:
            return False
        if self.written_path:
            raise UserError(f"--data.paths: {path} is damaged; run `llama405b data tokenize` again")
        return True


def distribute_tokens(
    config: Data, tokenizer_dir: Path, cache: Path, rank: Rank, on_progress: OnProgress, say: Say
) -> TokenFile:
    """Tokenize on rank 0, or reuse its token file, and copy the file to the ``cache`` of every host."""
    tokens = TokenFile("", 0)
    with collectives.raise_on_all_ranks(), collectives.waiting_for_rank0(lambda: on_progress(0, 0)) as still_working:
        if rank.is_rank0:
            tokens = load_or_tokenize(config, tokenizer_dir, cache, ProgressReport(on_progress, still_working, say))
    tokens = collectives.broadcast_object(tokens)
    with collectives.raise_on_all_ranks():
        is_missing = not tokens.is_complete(cache)
        if rank.local_rank == 0 and not rank.is_rank0 and not is_missing:  # rank 0 has checked or written it
            is_missing = tokens.is_damaged(cache, lambda: on_progress(0, 0))
    if any(collectives.all_gather_objects(is_missing)):
        _broadcast_tokens(tokens, cache, rank, on_progress, is_writer=is_missing and rank.local_rank == 0)
    return tokens


@dataclasses.dataclass(slots=True)
class ProgressReport:
    """Report tokenizing progress: in rank 0's heartbeat, to waiting ranks, and periodically in the log."""

    on_progress: OnProgress
    still_working: Callable[[], None]
    say: Say
    logged_at: float = dataclasses.field(default_factory=time.monotonic)

    def __call__(self, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Report the bytes that were tokenized, of all bytes."""
        self.on_progress(done_bytes, total_bytes)
        self.still_working()
        if total_bytes and time.monotonic() - self.logged_at >= LOG_INTERVAL_S:
            self.logged_at = time.monotonic()
            self.say(
                f"tokenizing: {done_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB ({100 * done_bytes // total_bytes}%)"
            )


def load_or_tokenize(config: Data, tokenizer_dir: Path, cache: Path, report: ProgressReport) -> TokenFile:
    """Return the token file of these texts and this tokenizer; write it if it is missing or incomplete.

    Raises:
        UserError: A path matches nothing, or a file, all its records or the tokenizer cannot be used.
        RunError: The token file cannot be written.
    """
    tokenizer = read_tokenizer(tokenizer_dir, report.say)
    if is_tokenized(config.paths):
        return _load_tokenized(Path(config.paths[0]), config, tokenizer, report)
    config = add_template_date(config, tokenizer)
    tokens = load_or_encode(list_file_ranges(config.paths), config, tokenizer, cache, report)
    (read_record(TokenCounts, (cache / tokens.name).with_suffix(".json")) or TokenCounts()).check_usable(config)
    return tokens


def load_or_encode(
    parts: Sequence[FileRange], config: Data, tokenizer: PreTrainedTokenizerBase, cache: Path, report: ProgressReport
) -> TokenFile:
    """Return the token file of these file ranges; write it if it is missing or incomplete."""
    stem = token_file_stem(parts, config, tokenizer)
    for path in cache.glob(f"{stem}*-*.bin"):
        n_tokens, _, digest = path.stem.removeprefix(stem).partition("-")
        tokens = TokenFile(path.name, int(n_tokens), digest)
        if tokens.is_complete(cache) and tokens.is_damaged(cache, report):
            report.say(f"{path}: damaged; tokenizing again")
        elif tokens.is_complete(cache):
            if counts := read_record(TokenCounts, path.with_suffix(".json")):
                report.say(str(counts))
            return tokens
    formats = []
    for entry in detect_formats(parts):
        formats.append(entry)
        report()
    skip, chat = config.bad_records == "skip", config.prompts == "chat"
    documents = Documents(formats, config.max_bytes, skip=skip, names=config.fields, chat=chat)
    report.say(f"tokenizing {pluralize(len(parts), 'file')}, {documents.total_bytes / 1e6:,.1f} MB")
    encoder = Encoder(tokenizer, config, documents, report)
    tokens = _write_tokens(encoder, cache, stem)
    with contextlib.suppress(OSError):  # they are informative only
        write_json((cache / tokens.name).with_suffix(".json"), encoder.counts)
        write_offsets(cache / tokens.name, encoder.files)
    report.say(str(encoder.counts))
    return tokens


def rules_digest(config: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that determines the tokens: rules, tokenizer, template, trained roles."""
    rules = (
        RULES_VERSION,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        (tokenizer.special_tokens_map, tokenizer.eos_token_id, begin_tokens(tokenizer, config.bos)),
        config.train_on,
        config.bad_records,
        config.special_tokens,
        config.fields,
        config.max_bytes,
        config.turns,
        config.template_date,
        config.template_arguments,
        config.prompts,
        *([user_module.sha256] if (user_module := extend.current().declared).reads else []),
    )
    return hashlib.sha256(repr(rules).encode()).hexdigest()[:16]


def token_file_stem(parts: Sequence[FileRange], config: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prefix of the token file's name for these file ranges."""
    stats = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns, *((begin, end) if end else ()))
        for file, begin, end in parts
    ]
    key = (rules_digest(config, tokenizer), stats, config.max_bytes)
    return f"tokens-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}-"


def _load_tokenized(
    directory: Path, config: Data, tokenizer: PreTrainedTokenizerBase, report: ProgressReport
) -> TokenFile:
    """Return the token file of `data tokenize`, if its tokenizer and settings match; its template date stays."""
    record = read_record(TokenizeRecord, directory / TOKENIZED)
    tokens = TokenFile("", record.n_tokens, record.digest, str((directory / TOKENS).resolve())) if record else None
    if not (record and tokens and tokens.is_complete(directory)):
        raise UserError(f"--data.paths: {directory} is incomplete; run `llama405b data tokenize` again")
    if (config.template_date or record.template_date) != record.template_date:
        raise UserError(
            f"--data.template_date: {directory} was made with {record.template_date or 'no date'}; leave it out"
        )
    if record.rules != rules_digest(dataclasses.replace(config, template_date=record.template_date), tokenizer):
        raise UserError(
            f"--data.paths: {directory} was tokenized with another tokenizer, chat template, data.train_on, data.turns, "
            "data.template_arguments, data.fields, data.prompts, data.bos, data.special_tokens, data.bad_records or data.max_bytes; set "
            "them back, or run `llama405b data tokenize` again"
        )
    tokens.is_damaged(directory, report)
    report.say(str(record.counts))
    info = Path(tokens.written_path).stat()
    key = hashlib.sha256(repr((tokens.written_path, info.st_size, info.st_mtime_ns)).encode()).hexdigest()[:16]
    return dataclasses.replace(tokens, name=f"tokens-{key}-{record.n_tokens}-{record.digest}.bin")


def _write_tokens(token_blocks: Iterable[NDArray[np.uint32]], cache: Path, stem: str) -> TokenFile:
    """Write tokens to a new token file, which appears complete or not at all."""
    partial, n_tokens, digest = cache / f"{stem}{os.getpid()}.partial", 0, hashlib.sha256()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            for tokens_N in token_blocks:
                out.write(block := tokens_N.tobytes())
                digest.update(block)
                n_tokens += len(tokens_N)
            out.flush()
            # On disk before the rename: from then on the name says that the file is complete.
            os.fsync(out.fileno())
        digits = digest.hexdigest()[:DIGEST_DIGITS]
        tokens = TokenFile(f"{stem}{n_tokens}-{digits}.bin", n_tokens, digits)
        partial.replace(cache / tokens.name)
    except OSError as error:
        raise RunError(f"{cache}: the tokens cannot be written ({reason_of(error)}); free space there") from None
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created
            partial.unlink()
    return tokens


def _broadcast_tokens(tokens: TokenFile, cache: Path, rank: Rank, on_progress: OnProgress, *, is_writer: bool) -> None:
    """Broadcast rank 0's token file; one rank of each host without it writes it."""
    path, source = cache / tokens.name, tokens.path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{rank.host}.{os.getpid()}")
    if is_writer:
        partial.write_bytes(b"")  # a kill may have left one
    for begin in range(0, tokens.n_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, tokens.n_tokens - begin)
        chunk = torch.empty(size, dtype=torch.int32)
        if rank.is_rank0:
            chunk = torch.from_numpy(np.fromfile(source, np.int32, size, offset=TOKEN_BYTES * begin))
        # A collective: ranks that do not write take part, too.
        dist.broadcast(chunk, 0)
        if is_writer:
            with partial.open("ab") as out:
                out.write(chunk.numpy().tobytes())
        on_progress(TOKEN_BYTES * (begin + size), TOKEN_BYTES * tokens.n_tokens)
    with collectives.raise_on_all_ranks():
        if is_writer and partial.stat().st_size != TOKEN_BYTES * tokens.n_tokens:
            raise RunError(
                f"{partial}: its size differs from that of the tokens written to it; check the disk of {rank.host}"
            )
        if is_writer:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
    dist.barrier()


PART_BYTES = 64 << 20  # of text
PARTS_DIR = "parts"

OnTokens = Callable[[int, int, int], None]  # bytes done, bytes in all, tokens so far


def tokenize(config: Data, tokenizer_dir: Path, out: Path, workers: int, on_tokens: OnTokens) -> TokenizeRecord:
    """Tokenize all texts in parallel and write the tokens to a directory.

    Raises:
        UserError: A path matches nothing, a file, all its records or the tokenizer cannot be used, or the sources are to be mixed.
        RunError: The directory cannot be written, or a process died.
    """
    if config.weights:
        raise UserError(
            "data.weights: the training run mixes sources; tokenize each by itself with --data.paths and --out"
        )
    tokenizer, files = read_tokenizer(tokenizer_dir, print), list_file_ranges(config.paths)
    previous = read_record(TokenizeRecord, out / TOKENIZED)
    config = add_template_date(config, tokenizer, previous.template_date if previous else "")
    stem = token_file_stem(files, config, tokenizer)
    previous_tokens = (
        TokenFile(TOKENS, previous.n_tokens, previous.digest) if previous and previous.texts == stem else None
    )
    if (
        previous
        and previous_tokens
        and previous_tokens.is_complete(out)
        and not previous_tokens.is_damaged(out, lambda: None)
    ):
        return previous
    jobs = [files] if config.max_bytes else list(_split_jobs(files))
    token_files = _run_jobs(jobs, config, tokenizer_dir, out / PARTS_DIR, workers, on_tokens)
    try:
        return _merge_parts(jobs, token_files, out, stem, config, rules_digest(config, tokenizer))
    except OSError as error:
        raise RunError(f"{out}: the tokens cannot be written ({reason_of(error)}); free space there") from None


def _split_jobs(files: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Split files into jobs, in order; large JSON Lines files are split into ranges, one job each."""
    job, size, user_module = list[FileRange](), 0, extend.current().declared
    for file_range in files:
        is_split = (
            file_range.size > PART_BYTES
            and not user_module.reads_file(file_range.file)
            and is_splittable(file_range.file)
        )
        if job and (is_split or size >= PART_BYTES):
            yield job
            job, size = [], 0
        if is_split:
            for begin in range(0, file_range.size, PART_BYTES):
                yield [FileRange(file_range.file, begin, min(begin + PART_BYTES, file_range.size))]
            continue
        job.append(file_range)
        size += file_range.size
    if job:
        yield job


def _run_jobs(
    jobs: Sequence[Sequence[FileRange]],
    config: Data,
    tokenizer_dir: Path,
    cache: Path,
    workers: int,
    on_tokens: OnTokens,
) -> list[TokenFile]:
    sizes = [sum(part.size for part in job) for job in jobs]
    done_bytes, n_tokens = 0, 0
    token_files: dict[int, TokenFile] = {}
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        workers, server, initializer=_init_worker, initargs=(os.getpid(), extend.current().declared.module)
    ) as pool:
        futures = {pool.submit(_run_job, job, config, tokenizer_dir, cache): i for i, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                number = futures[future]
                token_files[number] = future.result()
                done_bytes, n_tokens = done_bytes + sizes[number], n_tokens + token_files[number].n_tokens
                on_tokens(done_bytes, sum(sizes), n_tokens)
        except BrokenProcessPool:
            raise RunError("a process that tokenizes died; check the host's memory, or use fewer --workers") from None
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [token_files[number] for number in range(len(jobs))]


def _init_worker(pid: int, module: str) -> None:
    extend.use(module)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool already uses all cores
    exit_with_process(pid)


def _run_job(job: Sequence[FileRange], config: Data, tokenizer_dir: Path, cache: Path) -> TokenFile:
    silent = ProgressReport(lambda *_: None, lambda: None, lambda _: None)
    return load_or_encode(job, config, _cached_tokenizer(tokenizer_dir), cache, silent)


@functools.cache
def _cached_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return read_tokenizer(directory)


def _merge_parts(
    jobs: Sequence[Sequence[FileRange]],
    token_files: Sequence[TokenFile],
    out: Path,
    stem: str,
    config: Data,
    rules: str,
) -> TokenizeRecord:
    counts = TokenCounts()
    files = list[FileOffset]()
    n_tokens = 0
    n_documents = 0
    digest = hashlib.sha256()
    # Remove the record first, so that an interrupted merge does not look complete.
    (out / TOKENIZED).unlink(missing_ok=True)
    with (out / f".{TOKENS}").open("wb") as out_file:
        for job, token_file in zip(jobs, token_files, strict=True):
            part = token_file.path(out / PARTS_DIR)
            with part.open("rb") as tokens:
                while block := tokens.read(16 << 20):
                    out_file.write(block)
                    digest.update(block)
            part_counts = read_record(TokenCounts, part.with_suffix(".json")) or TokenCounts()
            if not job[0].begin:
                n_documents = 0  # documents of the same file
            files += [
                offset._replace(token=n_tokens + offset.token, before=n_documents + offset.before)
                for offset in read_offsets(part)
            ]
            counts, n_documents = counts + part_counts, n_documents + part_counts.documents
            n_tokens += token_file.n_tokens
        counts.check_usable(config)
        out_file.flush()
        os.fsync(out_file.fileno())
    (out / f".{TOKENS}").rename(out / TOKENS)
    write_offsets(out / TOKENS, files)
    record = TokenizeRecord(rules, stem, n_tokens, counts, digest.hexdigest()[:DIGEST_DIGITS], config.template_date)
    write_json(out / TOKENIZED, record)
    shutil.rmtree(out / PARTS_DIR)
    return record
