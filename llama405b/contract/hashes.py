"""Hash files in blocks of 64 MiB, and write large files past the page cache. Standard library only.

A SHA-256 per block locates a damaged block, and verifies a part of a file without the rest. The hashes of a directory's files are
recorded when they are downloaded or pushed.

Large files are written with O_DIRECT where the filesystem supports it: checkpoints of hundreds of gigabytes would evict what training
needs from memory, and copying into the page cache costs more CPU than writing to the disk: 0.5 to 2.3 s per GB, against 0.04
(docs/measurements/checkpoint.md).
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

RECORD_NAME = ".llama405b-hashes.json"
READ_BYTES = 1 << 20
BLOCK_BYTES = 64 << 20  # of each block but a file's last; an empty file has one block

Blocks = tuple[str, ...]  # the SHA-256 of each, in hexadecimal


@dataclasses.dataclass(frozen=True, slots=True)
class FileHashes:
    """The hashes of a verified file, valid while its size and modification time are unchanged."""

    bytes: int
    mtime: float  # seconds
    blocks: Blocks
    sha256: str = ""  # of the full file, if the Hub publishes it


@dataclasses.dataclass(frozen=True, slots=True)
class _HashRecord:
    files: Mapping[str, FileHashes]  # by path below the directory


class HashStore:
    """The recorded hashes of one directory's files; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root, self.lock = root, threading.Lock()
        record = read_record(_HashRecord, root / RECORD_NAME)
        recorded_files = record.files if record else {}
        self.files = {name: hashes for name, hashes in recorded_files.items() if (root / name).exists()}

    def find(self, name: str) -> FileHashes | None:
        """Return a file's recorded hashes; None if there are none or the file has changed."""
        hashes = self.files.get(name)
        try:
            info = (self.root / name).stat()
        except OSError:
            return None
        return hashes if hashes and (hashes.bytes, hashes.mtime) == (info.st_size, info.st_mtime) else None

    def find_blocks(self, name: str) -> Blocks | None:
        """Return the recorded hashes of a file's blocks; None as ``find``."""
        hashes = self.find(name)
        return hashes.blocks if hashes else None

    def add(self, name: str, blocks: Blocks, sha256: str = "") -> None:
        """Record the hashes of a file that was verified as it is now."""
        info = (self.root / name).stat()
        with self.lock:
            self.files[name] = FileHashes(info.st_size, info.st_mtime, blocks, sha256)
            write_json(self.root / RECORD_NAME, _HashRecord(self.files))


class BlockHasher:
    """Hashes a stream block by block."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes, self.n_bytes = block_bytes, 0
        self.complete_blocks: list[str] = []
        self.digest = hashlib.sha256()  # of the block that is not complete

    def update(self, data: bytes | memoryview) -> None:
        """Hash the next bytes of the stream."""
        view = memoryview(data)
        while view:
            piece = view[: self.block_bytes - self.n_bytes % self.block_bytes]
            view = view[len(piece) :]
            self.digest.update(piece)
            self.n_bytes += len(piece)
            if self.n_bytes % self.block_bytes == 0:
                self.complete_blocks.append(self.digest.hexdigest())
                self.digest = hashlib.sha256()

    @property
    def blocks(self) -> Blocks:
        """The hashes of all blocks so far; the last block may be shorter."""
        if self.n_bytes % self.block_bytes or not self.complete_blocks:
            return (*self.complete_blocks, self.digest.hexdigest())
        return tuple(self.complete_blocks)


def block_hash(descriptor: int, block: int, block_bytes: int = BLOCK_BYTES) -> str:
    """Return the SHA-256 of a block of an open file; safe to call from several threads (pread).

    Raises:
        OSError: The file cannot be read.
    """
    digest, offset = hashlib.sha256(), block * block_bytes
    end = offset + block_bytes
    while piece := os.pread(descriptor, min(READ_BYTES, end - offset), offset):
        digest.update(piece)
        offset += len(piece)
    return digest.hexdigest()


def n_blocks(size: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return how many blocks a file of ``size`` bytes has."""
    return max(1, -(-size // block_bytes))


BUFFER_BYTES = 4 << 20
DIRECT_ALIGNMENT = 4096  # the largest alignment that O_DIRECT requires of addresses, offsets and sizes
LOCAL_FILESYSTEMS = {
    "ext4",
    "xfs",
    "overlay",
    "tmpfs",
}  # network filesystems write behind; O_DIRECT was not measured on them


def copy_bytes(memory: memoryview, data: memoryview) -> None:
    """Copy bytes into a buffer of the same size."""
    memory[:] = data


class DirectFile:
    """A file that is written sequentially through one aligned buffer, with O_DIRECT where possible."""

    def __init__(self, path: Path, begin: int = 0, copy: Callable[[memoryview, memoryview], None] = copy_bytes) -> None:
        """Open the file and truncate it at ``begin``; ``copy`` copies into the buffer.

        Raises:
            OSError: The file cannot be written.
        """
        self.path = path
        self.end = begin
        self.copy = copy
        self.n_buffered = begin % DIRECT_ALIGNMENT  # bytes in the buffer, which follow those in the file
        self.buffer = mmap.mmap(-1, BUFFER_BYTES)  # aligned to a page
        self.memory = memoryview(self.buffer)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # writes begin at an aligned offset: the unaligned end of the file is read back into the buffer
            os.ftruncate(self.descriptor, begin)
            self.memory[: self.n_buffered] = os.pread(self.descriptor, self.n_buffered, begin - self.n_buffered)
            os.lseek(self.descriptor, begin - self.n_buffered, os.SEEK_SET)
            self.is_direct = filesystem_type(path) in LOCAL_FILESYSTEMS and self._set_direct(direct=True)
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            piece = view[: BUFFER_BYTES - self.n_buffered]
            self.copy(self.memory[self.n_buffered : self.n_buffered + len(piece)], piece)
            self.n_buffered += len(piece)
            self.end += len(piece)
            view = view[len(piece) :]
            if self.n_buffered == BUFFER_BYTES:
                self._write_out(self.n_buffered)

    def flush(self, head: bytes = b"") -> None:
        """Write all bytes, and ``head`` at the beginning, and fsync; nothing more can be written."""
        # aligned blocks with O_DIRECT, then the unaligned tail without it
        self._write_out(self.n_buffered // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT)
        self._set_direct(direct=False)
        self._write_out(self.n_buffered)
        n_written = 0
        while n_written < len(head):  # a disk that is nearly full takes a part
            n_written += os.pwrite(self.descriptor, head[n_written:], n_written)
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file; bytes in the buffer are lost."""
        os.close(self.descriptor)
        self.memory.release()
        self.buffer.close()

    def _write_out(self, n_bytes: int) -> None:
        """Write the first bytes of the buffer, and move the others to its start."""
        n_written = 0
        try:
            while n_written < n_bytes:
                try:
                    n_written += os.write(self.descriptor, self.memory[n_written:n_bytes])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.is_direct:
                        raise
                    self.is_direct = self._set_direct(direct=False)  # it demands more than ALIGNED, or cannot after all
        finally:  # also after an error, the buffer has exactly the bytes that the file lacks
            self.memory[: self.n_buffered - n_written] = self.memory[n_written : self.n_buffered]
            self.n_buffered -= n_written

    def _set_direct(self, *, direct: bool) -> bool:
        """Switch O_DIRECT on or off; return whether it is on."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT * direct)
        except OSError:
            return False
        return direct


def filesystem_type(path: Path) -> str:
    """Return the filesystem type of a path, as ``ext4``; '' if unknown (proc(5), mountinfo)."""
    device = path.stat().st_dev
    device_number = f"{os.major(device)}:{os.minor(device)}"
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^\d+ \d+ {device_number} .* - (\S+)", text, re.MULTILINE)
    return match[1] if match else ""
