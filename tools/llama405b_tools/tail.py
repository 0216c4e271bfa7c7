"""New lines of growing log files below a directory. Standard library; knows files, not what is in them."""

from collections.abc import Iterator
from pathlib import Path

MAX_READ_BYTES = 1 << 20  # of one file at a time, so that a flood in one does not silence the others
MAX_LINE_BYTES = 1 << 16  # a longer line is handed out in pieces


class Tail:
    """Follows every ``*.log`` and ``*.jsonl`` file below ``root``, also those that appear later."""

    def __init__(self, root: Path, *, from_end: bool = False) -> None:
        """Begin at the files' present ends, or at their beginnings."""
        self.root = root
        self.offsets: dict[Path, tuple[int, int]] = {}  # inode and position: a file may be replaced by a longer one
        if from_end:
            self.offsets = {path: (path.stat().st_ino, path.stat().st_size) for path in self.files()}

    def files(self) -> list[Path]:
        """The files there are now."""
        return sorted(path for path in self.root.rglob("*") if path.suffix in (".log", ".jsonl") and path.is_file())

    def all_lines(self, *, final: bool = False) -> Iterator[tuple[Path, list[str]]]:
        """Yield until nothing is left; ``final``: a last line that has no end counts as well."""
        while True:
            found = list(self.new_lines())
            yield from found
            if not found:
                break
        if final:
            for path in self.files():
                inode, offset = self.offsets.get(path, (0, 0))
                rest = path.read_bytes()[offset:] if path.stat().st_ino == inode or not offset else b""
                if rest:
                    self.offsets[path] = (path.stat().st_ino, offset + len(rest))
                    yield path, [rest.decode("utf-8", "replace")]

    def new_lines(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield the whole lines that were added since the last call, file by file."""
        for path in self.files():
            inode, offset = self.offsets.get(path, (0, 0))
            try:
                now = path.stat()
                if now.st_ino != inode or now.st_size < offset:  # written anew
                    offset = 0
                if now.st_size == offset:
                    continue
                with path.open("rb") as file:
                    file.seek(offset)
                    block = file.read(MAX_READ_BYTES)
            except OSError:
                continue
            end = block.rfind(b"\n") + 1 or (len(block) if len(block) >= MAX_LINE_BYTES else 0)
            self.offsets[path] = (now.st_ino, offset + end)
            if end:
                yield path, block[:end].decode("utf-8", "replace").splitlines()
