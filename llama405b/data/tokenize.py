"""Tokenize texts once, by several processes, for any number of runs. Knows files and the tokenizer; not ranks or steps.

Files of text are shared out in jobs of ``PART_BYTES``, large ones of JSON Lines in pieces; each becomes a token file of its own, which
a later call does not make again. Put together they are one token file, and a record that tells a run by which rules it was made.
"""

import functools
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from llama405b import extend
from llama405b.contract.corpus import TOKENIZED, TOKENS, is_splittable
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.phrases import reason_of
from llama405b.contract.schema import Data
from llama405b.data.documents import FilePart, file_parts
from llama405b.data.encode import Counts, FileOffset
from llama405b.data.parent_watch import end_with
from llama405b.data.provenance import read_offsets, write_offsets
from llama405b.data.tokens import DIGITS, Report, TokenFile, Tokenized, encoded, read_tokenizer, rules_of, stem_of

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
    tokenizer, files = read_tokenizer(tokenizer_dir), file_parts(config.paths)
    rules, texts = rules_of(config, tokenizer), stem_of(files, config, tokenizer)
    before = read_record(Tokenized, out / TOKENIZED)
    made_before = TokenFile(TOKENS, before.n_tokens, before.digest) if before and before.texts == texts else None
    if before and made_before and made_before.is_whole(out) and not made_before.is_damaged(out, lambda: None):
        return before
    jobs = [files] if config.max_bytes else list(_shared_out(files))
    made = _in_processes(jobs, config, tokenizer_dir, out / PARTS, workers, told)
    try:
        return _put_together(jobs, made, out, rules, texts)
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
    jobs: Sequence[Sequence[FilePart]], made: Sequence[TokenFile], out: Path, rules: str, texts: str
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
        counts.refuse_nothing()
        whole.flush()
        os.fsync(whole.fileno())
    (out / f".{TOKENS}").rename(out / TOKENS)
    write_offsets(out / TOKENS, files)
    found = Tokenized(rules, texts, first, counts, digest.hexdigest()[:DIGITS])
    write_json(out / TOKENIZED, found)
    shutil.rmtree(out / PARTS)
    return found
