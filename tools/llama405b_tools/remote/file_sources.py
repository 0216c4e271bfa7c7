"""What can be sent down a chain: files as they are, or the part of a checkpoint that one host needs. Standard library."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

from llama405b.contract.errors import UserError
from llama405b.contract.hashes import BLOCK_BYTES, Blocks, Hashes
from llama405b.contract.parts import Part
from llama405b.contract.tensors import INDEX, Layout, fingerprint_of, part_file, read_tensors
from llama405b.contract.weights import SMALL_FILES

CHUNK = 4 << 20
FileList = list[tuple[str, int]]  # path below the root, bytes


class FileSource(Protocol):
    """Where the bytes come from."""

    files: FileList

    def blocks(self, name: str) -> Blocks | None:
        """Return the hashes of a file's blocks, if they are known without reading it."""

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on.

        Raises:
            OSError: It cannot be read, or is not what was noted.
        """


def open_files(root: Path, part: Part | None, names: Sequence[str] = ()) -> FileSource:
    """Return a file, a directory or some files of it, or the part of a checkpoint.

    Raises:
        UserError: It is to be a part, but the directory does not have a whole checkpoint.
    """
    if part:
        return PartSource(root, part)
    files = [(name, (root / name).stat().st_size) for name in names]
    return DirectorySource(root, files or list_files(root))


def list_files(root: Path) -> FileList:
    """Regular files below a directory (or the file itself), by name, without hidden ones."""
    if root.is_file():
        return [(root.name, root.stat().st_size)]
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    names = [path.relative_to(root) for path in found]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [(str(name), (root / name).stat().st_size) for name in visible]


class DirectorySource:
    """Files as they are; ``known``: what is known of their blocks."""

    def __init__(self, root: Path, files: FileList, known: Callable[[str], Blocks | None] | None = None) -> None:
        self.root, self.files = root if root.is_dir() else root.parent, files
        self.sizes = dict(files)
        self.blocks = known or Hashes(self.root).blocks_of

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on."""
        with (self.root / name).open("rb") as file:
            yield from _range(file, begin, self.sizes[name] - begin)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """A file of a part: what it begins with, and the pieces of a file of the whole that follow (offset, bytes)."""

    header: bytes
    pieces: Sequence[tuple[int, int]] = ()
    whole: Path | None = None

    @property
    def size(self) -> int:
        return len(self.header) + sum(size for _, size in self.pieces)


class PartSource:
    """The rows of one host's ranks, as files of their own, and the small files beside the weights.

    A block of which the hash is known is read as a whole and verified, whatever is needed of it.
    """

    def __init__(self, root: Path, part: Part) -> None:
        """Plan the files; the index comes last, since it makes the part whole."""
        tensors = read_tensors(root)
        if any(info.pieces for info in tensors.values()):
            raise UserError(f"{root}: has only a part of the weights; push parts from where all of them are")
        small = [name for name in SMALL_FILES if (root / name).is_file()]
        self.small = DirectorySource(root, [(name, (root / name).stat().st_size) for name in small])
        self.hashes = Hashes(root)
        by_file: dict[Path, Layout] = {}
        for name, info in tensors.items():
            by_file.setdefault(info.file, {})[name] = info
        whole, boxes = fingerprint_of(tensors), part.boxes({name: info.shape for name, info in tensors.items()})
        self.cuts = {
            f"{part.name}/{path.name}": _Cut(*part_file(held, boxes, whole), path)
            for path, held in by_file.items()
            if held.keys() & boxes.keys()
        }
        listed = {name: info.file.name for name, info in tensors.items() if name in boxes}
        self.cuts[f"{part.name}/{INDEX}"] = _Cut(json.dumps({"metadata": {}, "weight_map": listed}).encode())
        self.files = [*self.small.files, *((name, cut.size) for name, cut in self.cuts.items())]

    def blocks(self, name: str) -> Blocks | None:
        """Return what is known of a small file; a part's blocks are not those of the whole."""
        return None if name in self.cuts else self.small.blocks(name)

    def read(self, name: str, begin: int) -> Iterator[bytes]:
        """Yield the content of a file from a byte on."""
        if name not in self.cuts:
            yield from self.small.read(name, begin)
            return
        for chunk in self._read_cut(self.cuts[name]):
            yield chunk[begin:]
            begin = max(0, begin - len(chunk))

    def _read_cut(self, cut: _Cut) -> Iterator[bytes]:
        yield cut.header
        if not cut.whole:
            return
        with cut.whole.open("rb") as file:
            verified = _Verified(file, self.hashes)
            for offset, size in cut.pieces:
                yield from verified.read(offset, size)


class _Verified:
    """Reads ranges of a file, block by block where their hashes are known: each is read once, and verified."""

    def __init__(self, file: IO[bytes], hashes: Hashes) -> None:
        self.file = file
        self.blocks = hashes.blocks_of(Path(file.name).name)
        self.number, self.block = -1, memoryview(b"")

    def read(self, offset: int, size: int) -> Iterator[bytes]:
        if self.blocks is None:
            yield from _range(self.file, offset, size)
            return
        end = offset + size
        while offset < end:
            number, begin = divmod(offset, BLOCK_BYTES)
            if number != self.number:
                self._load(number)
            piece = bytes(self.block[begin : begin + min(CHUNK, end - offset)])
            yield piece
            offset += len(piece)

    def _load(self, number: int) -> None:
        assert self.blocks
        self.file.seek(number * BLOCK_BYTES)
        block = self.file.read(BLOCK_BYTES)
        if hashlib.sha256(block).hexdigest() != self.blocks[number]:
            raise OSError(
                f"{self.file.name} is damaged (SHA-256 of block {number}); delete it, and download or push it again"
            )
        self.number, self.block = number, memoryview(block)


def _range(file: IO[bytes], offset: int, size: int) -> Iterator[bytes]:
    file.seek(offset)
    while size:
        chunk = file.read(min(CHUNK, size))
        if not chunk:
            raise OSError(f"{file.name} shrank while it was being sent")
        size -= len(chunk)
        yield chunk


def blocks_before(blocks: Blocks, other: Blocks) -> int:
    """Return how many blocks are equal before the first that is not."""
    return next(
        (number for number, pair in enumerate(zip(blocks, other, strict=True)) if pair[0] != pair[1]), len(blocks)
    )
