"""Secrets on their way to the ranks or a guard, and out of the logs of those that print them. Standard library."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

COVER = b"REDACTED"
BLOCK_BYTES = 1 << 20


def write_secrets(path: Path, secrets: dict[str, str]) -> None:
    """Write secrets for the node runner."""
    write_private(path, json.dumps(secrets))


def write_private(path: Path, text: str) -> None:
    """Write a new file that is readable only by this user, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def read_secrets(path: Path) -> dict[str, str]:
    """Read the secrets; {} if there is no file."""
    try:
        secrets = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {str(name): str(value) for name, value in secrets.items()}


class LogMask:
    """The pieces of secret values, and how far each log below a directory has been searched for them."""

    def __init__(self, root: Path, pieces: Sequence[str]) -> None:
        """Begin at the files' present ends: earlier attempts have searched them."""
        self.root, self.pieces = root, [piece.encode() for piece in pieces]
        self.overlap = max(map(len, self.pieces), default=1) - 1  # of two blocks: a piece may lie across their border
        self.done: dict[Path, tuple[int, int]] = {}  # inode, and bytes
        for path in self._logs():
            self.done[path] = (path.stat().st_ino, path.stat().st_size)

    def cover_all(self) -> None:
        """Search all that was added to every log."""
        for path in self._logs():
            self.cover(path)

    def cover(self, path: Path) -> None:
        """Search what was added to a log; what cannot be overwritten now is tried again with what is added next."""
        if self.pieces:
            with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
                inode, done = self.done.get(path, (0, 0))
                now = os.fstat(file.fileno())
                if now.st_ino != inode or now.st_size < done:  # rewritten
                    done = 0
                self.done[path] = now.st_ino, self._cover_from(file.fileno(), max(0, done - self.overlap))

    def _cover_from(self, descriptor: int, position: int) -> int:
        """Overwrite all pieces from a position on; returns where the file ended."""
        while True:
            block = os.pread(descriptor, BLOCK_BYTES, position)
            for piece in self.pieces:
                at = block.find(piece)
                while at >= 0:
                    os.pwrite(descriptor, COVER.ljust(len(piece), b"*")[: len(piece)], position + at)
                    at = block.find(piece, at + len(piece))
            if len(block) <= self.overlap:
                return position + len(block)
            position += len(block) - self.overlap

    def _logs(self) -> list[Path]:
        return sorted(self.root.rglob("*.log")) if self.pieces else []
