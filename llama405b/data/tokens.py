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
from llama405b.contract.errors import RunError, UserError, counted, reason_of
from llama405b.contract.files import read_record, write_json
from llama405b.contract.software import end_with
from llama405b.data.chat_template import dated
from llama405b.data.documents import Documents, FilePart, file_parts, with_forms
from llama405b.data.encode import Counts, Encoder, FileOffset, begin_tokens
from llama405b.data.sources import read_offsets, write_offsets
from llama405b.data.tokenizer import read_tokenizer
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank
from llama405b.formats.corpus import TOKENIZED, TOKENS, is_splittable, is_tokenized
from llama405b.settings.schema import Data

TOKEN_BYTES = 4
CHUNK_TOKENS = 16 << 20  # broadcast at a time
SAY_EVERY_S = 30.0
DIGITS = 16  # of a SHA-256
RULES = 8  # version of the tokenization rules; a new number invalidates every token file
Progress = Callable[[int, int], None]  # bytes done, bytes in all; 0, 0: waiting for rank 0
Say = Callable[[str], None]  # writes a log line


@dataclasses.dataclass(frozen=True, slots=True)
class Tokenized:
    """The record that `data tokenize` writes next to the tokens."""

    rules: str  # digest of the tokenization rules
    texts: str  # digest of the texts and rules
    n_tokens: int
    counts: Counts
    digest: str = ""  # of the tokens; "": written by an earlier version
    template_date: str = ""  # given to the chat template; "": it uses no date


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file, which may not exist yet on this host."""

    name: str  # in the cache
    n_tokens: int
    digest: str = ""  # of its bytes; "": not known
    made: str = ""  # path where `data tokenize` wrote it, on hosts that can see it

    def path(self, cache: Path) -> Path:
        """Return its path on this host, where it is or will be."""
        return Path(self.made) if self.made and self._is_whole(Path(self.made)) else cache / self.name

    def is_whole(self, cache: Path) -> bool:
        """Return whether this host has the file at its full size."""
        return self._is_whole(self.path(cache))

    def _is_whole(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self.n_tokens * TOKEN_BYTES

    def is_damaged(self, cache: Path, told: Callable[[], None]) -> bool:
        """Return whether the hash of this host's complete file is wrong. Reads all of it and reports progress."""
        path, digest = self.path(cache), hashlib.sha256()
        if not self.digest:
            return False
        with path.open("rb") as file:
            while piece := file.read(TOKEN_BYTES * CHUNK_TOKENS):
                digest.update(piece)
                told()
        if digest.hexdigest()[:DIGITS] == self.digest:
            return False
        if self.made:
            raise UserError(f"--data.paths: {path} is damaged; run `llama405b data tokenize` again")
        return True


def bring_tokens(config: Data, tokenizer_dir: Path, cache: Path, me: Rank, progress: Progress, say: Say) -> TokenFile:
    """Tokenize on rank 0, or reuse its token file, and copy the file to the ``cache`` of every host."""
    tokens = TokenFile("", 0)
    with collectives.raise_on_all_ranks(), collectives.waiting_for_rank0(lambda: progress(0, 0)) as still_working:
        if me.is_rank0:
            tokens = tokenised(config, tokenizer_dir, cache, Report(progress, still_working, say))
    tokens = collectives.broadcast_object(tokens)
    with collectives.raise_on_all_ranks():
        lacks = not tokens.is_whole(cache)
        if me.local_rank == 0 and not me.is_rank0 and not lacks:  # rank 0 has checked or written it
            lacks = tokens.is_damaged(cache, lambda: progress(0, 0))
    if any(collectives.all_gather_objects(lacks)):
        _send(tokens, cache, me, progress, writes=lacks and me.local_rank == 0)
    return tokens


@dataclasses.dataclass(slots=True)
class Report:
    """Report tokenizing progress: in rank 0's heartbeat, to waiting ranks, and periodically in the log."""

    progress: Progress
    still_working: Callable[[], None]
    say: Say
    said: float = dataclasses.field(default_factory=time.monotonic)

    def __call__(self, done: int = 0, total: int = 0) -> None:
        """Report the bytes that were tokenized, of all bytes."""
        self.progress(done, total)
        self.still_working()
        if total and time.monotonic() - self.said >= SAY_EVERY_S:
            self.said = time.monotonic()
            self.say(f"tokenizing: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({100 * done // total}%)")


def tokenised(config: Data, tokenizer_dir: Path, cache: Path, report: Report) -> TokenFile:
    """Return the token file of these texts and this tokenizer; write it if it is missing or incomplete.

    Raises:
        UserError: A path matches nothing, or a file, all its records or the tokenizer cannot be used.
        RunError: The token file cannot be written.
    """
    tokenizer = read_tokenizer(tokenizer_dir, report.say)
    if is_tokenized(config.paths):
        return _made(Path(config.paths[0]), config, tokenizer, report)
    config = dated(config, tokenizer)
    tokens = encoded(file_parts(config.paths), config, tokenizer, cache, report)
    (read_record(Counts, (cache / tokens.name).with_suffix(".json")) or Counts()).refuse_useless(config)
    return tokens


def encoded(
    parts: Sequence[FilePart], config: Data, tokenizer: PreTrainedTokenizerBase, cache: Path, report: Report
) -> TokenFile:
    """Return the token file of these file ranges; write it if it is missing or incomplete."""
    stem = stem_of(parts, config, tokenizer)
    for found in cache.glob(f"{stem}*-*.bin"):
        n_tokens, _, digest = found.stem.removeprefix(stem).partition("-")
        tokens = TokenFile(found.name, int(n_tokens), digest)
        if tokens.is_whole(cache) and tokens.is_damaged(cache, report):
            report.say(f"{found}: damaged; tokenizing again")
        elif tokens.is_whole(cache):
            if counts := read_record(Counts, found.with_suffix(".json")):
                report.say(str(counts))
            return tokens
    forms = []
    for each in with_forms(parts):
        forms.append(each)
        report()
    skip, chat = config.bad_records == "skip", config.prompts == "chat"
    texts = Documents(forms, config.max_bytes, skip=skip, names=config.fields, chat=chat)
    report.say(f"tokenizing {counted(len(parts), 'file')}, {texts.total_bytes / 1e6:,.1f} MB")
    encoder = Encoder(tokenizer, config, texts, report)
    tokens = _written(encoder, cache, stem)
    with contextlib.suppress(OSError):  # they are informative only
        write_json((cache / tokens.name).with_suffix(".json"), encoder.counts)
        write_offsets(cache / tokens.name, encoder.files)
    report.say(str(encoder.counts))
    return tokens


def rules_of(config: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that determines the tokens: rules, tokenizer, template, trained roles."""
    how = (
        RULES,
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
        *([own.sha256] if (own := extend.current().declared).reads else []),
    )
    return hashlib.sha256(repr(how).encode()).hexdigest()[:16]


def stem_of(parts: Sequence[FilePart], config: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prefix of the token file's name for these file ranges."""
    stats = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns, *((begin, end) if end else ()))
        for file, begin, end in parts
    ]
    what = (rules_of(config, tokenizer), stats, config.max_bytes)
    return f"tokens-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}-"


def _made(directory: Path, config: Data, tokenizer: PreTrainedTokenizerBase, report: Report) -> TokenFile:
    """Return the token file of `data tokenize`, if its tokenizer and settings match; its template date stays."""
    found = read_record(Tokenized, directory / TOKENIZED)
    tokens = TokenFile("", found.n_tokens, found.digest, str((directory / TOKENS).resolve())) if found else None
    if not (found and tokens and tokens.is_whole(directory)):
        raise UserError(f"--data.paths: {directory} is incomplete; run `llama405b data tokenize` again")
    if (config.template_date or found.template_date) != found.template_date:
        raise UserError(
            f"--data.template_date: {directory} was made with {found.template_date or 'no date'}; leave it out"
        )
    if found.rules != rules_of(dataclasses.replace(config, template_date=found.template_date), tokenizer):
        raise UserError(
            f"--data.paths: {directory} was tokenized with another tokenizer, chat template, data.train_on, data.turns, "
            "data.template_arguments, data.fields, data.prompts, data.bos, data.special_tokens, data.bad_records or data.max_bytes; set "
            "them back, or run `llama405b data tokenize` again"
        )
    tokens.is_damaged(directory, report)
    report.say(str(found.counts))
    info = Path(tokens.made).stat()
    key = hashlib.sha256(repr((tokens.made, info.st_size, info.st_mtime_ns)).encode()).hexdigest()[:16]
    return dataclasses.replace(tokens, name=f"tokens-{key}-{found.n_tokens}-{found.digest}.bin")


def _written(encoded: Iterable[NDArray[np.uint32]], cache: Path, stem: str) -> TokenFile:
    """Write tokens to a new token file, which appears complete or not at all."""
    partial, n_tokens, digest = cache / f"{stem}{os.getpid()}.partial", 0, hashlib.sha256()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            for tokens_N in encoded:
                out.write(piece := tokens_N.tobytes())
                digest.update(piece)
                n_tokens += len(tokens_N)
            out.flush()
            # On disk before the rename: from then on the name says that the file is complete.
            os.fsync(out.fileno())
        digits = digest.hexdigest()[:DIGITS]
        tokens = TokenFile(f"{stem}{n_tokens}-{digits}.bin", n_tokens, digits)
        partial.replace(cache / tokens.name)
    except OSError as error:
        raise RunError(f"{cache}: the tokens cannot be written ({reason_of(error)}); free space there") from None
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created
            partial.unlink()
    return tokens


def _send(tokens: TokenFile, cache: Path, me: Rank, progress: Progress, *, writes: bool) -> None:
    """Broadcast rank 0's token file; one rank of each host without it writes it."""
    path, source = cache / tokens.name, tokens.path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{me.host}.{os.getpid()}")
    if writes:
        partial.write_bytes(b"")  # a kill may have left one
    for begin in range(0, tokens.n_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, tokens.n_tokens - begin)
        chunk = torch.empty(size, dtype=torch.int32)
        if me.is_rank0:
            chunk = torch.from_numpy(np.fromfile(source, np.int32, size, offset=TOKEN_BYTES * begin))
        # A collective: ranks that do not write take part, too.
        dist.broadcast(chunk, 0)
        if writes:
            with partial.open("ab") as out:
                out.write(chunk.numpy().tobytes())
        progress(TOKEN_BYTES * (begin + size), TOKEN_BYTES * tokens.n_tokens)
    with collectives.raise_on_all_ranks():
        if writes and partial.stat().st_size != TOKEN_BYTES * tokens.n_tokens:
            raise RunError(
                f"{partial}: its size differs from that of the tokens written to it; check the disk of {me.host}"
            )
        if writes:
            with partial.open("rb+") as whole:
                os.fsync(whole.fileno())
            partial.replace(path)
    dist.barrier()


PART_BYTES = 64 << 20  # of text
PARTS = "parts"

Told = Callable[[int, int, int], None]  # bytes done, bytes in all, tokens so far


def tokenize(config: Data, tokenizer_dir: Path, out: Path, workers: int, told: Told) -> Tokenized:
    """Tokenize all texts in parallel and write the tokens to a directory.

    Raises:
        UserError: A path matches nothing, a file, all its records or the tokenizer cannot be used, or the sources are to be mixed.
        RunError: The directory cannot be written, or a process died.
    """
    if config.weights:
        raise UserError(
            "data.weights: the training run mixes sources; tokenize each by itself with --data.paths and --out"
        )
    tokenizer, files = read_tokenizer(tokenizer_dir, print), file_parts(config.paths)
    before = read_record(Tokenized, out / TOKENIZED)
    config = dated(config, tokenizer, before.template_date if before else "")
    texts = stem_of(files, config, tokenizer)
    made_before = TokenFile(TOKENS, before.n_tokens, before.digest) if before and before.texts == texts else None
    if before and made_before and made_before.is_whole(out) and not made_before.is_damaged(out, lambda: None):
        return before
    jobs = [files] if config.max_bytes else list(_shared_out(files))
    made = _in_processes(jobs, config, tokenizer_dir, out / PARTS, workers, told)
    try:
        return _put_together(jobs, made, out, texts, config, rules_of(config, tokenizer))
    except OSError as error:
        raise RunError(f"{out}: the tokens cannot be written ({reason_of(error)}); free space there") from None


def _shared_out(files: Iterable[FilePart]) -> Iterator[list[FilePart]]:
    """Split files into jobs, in order; large JSON Lines files are split into ranges, one job each."""
    job, size, own = list[FilePart](), 0, extend.current().declared
    for each in files:
        splits = each.size > PART_BYTES and not own.reads_file(each.file) and is_splittable(each.file)
        if job and (splits or size >= PART_BYTES):
            yield job
            job, size = [], 0
        if splits:
            for begin in range(0, each.size, PART_BYTES):
                yield [FilePart(each.file, begin, min(begin + PART_BYTES, each.size))]
            continue
        job.append(each)
        size += each.size
    if job:
        yield job


def _in_processes(
    jobs: Sequence[Sequence[FilePart]], config: Data, tokenizer_dir: Path, cache: Path, workers: int, told: Told
) -> list[TokenFile]:
    sizes = [sum(part.size for part in job) for job in jobs]
    done, n_tokens = 0, 0
    found: dict[int, TokenFile] = {}
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        workers, server, initializer=_begin, initargs=(os.getpid(), extend.current().declared.module)
    ) as pool:
        waits = {pool.submit(_tokenise, job, config, tokenizer_dir, cache): i for i, job in enumerate(jobs)}
        try:
            for each in as_completed(waits):
                number = waits[each]
                found[number] = each.result()
                done, n_tokens = done + sizes[number], n_tokens + found[number].n_tokens
                told(done, sum(sizes), n_tokens)
        except BrokenProcessPool:
            raise RunError("a process that tokenizes died; check the host's memory, or use fewer --workers") from None
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [found[number] for number in range(len(jobs))]


def _begin(pid: int, module: str) -> None:
    extend.use(module)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool already uses all cores
    end_with(pid)


def _tokenise(job: Sequence[FilePart], config: Data, tokenizer_dir: Path, cache: Path) -> TokenFile:
    silent = Report(lambda *_: None, lambda: None, lambda _: None)
    return encoded(job, config, _tokenizer(tokenizer_dir), cache, silent)


@functools.cache
def _tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return read_tokenizer(directory)


def _put_together(
    jobs: Sequence[Sequence[FilePart]],
    made: Sequence[TokenFile],
    out: Path,
    texts: str,
    config: Data,
    rules: str,
) -> Tokenized:
    counts = Counts()
    files = list[FileOffset]()
    first = 0
    before = 0
    digest = hashlib.sha256()
    # Remove the record first, so that an interrupted merge does not look complete.
    (out / TOKENIZED).unlink(missing_ok=True)
    with (out / f".{TOKENS}").open("wb") as whole:
        for job, each in zip(jobs, made, strict=True):
            part = each.path(out / PARTS)
            with part.open("rb") as tokens:
                while piece := tokens.read(16 << 20):
                    whole.write(piece)
                    digest.update(piece)
            its = read_record(Counts, part.with_suffix(".json")) or Counts()
            if not job[0].begin:
                before = 0  # documents of the same file
            files += [
                begins._replace(token=first + begins.token, before=before + begins.before)
                for begins in read_offsets(part)
            ]
            counts, before = counts + its, before + its.documents
            first += each.n_tokens
        counts.refuse_useless(config)
        whole.flush()
        os.fsync(whole.fileno())
    (out / f".{TOKENS}").rename(out / TOKENS)
    write_offsets(out / TOKENS, files)
    found = Tokenized(rules, texts, first, counts, digest.hexdigest()[:DIGITS], config.template_date)
    write_json(out / TOKENIZED, found)
    shutil.rmtree(out / PARTS)
    return found
