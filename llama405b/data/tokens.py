"""Token files: made once, by rank 0 or by `llama405b data tokenize`, and shared by all ranks of a host.

Knows files, the tokenizer and ranks; not steps or batches. What a token is, is ``encode``'s. The file's name tells its texts, its
tokenizer, its length and its hash, so that one that is damaged is known at the start of a run and made anew; what is in it is counted in
a file beside it. `data tokenize` shares texts out in jobs of ``PART_BYTES``, large JSON Lines in pieces; each becomes a token file of its
own, which a later call does not make again, and together they are one, with a record that tells a run by which rules it was made.

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
CHUNK_TOKENS = 16 << 20  # sent at a time
SAY_EVERY_S = 30.0
DIGITS = 16  # of a SHA-256
RULES = 8  # how texts become tokens; a new number makes every token file anew
Progress = Callable[[int, int], None]  # bytes done, bytes in all; 0, 0: waiting for rank 0
Say = Callable[[str], None]  # a line for the log


@dataclasses.dataclass(frozen=True, slots=True)
class Tokenized:
    """What `data tokenize` has written beside the tokens."""

    rules: str  # by which texts became tokens
    texts: str  # which
    n_tokens: int
    counts: Counts
    digest: str = ""  # of the tokens; "": an earlier version wrote them
    template_date: str = ""  # that the chat template was given; "": it asks for none


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file, whole or not yet there."""

    name: str  # in the cache
    n_tokens: int
    digest: str = ""  # of its bytes; "": not known
    made: str = ""  # where `data tokenize` has written it, on hosts that see that

    def path(self, cache: Path) -> Path:
        """Where it is, or is to be, on this host."""
        return Path(self.made) if self.made and self._is_whole(Path(self.made)) else cache / self.name

    def is_whole(self, cache: Path) -> bool:
        """Whether this host has it at its full size."""
        return self._is_whole(self.path(cache))

    def _is_whole(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self.n_tokens * TOKEN_BYTES

    def is_damaged(self, cache: Path, told: Callable[[], None]) -> bool:
        """Whether this host's file, which is whole, has other bytes than were written. Reads all of it, telling now and then."""
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
    """Tokenize on rank 0 (or reuse its token file), and bring the tokens to every host's ``cache``."""
    tokens = TokenFile("", 0)
    with collectives.raise_on_all_ranks(), collectives.waiting_for_rank0(lambda: progress(0, 0)) as still_working:
        if me.is_rank0:
            tokens = tokenised(config, tokenizer_dir, cache, Report(progress, still_working, say))
    tokens = collectives.broadcast_object(tokens)
    with collectives.raise_on_all_ranks():
        lacks = not tokens.is_whole(cache)
        if me.local_rank == 0 and not me.is_rank0 and not lacks:  # rank 0 has looked, or has written it
            lacks = tokens.is_damaged(cache, lambda: progress(0, 0))
    if any(collectives.all_gather_objects(lacks)):
        _send(tokens, cache, me, progress, writes=lacks and me.local_rank == 0)
    return tokens


@dataclasses.dataclass(slots=True)
class Report:
    """Tells how far tokenizing is: in rank 0's heartbeat, to the ranks that wait, and now and then in the log."""

    progress: Progress
    still_working: Callable[[], None]
    say: Say
    said: float = dataclasses.field(default_factory=time.monotonic)

    def __call__(self, done: int = 0, total: int = 0) -> None:
        """Tell that so many bytes of so many have been tokenized."""
        self.progress(done, total)
        self.still_working()
        if total and time.monotonic() - self.said >= SAY_EVERY_S:
            self.said = time.monotonic()
            self.say(f"tokenizing: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({100 * done // total}%)")


def tokenised(config: Data, tokenizer_dir: Path, cache: Path, report: Report) -> TokenFile:
    """Return the token file of these texts and this tokenizer, created if it does not exist or is not whole.

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
    """Return the token file of these parts of files, created if it does not exist or is not whole."""
    stem = stem_of(parts, config, tokenizer)
    for found in cache.glob(f"{stem}*-*.bin"):
        n_tokens, _, digest = found.stem.removeprefix(stem).partition("-")
        tokens = TokenFile(found.name, int(n_tokens), digest)
        if tokens.is_whole(cache) and tokens.is_damaged(cache, report):
            report.say(f"{found}: damaged; it is made anew")
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
    with contextlib.suppress(OSError):  # they are only told
        write_json((cache / tokens.name).with_suffix(".json"), encoder.counts)
        write_offsets(cache / tokens.name, encoder.files)
    report.say(str(encoder.counts))
    return tokens


def rules_of(config: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all that texts become tokens by: these rules, the tokenizer, its template, what is learnt."""
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
    """Return what the name of these parts' tokens begins with."""
    stats = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns, *((begin, end) if end else ()))
        for file, begin, end in parts
    ]
    what = (rules_of(config, tokenizer), stats, config.max_bytes)
    return f"tokens-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}-"


def _made(directory: Path, config: Data, tokenizer: PreTrainedTokenizerBase, report: Report) -> TokenFile:
    """Return what `data tokenize` has written, for this tokenizer and these settings but the date, which stays that of its writing."""
    found = read_record(Tokenized, directory / TOKENIZED)
    tokens = TokenFile("", found.n_tokens, found.digest, str((directory / TOKENS).resolve())) if found else None
    if not (found and tokens and tokens.is_whole(directory)):
        raise UserError(f"--data.paths: {directory} is not whole; run `llama405b data tokenize` again")
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
    """Write tokens to a new token file, which appears whole or not at all."""
    partial, n_tokens, digest = cache / f"{stem}{os.getpid()}.partial", 0, hashlib.sha256()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            for tokens_N in encoded:
                out.write(piece := tokens_N.tobytes())
                digest.update(piece)
                n_tokens += len(tokens_N)
            out.flush()
            os.fsync(out.fileno())
        digits = digest.hexdigest()[:DIGITS]
        tokens = TokenFile(f"{stem}{n_tokens}-{digits}.bin", n_tokens, digits)
        partial.replace(cache / tokens.name)
    except OSError as error:
        raise RunError(f"{cache}: the tokens cannot be written ({reason_of(error)}); make room there") from None
    finally:
        with contextlib.suppress(OSError):  # renamed, or never created
            partial.unlink()
    return tokens


def _send(tokens: TokenFile, cache: Path, me: Rank, progress: Progress, *, writes: bool) -> None:
    """Broadcast rank 0's token file; one rank of each host that lacks it writes it."""
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
        dist.broadcast(chunk, 0)
        if writes:
            with partial.open("ab") as out:
                out.write(chunk.numpy().tobytes())
        progress(TOKEN_BYTES * (begin + size), TOKEN_BYTES * tokens.n_tokens)
    with collectives.raise_on_all_ranks():
        if writes and partial.stat().st_size != TOKEN_BYTES * tokens.n_tokens:
            raise RunError(f"{partial}: is not as large as the tokens written to it; check the disk of {me.host}")
        if writes:
            with partial.open("rb+") as whole:
                os.fsync(whole.fileno())
            partial.replace(path)
    dist.barrier()


PART_BYTES = 64 << 20  # of text
PARTS = "parts"

Told = Callable[[int, int, int], None]  # bytes done, bytes in all, tokens so far


def tokenize(config: Data, tokenizer_dir: Path, out: Path, workers: int, told: Told) -> Tokenized:
    """Write the tokens of all texts to a directory.

    Raises:
        UserError: A path matches nothing, a file, all its records or the tokenizer cannot be used, or the sources are to be mixed.
        RunError: The directory cannot be written, or a process died.
    """
    if config.weights:
        raise UserError(
            "data.weights: sources are mixed by the run; tokenize each by itself, with --data.paths and --out"
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
        raise RunError(f"{out}: the tokens cannot be written ({reason_of(error)}); make room there") from None


def _shared_out(files: Iterable[FilePart]) -> Iterator[list[FilePart]]:
    """Share files out in their order; those whose lines are documents in pieces, a job each."""
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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
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
