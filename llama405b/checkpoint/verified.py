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
from llama405b.contract.errors import UserError, reason_of, short
from llama405b.contract.files import others_in
from llama405b.contract.hashes import BLOCK_BYTES, block_hash, n_blocks
from llama405b.contract.reader import MalformedError

_OF_DCP = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, _StorageInfo, dcp_types._MEM_FORMAT_ENCODING, torch.Size, torch.serialization._get_layout),
)


class UnsafeError(UserError):
    """A file contains what our checkpoints never contain and what could run code as this user."""


def _member(kind: object, name: str) -> object:
    """Stand in for ``getattr`` in a pickle, with which Python 3.11.0 to 3.11.3 write an enum's member."""
    members = dcp_types._MEM_FORMAT_ENCODING.__members__
    if kind is dcp_types._MEM_FORMAT_ENCODING and name in members:
        return members[name]
    raise UnsafeError(repr("builtins.getattr"))


KNOWN = {
    **{(each.__module__, each.__name__): each for each in _OF_DCP},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    **{
        (module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")
    },  # Python 3.13 moved it
    ("builtins", "getattr"): _member,
}


class _OnlyKnown(pickle.Unpickler):
    """Unpickles only DCP's own types, and refuses all others by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise UnsafeError(repr(short(f"{module}.{name}")))
        return KNOWN[module, name]


def read_metadata(file: Path) -> Metadata:
    """Unpickle DCP's metadata safely."""
    try:
        with file.open("rb") as opened:
            found = _OnlyKnown(opened).load()
        if not _is_sound(found):
            raise TypeError
    except OSError:
        raise
    except UnsafeError as unknown:
        raise UnsafeError(
            f"{file}: holds {unknown}, which DCP's metadata never contains and which could run commands as you; do not use this checkpoint"
        ) from None
    except Exception as error:  # noqa: BLE001 - what is in a pickle can raise anything
        raise UserError(f"{file}: is not DCP's metadata ({type(error).__name__}); use another checkpoint") from None
    return found


def _is_sound(found: Any) -> bool:
    """Whether metadata has the types that are used before DCP checks it."""
    return (
        isinstance(found, Metadata)
        and all(isinstance(name, str) and _is_entry(entry) for name, entry in found.state_dict_metadata.items())
        and all(isinstance(index, MetadataIndex) and _is_place(where) for index, where in found.storage_data.items())
    )


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, TensorStorageMetadata):
        return isinstance(entry.size, torch.Size) and isinstance(entry.properties.dtype, torch.dtype)
    return isinstance(entry, BytesStorageMetadata)


def _is_place(where: Any) -> bool:
    kinds = [type(each) for each in (where.relative_path, where.offset, where.length)]
    return isinstance(where, _StorageInfo) and kinds == [str, int, int]


class _Places(FileSystem):
    """Maps the names of a checkpoint's files to paths, for DCP."""

    def __init__(self, at: Callable[[str], Path]) -> None:
        self.at = at

    def concat_path(self, _path: str | os.PathLike[str], suffix: str) -> Path:
        """Return where a file is."""
        return self.at(suffix)


class TensorReader(FileSystemReader):
    """Reads tensors, and refuses pickled objects."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _Places(self.at)

    def at(self, name: str) -> Path:
        """Return where a file is."""
        return Path(self.path) / name

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata, unpickled safely."""
        return read_metadata(self.at(METADATA))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:
            names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
            _refuse(f"{self.at(names[0])}")


class TensorPlanner(DefaultLoadPlanner):
    """Loads only tensors."""

    def load_bytes(self, read_item: ReadItem, _value: object) -> None:
        """Refuse an item that DCP would unpickle."""
        _refuse(f"{read_item.dest_index.fqn} in the checkpoint")


def _refuse(what: str) -> NoReturn:
    raise UnsafeError(f"{what}: is not a tensor and could run commands as you; do not use this checkpoint")


THREADS = 4  # per rank; hashing releases the GIL


class Fault(enum.StrEnum):
    """Why resume does not use a checkpoint."""

    DAMAGED = "damaged"  # its content is not what was saved: it will never verify
    UNREADABLE = "unreadable"  # a permission, a mount or a disk prevents reading: it may be intact
    LATER = "later"  # the run goes back to an earlier step


@dataclasses.dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that resume does not use."""

    path: Path
    fault: Fault
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


def open_manifest(path: Path, saved: Mapping[str, str]) -> Manifest | PassedOver:
    """Return a checkpoint's manifest, or why it cannot be used; ``saved``: the digests of those this run has saved, by path."""
    damaged = functools.partial(PassedOver, path, Fault.DAMAGED)
    try:
        if not path.is_dir():
            return PassedOver(path, Fault.UNREADABLE, f"{path}: no such checkpoint")
        manifest, digest = read_manifest((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return damaged(f"{path}: has no manifest")
    except MalformedError as error:
        return damaged(f"{path}: its manifest does not verify ({error})")
    except OSError as error:
        return PassedOver(path, Fault.UNREADABLE, f"{path}: cannot be read ({reason_of(error)})")
    if manifest.step != step_of(path):
        return damaged(f"{path}: its manifest is for step {manifest.step}")
    if saved.get(str(path), digest) != digest:
        return damaged(f"{path}: its manifest is not the one that was saved")
    return manifest


def warning_of(path: Path, manifest: Manifest) -> str:
    """Return a warning about the first file that other users can write; '' if there is none."""
    for file in (path, path / MANIFEST, *(path / name for name in manifest.files)):
        if file.exists() and (who := others_in(file.stat())):
            return (
                f"warning: {file}: {who}; hashes prove that it is complete, not that it is safe: continue only if you trust "
                "whoever can write it"
            )
    return ""


def check_files(path: Path, manifest: Manifest) -> tuple[list[str], PassedOver | None]:
    """Return the files that look intact, and the first fault; tensors are verified when they are loaded."""
    good, faults = list[str](), list[PassedOver]()
    for name, sealed in manifest.files.items():
        if why := _fault_of(path / name, sealed, manifest.block_bytes):
            faults.append(PassedOver(path, Fault.DAMAGED, f"{path / name}: {why}"))
        else:
            good.append(name)
    return good, faults[0] if faults else None


def _fault_of(file: Path, sealed: FileDigest, block_bytes: int) -> str:
    if not file.exists():
        return "missing"
    if file.stat().st_size != sealed.bytes:
        return f"{file.stat().st_size} bytes, but the manifest says {sealed.bytes}"
    if DATA_FILE.fullmatch(file.name):
        with file.open("rb"):
            return ""
    if tuple(block_hashes(file, range(len(sealed.blocks)), block_bytes)) != sealed.blocks:
        return "its content does not match its checksum"
    return ""


def block_hashes(path: Path, blocks: Iterable[int], block_bytes: int) -> Iterable[str]:
    """Yield the SHA-256 of some blocks of a file, in their order."""
    with path.open("rb") as file, concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(lambda block: block_hash(file.fileno(), block, block_bytes), blocks)


class DamagedError(UserError):
    """A file of a checkpoint differs from what was saved."""

    def __init__(self, words: str, file: str = "") -> None:
        """``file``: its name in the checkpoint."""
        super().__init__(words)
        self.file = file


class VerifiedReader(TensorReader):
    """Reads only what matches a manifest, and refuses everything else."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self.manifest, self.metadata = manifest, None
        self.good = set[tuple[str, int]]()  # blocks that match
        self.told: Callable[[int, int], None] = lambda *_: None

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata, which is verified and read once."""
        if self.metadata is None:
            self.check(METADATA, 0, self.manifest.files[METADATA].bytes)
            self.metadata = super().read_metadata()
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify and read the items of this rank's plan, several files at a time."""
        of_file: dict[str, list[ReadItem]] = collections.defaultdict(list)
        for item in plan.items:
            of_file[self.storage_data[item.storage_index].relative_path].append(item)
        done = 0
        total = sum(self._length(item) for item in plan.items)
        lock = threading.Lock()

        def read(items: list[ReadItem]) -> None:
            nonlocal done
            for item in sorted(items, key=lambda each: self.storage_data[each.storage_index].offset):
                where = self.storage_data[item.storage_index]
                self.check(where.relative_path, where.offset, where.length)
                # one item at a time, right after its blocks were verified
                super(VerifiedReader, self).read_data(dataclasses.replace(plan, items=[item]), planner)
                with lock:
                    done += self._length(item)
                    self.told(done, total)

        with ThreadPoolExecutor(THREADS, "reader") as threads:
            list(threads.map(read, of_file.values()))
        finished: Future[None] = Future()
        finished.set_result(None)
        return finished

    def check(self, name: str, offset: int, length: int) -> None:
        """Compare the blocks of a range of a file with the manifest; each block is read once."""
        size, sealed = self.manifest.block_bytes, self.manifest.files.get(name)
        if sealed is None:
            raise DamagedError(f"{self.path}/{name}: is not in its manifest", name)
        file = self.at(name)
        if not file.is_file() or file.stat().st_size != sealed.bytes:
            raise DamagedError(f"{file}: missing, or its size differs from what was saved", name)
        if not 0 <= offset <= offset + length <= sealed.bytes:
            raise DamagedError(f"{file}: is too short for what should be in it", name)
        blocks = range(offset // size, -(-(offset + length) // size))
        unknown = [block for block in blocks if (name, block) not in self.good]
        for block, found in zip(unknown, block_hashes(file, unknown, size), strict=True):
            if found != sealed.blocks[block]:
                where = f"block {block + 1} of {len(sealed.blocks)}"
                raise DamagedError(f"{file}: its content does not match its checksum ({where})", name)
            self.good.add((name, block))

    def _length(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].length)
