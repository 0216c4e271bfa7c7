"""Read what is added to growing files. Standard library; knows files and bytes, not what they mean."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

MAX_READ_BYTES = 1 << 20  # of one file at a time, so that a flood in one does not silence the others
MAX_LINE_BYTES = 1 << 16  # a longer line is returned in pieces
Mark = tuple[int, int]  # inode and position: a file may be replaced by a longer one


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines that were added to a file."""

    path: Path
    begin: int  # of ``data`` in the file
    data: bytes


class Tail:
    """Follows a file, or every ``*.log`` file below a directory, including later ones."""

    def __init__(
        self, root: Path, *, wants: Callable[[Path], bool] = lambda _: True, from_end: bool = False, most_bytes: int = 0
    ) -> None:
        """Begin at the files' present ends, or at their beginnings.

        ``wants`` selects files; ``most_bytes``: of what was added to a file only the end is read (0: all of it), after
        what ``begin_at`` wants whole.
        """
        self.root = root
        self.wants = wants
        self.most_bytes = most_bytes
        self.n_skipped = 0  # lines
        self.marks: dict[Path, Mark] = {}
        self.whole_to: dict[Path, int] = {}  # up to there nothing is skipped
        if from_end:
            self.marks = {path: (path.stat().st_ino, path.stat().st_size) for path in self.files()}

    def files(self) -> list[Path]:
        """The files that exist now."""
        found = [self.root] if self.root.is_file() else sorted(self.root.rglob("*.log"))
        return [path for path in found if self.wants(path) and path.is_file()]

    def begin_at(self, path: Path, mark: Mark, whole_to: int = 0) -> None:
        """Continue where an earlier reader stopped; nothing before ``whole_to`` is skipped."""
        self.marks[path], self.whole_to[path] = mark, whole_to

    def new(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield what was added, at most one piece per file; ``final``: include a last line without a newline."""
        for path in self.files():
            yield from self.new_of(path, final=final)

    def new_of(self, path: Path, *, final: bool = False) -> Iterator[Chunk]:
        """Yield what was added to one file, at most one piece."""
        try:
            with path.open("rb") as file:
                inode, begin = self._begin_of(path, file)
                file.seek(begin)
                block = file.read(MAX_READ_BYTES)
        except OSError:
            return
        end = block.rfind(b"\n") + 1
        too_long = not end and len(block) >= MAX_LINE_BYTES
        if too_long or (final and len(block) < MAX_READ_BYTES):
            end = len(block)
        self.marks[path] = (inode, begin + end)
        if end:
            yield Chunk(path, begin, block[:end])

    def _begin_of(self, path: Path, file: BinaryIO) -> Mark:
        """Return a file's inode, and from where on to read it."""
        inode, offset = self.marks.get(path, (0, 0))
        now = os.fstat(file.fileno())
        if now.st_ino != inode or now.st_size < offset:  # rewritten
            offset = 0
        is_whole = offset < self.whole_to.get(path, 0)
        if self.most_bytes and not is_whole and now.st_size - offset > self.most_bytes:
            offset = self._skip(file, offset, now.st_size - self.most_bytes)
        return now.st_ino, offset

    def _skip(self, file: BinaryIO, begin: int, end: int) -> int:
        """Count the lines up to about ``end``, and return where the next one begins."""
        file.seek(begin)
        while block := file.read(min(MAX_READ_BYTES, end - file.tell())):
            self.n_skipped += block.count(b"\n")
        self.n_skipped += file.readline(MAX_LINE_BYTES).endswith(b"\n")
        return file.tell()

    def all(self, *, final: bool = False) -> Iterator[Chunk]:
        """Yield until nothing is left."""
        while found := list(self.new(final=final)):
            yield from found
