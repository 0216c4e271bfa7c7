"""Packed batches of tokens, the same on any number of ranks.

Knows tokens, steps and ranks; not the model. Rank 0 tokenizes the text once into a file of uint32 (the high bit marks
a token that is read but not learned), which is sent to the hosts that lack it. Sequence ``i`` of a step depends only
on the seed, the step and ``i``, so that a resumed run and any world size see the same batches.

Shape suffixes: B sequences of a micro-batch, S positions, N tokens.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama405b import ranks
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Data
from llama405b.data.documents import documents, expand
from llama405b.ranks import Ranks
from llama405b.step import IGNORE_INDEX

NOT_LEARNT = np.uint32(1 << 31)
CHUNK_TOKENS = 16 << 20  # sent at a time
ENCODE_AT_ONCE = 256  # documents


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """A shuffled, endless order of packed sequences."""

    tokens_N: NDArray[np.uint32]  # uint32, memory-mapped
    seq_len: int
    seed: int

    @property
    def n_sequences(self) -> int:
        """Number of sequences in one epoch; each target token is in exactly one."""
        return (len(self.tokens_N) - 1) // self.seq_len

    def steps(self, epochs: float, global_batch: int) -> int:
        """Return the number of whole steps in these epochs, at least one."""
        return max(1, int(epochs * self.n_sequences // global_batch))

    def sequence(self, index: int) -> int:
        """Return the packed sequence at ``index`` of the endless order."""
        epoch, place = divmod(index, self.n_sequences)
        return int(_order(self.seed, epoch, self.n_sequences)[place])

    def microbatches(self, step: int, me: Ranks, global_batch: int, micro: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of a step (counted from 1), as ``(tokens_BS, targets_BS)`` on its device."""
        each = global_batch // me.dp.size
        first = (step - 1) * global_batch + me.dp.rank * each
        windows = np.stack([self._window(self.sequence(first + i)) for i in range(each)])
        ids = torch.from_numpy((windows & ~NOT_LEARNT).astype(np.int64))
        x, y = ids[:, :-1], ids[:, 1:].clone()
        y[torch.from_numpy((windows[:, 1:] & NOT_LEARNT) != 0)] = IGNORE_INDEX
        x, y = x.to(me.device), y.to(me.device)
        return [(x[i : i + micro], y[i : i + micro]) for i in range(0, each, micro)]

    def _window(self, sequence: int) -> NDArray[np.uint32]:
        begin = sequence * self.seq_len
        return self.tokens_N[begin : begin + self.seq_len + 1]


@dataclasses.dataclass(frozen=True, slots=True)
class _TokenFile:
    name: str
    n_bytes: int  # 0: not on this host


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n_sequences: int) -> NDArray[np.int64]:
    """The shuffle of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n_sequences)


def open_batches(config: Data, tokenizer_dir: Path, cache: Path, me: Ranks) -> Batches:
    """Tokenize on rank 0 (or reuse its cache), bring the tokens to every host, and open them.

    Raises:
        UserError: A path matches nothing, or the text is shorter than one sequence.
    """
    path = Path()
    with ranks.refusing_together():
        if me.leads:
            path = _tokenised(config, tokenizer_dir, cache)
    tokens = ranks.from_rank0(_token_file(path))
    path, size = cache / tokens.name, tokens.n_bytes
    if any(found != tokens for found in ranks.agreed(_token_file(path))):
        _send(path, size // 4, me)
    if size // 4 <= config.seq_len:
        raise UserError(
            f"--data.paths: {size // 4} tokens are fewer than one sequence of {config.seq_len}; "
            "add text, or lower --data.seq_len"
        )
    return Batches(np.memmap(path, dtype=np.uint32, mode="r"), config.seq_len, config.seed)


def _token_file(path: Path) -> _TokenFile:
    return _TokenFile(path.name, path.stat().st_size if path.is_file() else 0)


def _tokenised(config: Data, tokenizer_dir: Path, cache: Path) -> Path:
    """The token file of these texts and this tokenizer, created if it does not exist."""
    files = expand(config.paths)
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001
        why = " ".join(str(error).split())
        raise UserError(f"{tokenizer_dir}: cannot read its tokenizer ({why}); download tokenizer.json again") from None
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = hashlib.sha256(repr((stats, config.max_bytes, tokenizer.backend_tokenizer.to_str())).encode())
    path = cache / f"tokens-{known.hexdigest()[:16]}.bin"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as out:
            for tokens_N in _encode(tokenizer, files, config.max_bytes):
                out.write(tokens_N.tobytes())
        partial.replace(path)
    return path


def _encode(tokenizer: PreTrainedTokenizerBase, files: list[Path], max_bytes: int) -> Iterator[NDArray[np.uint32]]:
    """Encode each document as prompt (not learned), text, end of text."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pending = documents(files, max_bytes)
    while batch := list(itertools.islice(pending, ENCODE_AT_ONCE)):
        prompts = tokenizer([prompt for prompt, _ in batch], add_special_tokens=False)["input_ids"]
        texts = tokenizer([text for _, text in batch], add_special_tokens=False)["input_ids"]
        for prompt, text in zip(prompts, texts, strict=True):
            unlearnt = np.array(begin + prompt, dtype=np.uint32) | NOT_LEARNT
            yield np.concatenate([unlearnt, np.array(text + end, dtype=np.uint32)])


def _send(path: Path, n_tokens: int, me: Ranks) -> None:
    """Broadcast rank 0's token file; one rank of each host writes it."""
    writes = me.local_rank == 0 and not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{me.host}.{os.getpid()}")
    for begin in range(0, n_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, n_tokens - begin)
        chunk = torch.empty(size, dtype=torch.int32)
        if me.leads:
            chunk = torch.from_numpy(np.fromfile(path, np.int32, size, offset=4 * begin))
        dist.broadcast(chunk, 0)
        if writes:
            with partial.open("ab") as out:
                out.write(chunk.numpy().tobytes())
    if writes:
        partial.replace(path)
    dist.barrier()
