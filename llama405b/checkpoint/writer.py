"""Write this rank's part of a checkpoint in DCP's format, in several threads, hashing each block on its way to the disk.

The weights are in files of their own: whoever wants only them, to export a model, need not bring the rest from other hosts.
Knows DCP's plan and files; where the tensors live, and what changes them meanwhile, is ``CopyOnUpdate``'s.
"""

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from llama405b.checkpoint.copy_on_update import CopyOnUpdate, give_way
from llama405b.contract.checkpoints import WEIGHTS, FileDigest
from llama405b.contract.direct import DirectFile
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher

THREADS = 4  # per rank; hashing and writing release the GIL
PIECE_BYTES = 1 << 20  # hashed while it is in the CPU's cache


class SealingWriter(dcp.FileSystemWriter):
    """Writes into an empty directory; then knows the seals of the data files that this rank wrote."""

    def __init__(self, path: Path, rank: int, frozen: CopyOnUpdate) -> None:
        super().__init__(path, overwrite=False)
        self.directory = path
        self.rank = rank
        self.frozen = frozen
        self.digests: dict[str, FileDigest] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Demand the directory that its owner made: torch would make it, below the mount point of a filesystem that is not mounted.

        Raises:
            OSError: This rank does not see it.
        """
        self.directory.stat()
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and flush it to the disk; DCP tells all ranks what is raised."""
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        self.frozen.plan([planner.resolve_data(item).detach() for item in tensors])
        names = [f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}" for number in range(2 * THREADS)]
        small = iter([item for item in plan.items if item.type is WriteItemType.BYTE_IO])  # for whoever comes first

        def write_some(thread: int) -> list[WriteResult]:
            with (
                self._sealing(names[thread], weights=True) as weights,
                self._sealing(names[THREADS + thread], weights=False) as others,
            ):
                found = [others.add(item, planner.resolve_data(item)) for item in small]
                for number, tensor in self.frozen.read():
                    item = tensors[number]
                    output = weights if item.index.fqn.startswith(WEIGHTS) else others
                    found.append(output.add(item, tensor))
                return found

        with ThreadPoolExecutor(THREADS, "writer", give_way) as threads:
            parts = [threads.submit(write_some, thread) for thread in range(THREADS)]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for part in parts for result in part.result()])
        assert len(done.value()) == len(plan.items)
        return done

    @contextlib.contextmanager
    def _sealing(self, name: str, *, weights: bool) -> "Iterator[_Hashing]":
        """Open a file that is flushed to its disk at the end, and sealed; an error ends the other threads too."""
        try:
            with contextlib.closing(DirectFile(self.directory / name, fill=_fill)) as file:
                yield (output := _Hashing(file))
                file.flush()
        except BaseException:
            self.frozen.abandon()
            raise
        self.digests[name] = FileDigest(output.hasher.written, self.rank, output.hasher.blocks, weights=weights)


def _fill(memory: memoryview, data: memoryview) -> None:
    """Copy without holding the GIL, which training needs meanwhile."""
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(data, np.uint8)


class _Hashing(io.RawIOBase):
    """A file that is written from its beginning to its end, and hashed block by block."""

    def __init__(self, file: DirectFile) -> None:
        self.file, self.hasher = file, BlockHasher(BLOCK_BYTES)

    def add(self, item: WriteItem, content: "Tensor | io.BytesIO") -> WriteResult:
        """Append what a reader of DCP's format finds there."""
        begin = self.hasher.written
        if isinstance(content, Tensor):
            if content.untyped_storage().nbytes() != content.nbytes:
                content = content.clone()  # torch.save writes the whole of what a view is of
            torch.save(content, self)
        else:
            self.write(content.getbuffer())
        length = self.hasher.written - begin
        return WriteResult(item.index, length, _StorageInfo(self.file.path.name, begin, length))

    def write(self, content: "bytes | memoryview") -> int:  # type: ignore[override]
        """Write, and hash."""
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self.file.write(piece)
            self.hasher.update(piece)
        return len(view)

    def tell(self) -> int:
        """Return how much has been written."""
        return self.hasher.written

    def writable(self) -> bool:
        """Yes."""
        return True

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at its end."""
