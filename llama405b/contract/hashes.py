"""SHA-256 of each 64 MiB of files, and big files past the page cache. Standard library.

What is known of the files in a directory: a SHA-256 of each 64 MiB, noted when they were downloaded or pushed.

A hash per block finds the block that is bad, and verifies some of a file without the rest.

Big files that are written past the page cache, where the filesystem can.

Checkpoints of hundreds of gigabytes would push everything else out of memory that training needs; and copying into the page
cache costs more CPU than the disk: 0.5 to 2.3 s per GB, against 0.04 (docs/measurements/checkpoint.md).
"""

import dataclasses
import errno
import fcntl
import hashlib
import mmap
import os
import re
import threading
from collections.abc import Callable, Mapping
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


BUFFER_BYTES = 4 << 20
ALIGNED = 4096  # what O_DIRECT demands of addresses, offsets and sizes, at most
LOCAL = {
    "ext4",
    "xfs",
    "overlay",
    "tmpfs",
}  # network filesystems write behind, which nothing here has been measured against


def fill(memory: memoryview, data: memoryview) -> None:
    """Copy as many bytes from one place to another."""
    memory[:] = data


class DirectFile:
    """A file that is written from a byte to its end; memory: one buffer."""

    def __init__(self, path: Path, begin: int = 0, fill: Callable[[memoryview, memoryview], None] = fill) -> None:
        """Open it, and cut it at ``begin``; ``fill`` copies into the buffer.

        Raises:
            OSError: It cannot be written.
        """
        self.path = path
        self.written = begin
        self.fill = fill
        self.held = begin % ALIGNED  # bytes in the buffer; the file has what comes before them
        self.buffer = mmap.mmap(-1, BUFFER_BYTES)  # aligned to a page
        self.memory = memoryview(self.buffer)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(self.descriptor, begin)
            self.memory[: self.held] = os.pread(self.descriptor, self.held, begin - self.held)
            os.lseek(self.descriptor, begin - self.held, os.SEEK_SET)
            self.direct = filesystem(path) in LOCAL and self._ask(direct=True)
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        view = memoryview(data)
        while view:
            piece = view[: BUFFER_BYTES - self.held]
            self.fill(self.memory[self.held : self.held + len(piece)], piece)
            self.held += len(piece)
            self.written += len(piece)
            view = view[len(piece) :]
            if self.held == BUFFER_BYTES:
                self._empty(self.held)

    def flush(self) -> None:
        """Bring everything to the disk; nothing more can be written."""
        self._empty(self.held // ALIGNED * ALIGNED)
        self._ask(direct=False)
        self._empty(self.held)
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close it; what is in the buffer is lost."""
        os.close(self.descriptor)
        self.memory.release()
        self.buffer.close()

    def _empty(self, n_bytes: int) -> None:
        """Write the first bytes of the buffer; what follows moves to its beginning."""
        done = 0
        try:
            while done < n_bytes:
                try:
                    done += os.write(self.descriptor, self.memory[done:n_bytes])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.direct:
                        raise
                    self.direct = self._ask(direct=False)  # it demands more than ALIGNED, or cannot after all
        finally:  # after an error, too, the buffer has what the file lacks
            self.memory[: self.held - done] = self.memory[done : self.held]
            self.held -= done

    def _ask(self, *, direct: bool) -> bool:
        """Ask the filesystem to write past the page cache, or through it; returns whether it will write past it."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT * direct)
        except OSError:
            return False
        return direct


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that a path is on, as ``ext4``; '' if unknown (proc(5), mountinfo)."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^\d+ \d+ {wanted} .* - (\S+)", text, re.MULTILINE)
    return found[1] if found else ""
