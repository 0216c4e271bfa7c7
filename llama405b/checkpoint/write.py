"""Write this rank's part of a checkpoint with DCP, in several threads, hashing each block on its way to the disk.

torch loses the errors of all writer threads but one, and would then commit a checkpoint that lacks their tensors: what was
written is counted here.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llama405b.contract.checkpoints import BLOCK_BYTES, DATA_FILE, Seal

THREADS = 4  # per rank; hashing and writing release the GIL


class SealingWriter(dcp.FileSystemWriter):
    """Writes into an empty directory; then knows the seals of the data files that this rank wrote."""

    def __init__(self, path: Path, rank: int, *, in_cpu_memory: bool) -> None:
        """``in_cpu_memory``: where the tensors are; copies from a GPU are overlapped by one thread alone."""
        threads = THREADS if in_cpu_memory else 1
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=threads, overwrite=False)
        self.fs = self.sealing = _Sealing(rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; DCP tells all ranks what is raised.

        Raises:
            Exception: A thread's own, or that something was not written.
        """
        written = super().write_data(plan, planner)
        if len(written.wait()) != len(plan.items):
            raise next(iter(self.sealing.faults), RuntimeError("a writer thread died"))
        return written

    @property
    def seals(self) -> dict[str, Seal]:
        """The seals by name."""
        return self.sealing.seals


class _Sealing(FileSystem):
    """DCP's files, of which those with data are sealed as they are written."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seals, self.faults = rank, dict[str, Seal](), list[Exception]()

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        if mode != "wb" or not DATA_FILE.fullmatch(Path(path).name):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with Path(path).open("wb") as file:
                hashing = _Hashing(file)
                yield hashing
                file.flush()
                os.fsync(file.fileno())
            self.seals[Path(path).name] = Seal(hashing.written, self.rank, hashing.blocks())
        except Exception as error:
            self.faults.append(error)
            raise


class _Hashing(io.RawIOBase):
    """A file that is written from its beginning to its end, and hashed block by block."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.written, self.done, self.block = file, 0, list[str](), hashlib.sha256()

    def write(self, content: "bytes | memoryview") -> int:  # type: ignore[override]
        """Write, and hash."""
        view = memoryview(content).cast("B")
        size = len(view)
        while view:
            room = BLOCK_BYTES - self.written % BLOCK_BYTES
            piece, view = view[:room], view[room:]
            self.file.write(piece)
            self.block.update(piece)
            self.written += len(piece)
            if self.written % BLOCK_BYTES == 0:
                self.done.append(self.block.hexdigest())
                self.block = hashlib.sha256()
        return size

    def blocks(self) -> tuple[str, ...]:
        """Return the hash of each block; an empty file has one."""
        if self.written % BLOCK_BYTES or not self.done:
            return (*self.done, self.block.hexdigest())
        return tuple(self.done)

    def tell(self) -> int:
        """Return how much has been written."""
        return self.written

    def writable(self) -> bool:
        """Yes."""
        return True

    def flush(self) -> None:
        """Let the file do that."""
        self.file.flush()

    def fileno(self) -> int:
        """Return the file's own."""
        return self.file.fileno()


def kept_in_cpu_memory(kept: torch.nn.Module) -> bool:
    """Return whether a module's parameters are in CPU memory."""
    return next(kept.parameters()).device.type == "cpu"
