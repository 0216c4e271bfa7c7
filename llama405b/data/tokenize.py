"""Tokenize texts once, by several processes, for any number of runs. Knows files and the tokenizer; not ranks or steps.

Files of text are shared out in parts of ``PART_BYTES``; each becomes a token file of its own, which a later call does not make again.
Put together they are one token file, and a record that tells a run by which rules it was made.
"""

import dataclasses
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from llama405b.contract.corpus import TOKENIZED, TOKENS, expand
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.phrases import reason_of
from llama405b.contract.schema import Data
from llama405b.data.encode import Begins, Counts
from llama405b.data.orphans import end_with
from llama405b.data.tokens import Report, TokenFile, Tokenized, read_tokenizer, rules_of, stem_of, tokenised
from llama405b.data.whence import read_files, write_files

PART_BYTES = 64 << 20  # of text; a file is never split
PARTS = "parts"

Told = Callable[[int, int, int], None]  # bytes done, bytes in all, tokens so far


def tokenize(config: Data, tokenizer_dir: Path, out: Path, workers: int, told: Told) -> Tokenized:
    """Write the tokens of all texts to a directory.

    Raises:
        UserError: A path matches nothing, a file or the tokenizer cannot be used, or the sources are to be mixed.
        RunError: The directory cannot be written, or a process died.
    """
    if config.weights:
        raise UserError(
            "data.weights: sources are mixed by the run; tokenize each by itself, with --data.paths and --out"
        )
    tokenizer, files = read_tokenizer(tokenizer_dir), expand(config.paths)
    rules, texts = rules_of(config, tokenizer), stem_of(config, files, tokenizer)
    before = read_record(Tokenized, out / TOKENIZED)
    if before and before.texts == texts and TokenFile(TOKENS, before.n_tokens).is_whole(out):
        return before
    parts = [files] if config.max_bytes else list(_parts(files))
    sizes = [sum(file.stat().st_size for file in part) for part in parts]
    done, n_tokens = 0, 0
    found: dict[int, TokenFile] = {}
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, server, initializer=_begin, initargs=(os.getpid(),))
    with pool:
        waits = {
            pool.submit(
                _tokenise, dataclasses.replace(config, paths=tuple(map(str, part))), tokenizer_dir, out / PARTS
            ): i
            for i, part in enumerate(parts)
        }
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
    made = [found[number] for number in range(len(parts))]
    try:
        return _put_together(made, out, rules, texts)
    except OSError as error:
        raise RunError(f"{out}: the tokens cannot be written ({reason_of(error)}); make room there") from None


def _parts(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Share files out, in their order."""
    part, size = list[Path](), 0
    for file in files:
        part.append(file)
        size += file.stat().st_size
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _begin(pid: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as the cores
    end_with(pid)


def _tokenise(config: Data, tokenizer_dir: Path, cache: Path) -> TokenFile:
    return tokenised(config, tokenizer_dir, cache, Report(lambda *_: None, lambda: None, lambda _: None))


def _put_together(made: Sequence[TokenFile], out: Path, rules: str, texts: str) -> Tokenized:
    counts, files, first = Counts(), list[Begins](), 0
    (out / TOKENIZED).unlink(missing_ok=True)
    with (out / f".{TOKENS}").open("wb") as whole:
        for each in made:
            part = each.path(out / PARTS)
            with part.open("rb") as tokens:
                shutil.copyfileobj(tokens, whole, 16 << 20)
            counts += read_record(Counts, part.with_suffix(".json")) or Counts()
            files += [each._replace(token=first + each.token) for each in read_files(part)]
            first += each.n_tokens
        whole.flush()
        os.fsync(whole.fileno())
    (out / f".{TOKENS}").rename(out / TOKENS)
    write_files(out / TOKENS, files)
    found = Tokenized(rules, texts, first, counts)
    write_json(out / TOKENIZED, found)
    shutil.rmtree(out / PARTS)
    return found
