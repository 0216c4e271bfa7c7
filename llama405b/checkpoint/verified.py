"""Verify checkpoints while reading them: each block is compared with the manifest before anything in it is used.

DCP unpickles its metadata and everything that is not a tensor. Here, only DCP's own types are unpickled, so that nothing in a checkpoint
is executed. A manifest proves that a file is what was saved, not who saved it. Knows manifests, and DCP's reader and types; not which
checkpoint to use.
"""

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import os
import pathlib
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint import metadata as dcp_types
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from llama405b.contract.checkpoints import DATA_FILE, MANIFEST, METADATA, FileDigest, Manifest, read_manifest, step_of
from llama405b.contract.errors import UserError, reason_of, shorten
from llama405b.contract.files import write_access_problem
from llama405b.contract.hashes import BLOCK_BYTES, block_hash, n_blocks
from llama405b.contract.reader import MalformedError

_DCP_TYPES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, _StorageInfo, dcp_types._MEM_FORMAT_ENCODING, torch.Size, torch.serialization._get_layout),
)


class UnsafeError(UserError):
    """A file contains what our checkpoints never contain and what could run code as this user."""


def _getattr_of_enum(kind: object, name: str) -> object:
    """Stand in for ``getattr`` in a pickle, with which Python 3.11.0 to 3.11.3 write an enum's member."""
    members = dcp_types._MEM_FORMAT_ENCODING.__members__
    if kind is dcp_types._MEM_FORMAT_ENCODING and name in members:
        return members[name]
    raise UnsafeError(repr("builtins.getattr"))


ALLOWED_GLOBALS = {
    **{(each.__module__, each.__name__): each for each in _DCP_TYPES},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    **{
        (module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")
    },  # Python 3.13 moved it
    ("builtins", "getattr"): _getattr_of_enum,
}


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles only DCP's own types, and refuses all others by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_GLOBALS:
            raise UnsafeError(repr(shorten(f"{module}.{name}")))
        return ALLOWED_GLOBALS[module, name]


def read_metadata(file: Path) -> Metadata:
    """Unpickle DCP's metadata safely."""
    try:
        with file.open("rb") as stream:
            metadata = _RestrictedUnpickler(stream).load()
        if not _is_valid_metadata(metadata):
            raise TypeError
    except OSError:
        raise
    except UnsafeError as unknown:
        raise UnsafeError(
            f"{file}: holds {unknown}, which DCP's metadata never contains and which could run commands as you; do not use this checkpoint"
        ) from None
    except Exception as error:  # noqa: BLE001 - what is in a pickle can raise anything
        raise UserError(f"{file}: is not DCP's metadata ({type(error).__name__}); use another checkpoint") from None
    return metadata


def _is_valid_metadata(metadata: Any) -> bool:
    """Whether metadata has the types that are used before DCP checks it."""
    return (
        isinstance(metadata, Metadata)
        and all(
            isinstance(name, str) and _is_valid_entry(entry) for name, entry in metadata.state_dict_metadata.items()
        )
        and all(
            isinstance(index, MetadataIndex) and _is_valid_storage_info(info)
            for index, info in metadata.storage_data.items()
        )
    )


def _is_valid_entry(entry: Any) -> bool:
    if isinstance(entry, TensorStorageMetadata):
        return isinstance(entry.size, torch.Size) and isinstance(entry.properties.dtype, torch.dtype)
    return isinstance(entry, BytesStorageMetadata)


def _is_valid_storage_info(info: Any) -> bool:
    kinds = [type(value) for value in (info.relative_path, info.offset, info.length)]
    return isinstance(info, _StorageInfo) and kinds == [str, int, int]


class _CheckpointFileSystem(FileSystem):
    """Maps the names of a checkpoint's files to paths, for DCP."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self.path_of = path_of

    def concat_path(self, _path: str | os.PathLike[str], suffix: str) -> Path:
        """Return where a file is."""
        return self.path_of(suffix)


class TensorReader(FileSystemReader):
    """Reads tensors, and refuses pickled objects."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _CheckpointFileSystem(self.path_of)

    def path_of(self, name: str) -> Path:
        """Return where a file is."""
        return Path(self.path) / name

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata, unpickled safely."""
        return read_metadata(self.path_of(METADATA))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:
            names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
            _refuse_pickle(f"{self.path_of(names[0])}")


class TensorPlanner(DefaultLoadPlanner):
    """Loads only tensors."""

    def load_bytes(self, read_item: ReadItem, _value: object) -> None:
        """Refuse an item that DCP would unpickle."""
        _refuse_pickle(f"{read_item.dest_index.fqn} in the checkpoint")


def _refuse_pickle(name: str) -> NoReturn:
    raise UnsafeError(f"{name}: is not a tensor and could run commands as you; do not use this checkpoint")


THREADS = 4  # per rank; hashing releases the GIL


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


def hash_file(path: Path, rank: int) -> FileDigest:
    """Flush a file that ``rank`` wrote to its disk, and return its digest."""
    sync(path)
    size = path.stat().st_size
    return FileDigest(size, rank, tuple(block_hashes(path, range(n_blocks(size, BLOCK_BYTES)), BLOCK_BYTES)))


def sync(path: Path) -> None:
    """Flush a file to its disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def open_manifest(path: Path, saved_digests: Mapping[str, str]) -> Manifest | RejectedCheckpoint:
    """Return a checkpoint's manifest, or why it cannot be used; ``saved_digests``: the digests of those this run has saved, by path."""
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
    return manifest


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


class VerifiedReader(TensorReader):
    """Reads only what matches a manifest, and refuses everything else."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self.manifest, self.metadata = manifest, None
        self.verified_blocks = set[tuple[str, int]]()  # blocks that match
        self.on_progress: Callable[[int, int], None] = lambda *_: None

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata, which is verified and read once."""
        if self.metadata is None:
            self.check(METADATA, 0, self.manifest.files[METADATA].bytes)
            self.metadata = super().read_metadata()
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify and read the items of this rank's plan, several files at a time."""
        items_by_file: dict[str, list[ReadItem]] = collections.defaultdict(list)
        for item in plan.items:
            items_by_file[self.storage_data[item.storage_index].relative_path].append(item)
        read_bytes = 0
        total_bytes = sum(self._length(item) for item in plan.items)
        lock = threading.Lock()

        def read(items: list[ReadItem]) -> None:
            nonlocal read_bytes
            for item in sorted(items, key=lambda read_item: self.storage_data[read_item.storage_index].offset):
                info = self.storage_data[item.storage_index]
                self.check(info.relative_path, info.offset, info.length)
                # one item at a time, right after its blocks were verified
                super(VerifiedReader, self).read_data(dataclasses.replace(plan, items=[item]), planner)
                with lock:
                    read_bytes += self._length(item)
                    self.on_progress(read_bytes, total_bytes)

        with ThreadPoolExecutor(THREADS, "reader") as threads:
            list(threads.map(read, items_by_file.values()))
        future: Future[None] = Future()
        future.set_result(None)
        return future

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

    def _length(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].length)
