"""What a checkpoint's files are, and what is in them: manifests, hashes, and tensors in chunks.

Each block is compared with the manifest before anything in it is used. A manifest proves that a file is what was saved, not who saved it.
Knows one checkpoint's files; not which checkpoint to use, nor who asks.
"""

import concurrent.futures
import dataclasses
import enum
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from llama405b.checkpoint import legacy
from llama405b.checkpoint.index import DTYPES, Chunk, Index, kind_of
from llama405b.contract import reader
from llama405b.contract.checkpoints import (
    DATA_FILE,
    LEGACY_FORMAT,
    MANIFEST,
    FileDigest,
    Manifest,
    read_manifest,
    step_of,
)
from llama405b.contract.errors import UserError, reason_of
from llama405b.contract.files import write_access_problem
from llama405b.contract.hashes import block_hash
from llama405b.contract.reader import MalformedError
from llama405b.distributed.host_memory import OnByteProgress
from llama405b.spec.tensors import TensorInfo, TensorSlice, full_slice, read_header, relative_slice

THREADS = 4  # per rank; hashing releases the GIL
HEADER_LENGTH_BYTES = 8  # of a safetensors file, before its header


class CheckpointFault(enum.StrEnum):
    """Why resume does not use a checkpoint."""

    DAMAGED = "damaged"  # its content is not what was saved: it will never verify
    UNREADABLE = "unreadable"  # a permission, a mount or a disk prevents reading: it may be intact
    LATER = "later"  # the run goes back to an earlier step


@dataclasses.dataclass(frozen=True, slots=True)
class RejectedCheckpoint:
    """A checkpoint that resume does not use."""

    path: Path
    fault: CheckpointFault
    why: str  # names the file

    def __str__(self) -> str:
        return self.why


def open_manifest(
    path: Path, saved_digests: Mapping[str, str] = MappingProxyType({})
) -> tuple[Manifest, str] | RejectedCheckpoint:
    """Return a checkpoint's manifest and its digest, or why it cannot be used; ``saved_digests``: of those this run has saved, by path."""
    make_damaged = functools.partial(RejectedCheckpoint, path, CheckpointFault.DAMAGED)
    try:
        if not path.is_dir():
            return RejectedCheckpoint(path, CheckpointFault.UNREADABLE, f"{path}: no such checkpoint")
        manifest, digest = read_manifest((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return make_damaged(f"{path}: has no manifest")
    except MalformedError as error:
        return make_damaged(f"{path}: its manifest does not verify ({error})")
    except OSError as error:
        return RejectedCheckpoint(path, CheckpointFault.UNREADABLE, f"{path}: cannot be read ({reason_of(error)})")
    if manifest.step != step_of(path):
        return make_damaged(f"{path}: its manifest is for step {manifest.step}")
    if saved_digests.get(str(path), digest) != digest:
        return make_damaged(f"{path}: its manifest is not the one that was saved")
    return manifest, digest


def write_access_warning(path: Path, manifest: Manifest) -> str:
    """Return a warning about the first file that other users can write; '' if there is none."""
    for file in (path, path / MANIFEST, *(path / name for name in manifest.files)):
        if file.exists() and (problem := write_access_problem(file.stat())):
            return (
                f"warning: {file}: {problem}; hashes prove that it is complete, not that it is safe: continue only if you trust "
                "whoever can write it"
            )
    return ""


def check_files(path: Path, manifest: Manifest) -> tuple[list[str], RejectedCheckpoint | None]:
    """Return the files that look intact, and the first fault; tensors are verified when they are loaded."""
    intact_names, faults = list[str](), list[RejectedCheckpoint]()
    for name, digest in manifest.files.items():
        if reason := _find_file_fault(path / name, digest, manifest.block_bytes):
            faults.append(RejectedCheckpoint(path, CheckpointFault.DAMAGED, f"{path / name}: {reason}"))
        else:
            intact_names.append(name)
    return intact_names, faults[0] if faults else None


def _find_file_fault(file: Path, digest: FileDigest, block_bytes: int) -> str:
    if not file.exists():
        return "missing"
    if file.stat().st_size != digest.bytes:
        return f"{file.stat().st_size} bytes, but the manifest says {digest.bytes}"
    if DATA_FILE.fullmatch(file.name):
        with file.open("rb"):
            return ""
    if tuple(block_hashes(file, range(len(digest.blocks)), block_bytes)) != digest.blocks:
        return "its content does not match its checksum"
    return ""


def block_hashes(path: Path, blocks: Iterable[int], block_bytes: int) -> Iterable[str]:
    """Yield the SHA-256 of some blocks of a file, in their order."""
    with path.open("rb") as file, concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(lambda block: block_hash(file.fileno(), block, block_bytes), blocks)


class DamagedError(UserError):
    """A file of a checkpoint differs from what was saved."""

    def __init__(self, message: str, file: str = "") -> None:
        """``file``: its name in the checkpoint."""
        super().__init__(message)
        self.file = file


class Target(NamedTuple):
    """A part of a tensor that is to be read."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    box: TensorSlice
    tensor: Tensor  # filled with that part, in its own dtype and on its own device


class ChunkRead(NamedTuple):
    """What to copy out of a chunk."""

    name: str
    chunk: Chunk
    destination: Tensor
    box: TensorSlice  # of the chunk


class Extent(NamedTuple):
    """Where the bytes of a chunk are."""

    file: str  # its name in the checkpoint
    offset: int
    length: int


class CheckpointReader:
    """Reads only what matches a manifest, and refuses everything else."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        path_of: Callable[[str], Path] | None = None,
        on_progress: OnByteProgress = lambda *_: None,
    ) -> None:
        """``path_of``: where this host has a file; None: all are in the checkpoint's directory."""
        self.path, self.manifest = path, manifest
        self.path_of = path_of or path.joinpath
        self.on_progress = on_progress
        self.verified_blocks = set[tuple[str, int]]()  # blocks that match
        self.extents: dict[tuple[str, int, TensorSlice], Extent] = {}  # where parts are: by tensor, rank and box
        self.opened_files = set[str]()

    @functools.cached_property
    def index(self) -> Index:
        """The tensors of the checkpoint; verified, and read once.

        Raises:
            DamagedError: It is not what was saved, or does not make sense.
        """
        name = self.manifest.index_file
        self.check(name, 0, self.manifest.files[name].bytes)
        if self.manifest.format == LEGACY_FORMAT:
            index, places = legacy.read_index(self.path_of(name))
            self.extents = {(name, chunk.rank, chunk.box): Extent(*place) for (name, chunk), place in places.items()}
            return index
        try:
            return reader.loads(Index, self.path_of(name).read_bytes(), name)
        except MalformedError as error:
            raise DamagedError(f"{self.path}: {error}", name) from None

    def plan(self, targets: Iterable[Target]) -> list[ChunkRead]:
        """Return which chunks must be read to fill the targets.

        Raises:
            UserError: The checkpoint does not hold one of them.
            DamagedError: The parts of a tensor do not cover it, or overlap.
        """
        reads = []
        for name, shape, target_box, tensor in targets:
            saved = self.index.tensors.get(name)
            if saved is None:
                raise UserError(
                    f"{self.path}: does not hold {name}; it is of another model or optimizer: use a checkpoint of this one"
                )
            if saved.shape != shape:
                raise UserError(
                    f"{self.path}: {name} is {[*saved.shape]} there, but {[*shape]} here; use a checkpoint of this model"
                )
            if not self.index.is_covered(name):
                raise DamagedError(
                    f"{self.path}: its parts of {name} are not the whole tensor", self.manifest.index_file
                )
            for chunk in self.index.chunks(name):
                box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(target_box, chunk.box, strict=True))
                if all(start < stop for start, stop in box):
                    destination = tensor.detach()[_slices(relative_slice(target_box, box))]
                    reads.append(ChunkRead(name, chunk, destination, relative_slice(chunk.box, box)))
        return reads

    def files_of(self, reads: Iterable[ChunkRead]) -> set[str]:
        """Return the names of the files that must be opened for some chunks."""
        if self.manifest.format == LEGACY_FORMAT:
            return {self._extent_of(read.name, read.chunk).file for read in reads}
        kinds = {(kind_of(read.name, self.index.tensors[read.name].n_bytes), read.chunk.rank) for read in reads}
        matches = [match for name in self.manifest.files if (match := DATA_FILE.fullmatch(name))]
        return {match[0] for match in matches if (match[1], int(match[2])) in kinds}

    def read(self, reads: Sequence[ChunkRead]) -> None:
        """Verify and read chunks, several files at a time.

        Raises:
            DamagedError: What is read is not what was saved.
            UnsafeError: It is not a tensor.
            OSError: It cannot be read.
        """
        if self.manifest.format != LEGACY_FORMAT:
            self._open(self.files_of(reads) - self.opened_files)
        located = sorted((self._extent_of(read.name, read.chunk), number) for number, read in enumerate(reads))
        by_file = [[*group] for _, group in itertools.groupby(located, lambda entry: entry[0].file)]
        n_read, n_bytes, lock = 0, sum(extent.length for extent, _ in located), threading.Lock()

        def read_file(entries: Sequence[tuple[Extent, int]]) -> None:
            nonlocal n_read
            for extent, number in entries:
                name, chunk, destination, box = reads[number]
                content = self._read_chunk(extent, self.index.tensors[name].dtype, chunk)
                destination.copy_(content[_slices(box)])
                with lock:
                    n_read += extent.length
                    self.on_progress(n_read, n_bytes)

        with ThreadPoolExecutor(THREADS, "reader") as threads:
            list(threads.map(read_file, by_file))

    def read_whole(self, name: str) -> Tensor:
        """Return a whole tensor in the dtype in which it was saved; see ``read``."""
        saved = self.index.tensors[name]
        tensor = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        self.read(self.plan([Target(name, saved.shape, full_slice(saved.shape), tensor)]))
        return tensor

    def _open(self, files: Iterable[str]) -> None:
        """Find out from the headers of files which parts are in them, and where."""
        names = sorted(files)
        with ThreadPoolExecutor(THREADS, "reader") as threads:
            for file, header in zip(names, threads.map(self._read_header, names), strict=True):
                for name, info in header.items():
                    saved = self.index.tensors.get(name)
                    if saved is None or (info.dtype, info.shape) != (saved.dtype, saved.shape):
                        raise DamagedError(f"{self.path_of(file)}: its {name} is not that of the index", file)
                    for part in info.stored_slices:
                        place = name, self.manifest.files[file].rank, part.box
                        if place in self.extents:
                            raise DamagedError(
                                f"{self.path_of(file)}: has a part of {name} that another file has", file
                            )
                        self.extents[place] = Extent(file, part.offset, info.slice_bytes(part.box))
                self.opened_files.add(file)

    def _extent_of(self, name: str, chunk: Chunk) -> Extent:
        try:
            return self.extents[name, chunk.rank, chunk.box]
        except KeyError:
            raise DamagedError(f"{self.path}: rank {chunk.rank}'s part of {name} is not in its files") from None

    def _read_header(self, name: str) -> Mapping[str, TensorInfo]:
        path = self.path_of(name)
        self.check(name, 0, min(HEADER_LENGTH_BYTES, self.manifest.files[name].bytes))
        with path.open("rb") as file:
            length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        self.check(name, 0, HEADER_LENGTH_BYTES + length)
        try:
            return read_header(path)
        except UserError:
            raise DamagedError(f"{path}: its header cannot be read", name) from None

    def _read_chunk(self, extent: Extent, dtype: str, chunk: Chunk) -> Tensor:
        self.check(*extent)
        path = self.path_of(extent.file)
        content = torch.empty(extent.length, dtype=torch.uint8)
        memory = memoryview(content.numpy())
        with path.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            while memory:  # a call reads at most 2 GiB
                if not (n_bytes := file.readinto(memory)):
                    raise DamagedError(f"{path}: shrank while it was being read", extent.file)
                memory = memory[n_bytes:]
        shape = [stop - start for start, stop in chunk.box]
        if self.manifest.format != LEGACY_FORMAT:
            return content.view(DTYPES[dtype]).view(shape)
        tensor = legacy.decode_chunk(content.numpy().tobytes(), path)
        if [*tensor.shape] != shape:  # a smaller one would be spread over the part
            raise DamagedError(f"{path}: has {[*tensor.shape]} where {shape} should be", extent.file)
        return tensor

    def check(self, name: str, offset: int, length: int) -> None:
        """Compare the blocks of a range of a file with the manifest; each block is read once."""
        block_bytes, digest = self.manifest.block_bytes, self.manifest.files.get(name)
        if digest is None:
            raise DamagedError(f"{self.path}/{name}: is not in its manifest", name)
        file = self.path_of(name)
        if not file.is_file() or file.stat().st_size != digest.bytes:
            raise DamagedError(f"{file}: missing, or its size differs from what was saved", name)
        if not 0 <= offset <= offset + length <= digest.bytes:
            raise DamagedError(f"{file}: is too short for what should be in it", name)
        blocks = range(offset // block_bytes, -(-(offset + length) // block_bytes))
        unverified = [block for block in blocks if (name, block) not in self.verified_blocks]
        for block, block_digest in zip(unverified, block_hashes(file, unverified, block_bytes), strict=True):
            if block_digest != digest.blocks[block]:
                position = f"block {block + 1} of {len(digest.blocks)}"
                raise DamagedError(f"{file}: its content does not match its checksum ({position})", name)
            self.verified_blocks.add((name, block))


def _slices(box: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
