"""Hashes of a checkpoint's files, block by block, and what they reveal. Knows files and manifests; not tensors."""

import concurrent.futures
import dataclasses
import enum
import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from llama405b.contract.checkpoints import DATA_FILE, MANIFEST, FileDigest, Manifest, read_manifest, step_of
from llama405b.contract.hashes import BLOCK_BYTES, block_hash, n_blocks
from llama405b.contract.phrases import reason_of
from llama405b.contract.reader import MalformedError
from llama405b.contract.trust import others_in

THREADS = 4  # per rank; hashing releases the GIL


class Fault(enum.StrEnum):
    """Why a checkpoint is not the one to resume from."""

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
    """Flush a file that ``rank`` wrote to its disk, and hash it."""
    sync(path)
    size = path.stat().st_size
    return FileDigest(size, rank, tuple(block_hashes(path, range(n_blocks(size, BLOCK_BYTES)), BLOCK_BYTES)))


def sync(path: Path) -> None:
    """Flush a file or a directory to its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_manifest(path: Path, saved: Mapping[str, str]) -> Manifest | PassedOver:
    """Read a checkpoint's manifest; ``saved``: the digests of those this run has saved, by path."""
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
    """Warn of what others can write in a checkpoint, the first of it; '' if nobody can."""
    for file in (path, path / MANIFEST, *(path / name for name in manifest.files)):
        if file.exists() and (who := others_in(file.stat())):
            return (
                f"warning: {file}: {who}; its hashes say that it is whole, never that it is harmless: go on only if you trust "
                "whoever can write it"
            )
    return ""


def check_files(path: Path, manifest: Manifest) -> tuple[list[str], PassedOver | None]:
    """Return the files of a checkpoint that are there, and the first fault that is seen without reading its tensors.

    Tensors are verified as they are loaded.
    """
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
