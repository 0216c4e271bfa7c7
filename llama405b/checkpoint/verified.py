"""Read a checkpoint and verify it in one pass: each block is compared with the manifest before anything in it is used.

Knows manifests, and DCP's reader; not which checkpoint is wanted.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from llama405b.checkpoint.digests import THREADS, block_hashes
from llama405b.checkpoint.unpickling import TensorReader
from llama405b.contract.checkpoints import METADATA, Manifest
from llama405b.contract.errors import UserError


class DamagedError(UserError):
    """A file of a checkpoint is not what was saved."""

    def __init__(self, words: str, file: str = "") -> None:
        """``file``: its name in the checkpoint."""
        super().__init__(words)
        self.file = file

    def __reduce__(self) -> tuple[type["DamagedError"], tuple[str, str]]:
        """DCP sends it to all ranks, pickled."""
        return type(self), (str(self), self.file)


class VerifiedReader(TensorReader):
    """Reads what matches a manifest, and refuses all else."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self.manifest, self.metadata = manifest, None
        self.good = set[tuple[str, int]]()  # blocks that match
        self.told: Callable[[int, int], None] = lambda *_: None

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata, which is read once, and only if it is what was saved.

        Raises:
            DamagedError: It is not.
            UserError: It is not DCP's metadata.
        """
        if self.metadata is None:
            self.check(METADATA, 0, self.manifest.files[METADATA].bytes)
            self.metadata = super().read_metadata()
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, several files at a time.

        Raises:
            DamagedError: A part of it is not what was saved.
            UnsafeError: There is something else than tensors.
            OSError: A file cannot be read.
        """
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
        """Compare the blocks of a part of a file with the manifest.

        Raises:
            DamagedError: One differs, or is missing.
            OSError: The file cannot be read.
        """
        size, file = self.manifest.block_bytes, Path(self.path) / name
        sealed = self.manifest.files.get(name)
        if sealed is None or not file.is_file() or file.stat().st_size != sealed.bytes:
            raise DamagedError(f"{file}: missing, or not of the size that was saved", name)
        if not 0 <= offset <= offset + length <= sealed.bytes:
            raise DamagedError(f"{file}: ends before what should be in it", name)
        blocks = range(offset // size, -(-(offset + length) // size))
        unknown = [block for block in blocks if (name, block) not in self.good]
        for block, found in zip(unknown, block_hashes(file, unknown, size), strict=True):
            if found != sealed.blocks[block]:
                where = f"block {block + 1} of {len(sealed.blocks)}"
                raise DamagedError(f"{file}: its content does not match its checksum ({where})", name)
            self.good.add((name, block))

    def _length(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].length)
