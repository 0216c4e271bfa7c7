"""The token file: rank 0 tokenizes the text once, and sends the tokens to the hosts that lack them.

Knows files, the tokenizer and ranks; not steps or batches. What a token is, is ``encode``'s. The file's name tells its texts, its
tokenizer, its length and its hash, so that one that is damaged is known at the start of a run and made anew; what is in it is counted in
a file beside it.

Shape suffixes: N tokens.
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama405b import extend
from llama405b.contract.corpus import TOKENIZED, TOKENS, is_tokenized
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.phrases import counted, reason_of
from llama405b.contract.schema import Data
from llama405b.data.documents import Documents, FilePart, file_parts, with_forms
from llama405b.data.encode import Counts, Encoder
from llama405b.data.provenance import write_offsets
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank

TOKEN_BYTES = 4
CHUNK_TOKENS = 16 << 20  # sent at a time
SAY_EVERY_S = 30.0
DIGITS = 16  # of a SHA-256
RULES = 6  # how texts become tokens; a new number makes every token file anew
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
        """Whether this host's file, which is whole, has other bytes than were written. Reads all of it, telling now and then.

        Raises:
            UserError: It is `data tokenize`'s, which a run does not make anew.
        """
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
    """Tokenize on rank 0 (or reuse its token file), and bring the tokens to every host's ``cache``.

    Raises:
        UserError: A path matches nothing, or a file or the tokenizer cannot be used.
        RunError: The token file cannot be written.
    """
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
    tokenizer = read_tokenizer(tokenizer_dir)
    if is_tokenized(config.paths):
        return _made(Path(config.paths[0]), rules_of(config, tokenizer), report)
    tokens = encoded(file_parts(config.paths), config, tokenizer, cache, report)
    (read_record(Counts, (cache / tokens.name).with_suffix(".json")) or Counts()).refuse_nothing()
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
    texts = Documents(forms, config.max_bytes, skip=config.bad_records == "skip", names=config.fields)
    report.say(f"tokenizing {counted(len(parts), 'file')}, {texts.total_bytes / 1e6:,.1f} MB")
    encoder = Encoder(tokenizer, config.train_on, texts, report, parses=config.special_tokens == "parse")
    tokens = _written(encoder, cache, stem)
    with contextlib.suppress(OSError):  # they are only told
        write_json((cache / tokens.name).with_suffix(".json"), encoder.counts)
        write_offsets(cache / tokens.name, encoder.files)
    report.say(str(encoder.counts))
    return tokens


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Read a model's tokenizer.

    Raises:
        UserError: transformers cannot.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001
        why = " ".join(str(error).split())
        raise UserError(f"{directory}: cannot read its tokenizer ({why}); download tokenizer.json again") from None


def rules_of(config: Data, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all that texts become tokens by: these rules, the tokenizer, its template, what is learnt."""
    how = (
        RULES,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        config.train_on,
        config.bad_records,
        config.special_tokens,
        config.fields,
        config.max_bytes,
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


def _made(directory: Path, rules: str, report: Report) -> TokenFile:
    """Return what `data tokenize` has written, for this tokenizer and these settings."""
    found = read_record(Tokenized, directory / TOKENIZED)
    tokens = TokenFile("", found.n_tokens, found.digest, str((directory / TOKENS).resolve())) if found else None
    if not (found and tokens and tokens.is_whole(directory)):
        raise UserError(f"--data.paths: {directory} is not whole; run `llama405b data tokenize` again")
    if found.rules != rules:
        raise UserError(
            f"--data.paths: {directory} was tokenized with another tokenizer, chat template, data.train_on, data.fields, "
            "data.special_tokens, data.bad_records or data.max_bytes; set them back, or run `llama405b data tokenize` again"
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
