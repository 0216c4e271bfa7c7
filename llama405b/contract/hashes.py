"""What is known of the files in a directory: a SHA-256 of each 64 MiB, noted when they were downloaded or pushed.

A hash per block finds the block that is bad, and verifies some of a file without the rest.
"""

import dataclasses
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from llama405b.contract.files import read_record, write_json

RECORD = ".llama405b-hashes.json"
READ_BYTES = 1 << 20
BLOCK_BYTES = 64 << 20  # of each block but a file's last; an empty file has one, too

Blocks = tuple[str, ...]  # the SHA-256 of each, in hexadecimal


@dataclasses.dataclass(frozen=True, slots=True)
class FileHashes:
    """A file that was verified; it has not changed since while size and time are these."""

    bytes: int
    mtime: float  # seconds
    blocks: Blocks
    sha256: str = ""  # of the whole file, where the Hub has it


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    files: Mapping[str, FileHashes]  # by path below the directory


class Hashes:
    """The record of one directory; several threads may use it."""

    def __init__(self, root: Path) -> None:
        self.root, self.lock = root, threading.Lock()
        record = read_record(_Record, root / RECORD)
        known = record.files if record else {}
        self.files = {name: hashes for name, hashes in known.items() if (root / name).exists()}

    def of(self, name: str) -> FileHashes | None:
        """Return what is known of a file; None if it has changed since, or is not here."""
        known = self.files.get(name)
        try:
            info = (self.root / name).stat()
        except OSError:
            return None
        return known if known and (known.bytes, known.mtime) == (info.st_size, info.st_mtime) else None

    def blocks_of(self, name: str) -> Blocks | None:
        """Return what is known of a file's blocks; None as ``of``."""
        known = self.of(name)
        return known.blocks if known else None

    def add(self, name: str, blocks: Blocks, sha256: str = "") -> None:
        """Note that a file, as it is now, was verified."""
        info = (self.root / name).stat()
        with self.lock:
            self.files[name] = FileHashes(info.st_size, info.st_mtime, blocks, sha256)
            write_json(self.root / RECORD, _Record(self.files))


class BlockHasher:
    """Hashes a stream, block by block."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes, self.written = block_bytes, 0
        self.complete: list[str] = []
        self.digest = hashlib.sha256()  # of the block that is not complete

    def update(self, data: bytes | memoryview) -> None:
        """Go on with the stream."""
        view = memoryview(data)
        while view:
            piece = view[: self.block_bytes - self.written % self.block_bytes]
            view = view[len(piece) :]
            self.digest.update(piece)
            self.written += len(piece)
            if self.written % self.block_bytes == 0:
                self.complete.append(self.digest.hexdigest())
                self.digest = hashlib.sha256()

    @property
    def blocks(self) -> Blocks:
        """The hashes of all blocks so far, of which the last may be shorter."""
        if self.written % self.block_bytes or not self.complete:
            return (*self.complete, self.digest.hexdigest())
        return tuple(self.complete)


def block_hash(descriptor: int, block: int, block_bytes: int = BLOCK_BYTES) -> str:
    """Return the SHA-256 of a block of an open file; many threads may do that at once.

    Raises:
        OSError: It cannot be read.
    """
    digest, at = hashlib.sha256(), block * block_bytes
    end = at + block_bytes
    while piece := os.pread(descriptor, min(READ_BYTES, end - at), at):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


def n_blocks(size: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return how many blocks a file of ``size`` bytes has."""
    return max(1, -(-size // block_bytes))
