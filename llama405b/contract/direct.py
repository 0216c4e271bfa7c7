"""Big files that are written past the page cache, where the filesystem can. Standard library.

Checkpoints of hundreds of gigabytes would push everything else out of memory that training needs; and copying into the page
cache costs more CPU than the disk: 0.5 to 2.3 s per GB, against 0.04 (docs/measurements/checkpoint.md).
"""

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

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
