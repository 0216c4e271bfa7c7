"""Save asynchronously: snapshot, write, hash, commit. Knows the store and the form of files; not when to save.

A checkpoint holds the model, the optimizer state (in its own dtype, FP32 or BF16) and every rank's random state; with adapters, only the
adapters and their state. The step number determines the schedule and the position in the data. Several threads write a rank's part directly
from the tensors that training uses (``copy_on_update``), and hash each block on its way to the disk. Weights are in separate files, so that
an export need not fetch the rest from other hosts.
"""

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from llama405b import extend
from llama405b.checkpoint.compatibility import rounding_version, software_versions
from llama405b.checkpoint.copy_on_update import CopyOnUpdate, SnapshotStats, Staging, lower_thread_priority
from llama405b.checkpoint.index import FileKind, Holdings, Part, plan_index
from llama405b.checkpoint.replication import AfterSave, Replication
from llama405b.checkpoint.state import PartTensors, find_parts, rng_state, state_to_save
from llama405b.checkpoint.store import Store
from llama405b.contract import reader
from llama405b.contract.checkpoints import (
    INDEX,
    FileDigest,
    Manifest,
    RunIdentity,
    TrainedSoFar,
)
from llama405b.contract.errors import STAGING_SHARE, UserError, reason_of, remedy_of
from llama405b.contract.hashes import BLOCK_BYTES, DIRECT_ALIGNMENT, BlockHasher, Blocks, DirectFile
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import OnByteProgress, free_bytes
from llama405b.optim.updater import Updater, UpdateUnit
from llama405b.spec.tensors import TensorPart, build_parts_header

THREADS = 4  # per rank; hashing and writing release the GIL
PIECE_BYTES = 1 << 20  # small enough to be hashed while it is in the CPU's cache


def _copy_without_gil(memory: memoryview, data: memoryview) -> None:
    """Copy bytes without holding the GIL, which training needs meanwhile."""
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(data, np.uint8)


class SafetensorsFile(DirectFile):
    """A safetensors file that is written sequentially and hashed block by block; its header comes last, in room that is kept for it."""

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        """Open the file; some of ``parts`` will be added."""
        n_bytes = sum(part.n_bytes for part in parts)
        longest = len(_header(parts)) + 2 * len(parts) * len(str(n_bytes))  # in whatever order they come
        self.header_bytes = -(-longest // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        super().__init__(path, self.header_bytes, _copy_without_gil)
        self.parts: list[Part] = []
        # tensors in the block that the header ends in, which are hashed after it; not a bytearray: that is cleared under the GIL
        self.first, self.n_first = np.empty(min(n_bytes, -self.header_bytes % BLOCK_BYTES), np.uint8).data, 0
        self.hasher = BlockHasher(BLOCK_BYTES)  # of all other tensors

    def add(self, part: Part, tensor: Tensor) -> None:
        """Append a part, whose elements are ``tensor`` now."""
        self.parts.append(part)
        content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for begin in range(0, len(content), PIECE_BYTES):
            piece = content[begin : begin + PIECE_BYTES]
            self.write(piece)
            room = self.first[self.n_first : self.n_first + len(piece)]
            _copy_without_gil(room, piece[: len(room)])
            self.n_first += len(room)
            self.hasher.update(piece[len(room) :])

    def finish(self) -> FileDigest:
        """Write the header, flush the file to the disk, and return its digest, as if rank 0 had written it.

        Raises:
            OSError: The disk is full, or cannot be written.
        """
        header = _header(self.parts, self.header_bytes)
        with ThreadPoolExecutor(1, "writer") as thread:
            first = thread.submit(self._hash_first, header)  # while the disk is busy
            self.flush(header)
        blocks = (*first.result(), *(self.hasher.blocks if self.hasher.n_bytes else ()))
        return FileDigest(self.header_bytes + self.n_first + self.hasher.n_bytes, 0, blocks)

    def _hash_first(self, header: bytes) -> Blocks:
        hasher = BlockHasher(BLOCK_BYTES)
        hasher.update(header)
        hasher.update(self.first[: self.n_first])
        return hasher.blocks


def _header(parts: Iterable[Part], n_bytes: int = 0) -> bytes:
    return build_parts_header(
        {part.key: TensorPart(part.dtype, part.name, part.shape, part.box) for part in parts}, n_bytes=n_bytes
    )


def write_parts(directory: Path, rank: int, parts: Sequence[Part], snapshot: CopyOnUpdate) -> dict[str, FileDigest]:
    """Write a rank's parts into an existing directory, and return the digests of its files; ``snapshot``: their tensors, in this order.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    directory.stat()  # nothing is created below an unmounted mount point
    digests: dict[str, FileDigest] = {}
    with contextlib.ExitStack() as stack:

        def create(kind: FileKind, number: int) -> SafetensorsFile:
            file = SafetensorsFile(
                directory / f"{kind}{rank}-{number}.safetensors", [part for part in parts if part.kind is kind]
            )
            return stack.enter_context(contextlib.closing(file))

        def finish(kind: FileKind, file: SafetensorsFile) -> int:
            digests[file.path.name] = dataclasses.replace(file.finish(), rank=rank, weights=kind is FileKind.WEIGHTS)
            return len(file.parts)

        small, small_lock = create(FileKind.SMALL, 0), threading.Lock()

        def write_some(thread: int) -> int:
            try:
                files = {kind: create(kind, thread) for kind in (FileKind.WEIGHTS, FileKind.OPTIMIZER)}
                for number, tensor in snapshot.read():
                    part = parts[number]
                    if part.kind is FileKind.SMALL:
                        with small_lock:
                            small.add(part, tensor)
                    else:
                        files[part.kind].add(part, tensor)
                return sum(itertools.starmap(finish, files.items()))
            except BaseException:
                snapshot.abandon()  # ends the other threads
                raise

        with ThreadPoolExecutor(THREADS, "writer", lower_thread_priority) as threads:
            n_written = sum(threads.map(write_some, range(THREADS)))
        n_written += finish(FileKind.SMALL, small)
    if n_written != len(parts):
        raise RuntimeError(f"{n_written} of {len(parts)} parts were written")
    return digests


@dataclasses.dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    path: Path
    digest: str  # of the manifest
    elapsed_s: float
    stats: SnapshotStats
    blocked_s: float = 0.0  # how long training waited, or was slowed down


class CheckpointSaver:
    """Writes one checkpoint at a time into a store, in a background thread."""

    def __init__(
        self,
        store: Store,
        staging_bytes: int | None = None,
        replication: Replication | None = None,
        after_save: AfterSave | None = None,
        *,
        delete_unsent: bool = False,
    ) -> None:
        """``staging_bytes``: CPU memory per host for copies; None: a share of what is free at the first save.

        ``after_save``: on owners; ``delete_unsent``: also delete checkpoints for which it has not succeeded.
        """
        self.versions = software_versions() | _extension_version()  # read now: files may change while the run goes on
        self.after_save = after_save
        self.delete_unsent = delete_unsent
        self.store = store
        self.rank = store.rank
        self.staging_bytes = staging_bytes
        self.replication = replication
        self.staging: Staging | None = None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.save_future: Future[SavedCheckpoint] | None = None
        self.prune_future: Future[str] | None = None
        self.described: dict[str, bytes] = {}  # by name: the files without tensors, of all checkpoints of this attempt
        self.described_digests: dict[str, FileDigest] = {}
        self.parts: Sequence[Part] = ()  # that this rank writes
        self.planned: Holdings | None = None  # what this rank has of the state
        self.tensors: PartTensors = {}  # of it: the live ones
        self.addresses: Sequence[int] = ()  # of what updates change, when they were found
        self.step = 0  # of the last save
        self.blocked_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing, or deleting."""
        return any(future is not None and not future.done() for future in (self.save_future, self.prune_future))

    def start_background_work(self, resume_step: int) -> None:
        """Start replication and the user's command in the background; ``resume_step``: the step that training continues from."""
        if self.replication:
            self.replication.begin(resume_step)
        if self.after_save:
            own = self.store.directory.own_checkpoints()
            self.after_save.begin({path: digest for path, (_, digest) in own.items()})

    def allocate_staging(self, updater: Updater, on_progress: OnByteProgress = lambda *_: None) -> None:
        """Allocate the memory for copies, on all ranks; ``begin`` does so if it was not called.

        If the state is on a GPU, the memory is pinned, which takes minutes: call it before the first step.

        Raises:
            UserError: CUDA cannot pin that much.
        """
        host_bytes = int(free_bytes() * STAGING_SHARE) if self.staging_bytes is None else self.staging_bytes
        collectives.all_reduce_max([0])  # a barrier: all ranks read the free memory before one allocates
        tensors = [tensor for unit in updater.units() for tensor in unit.tensors]
        limit_bytes = host_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        device = next((tensor.device for tensor in tensors), self.rank.device)
        self.staging = Staging((tensor.nbytes for tensor in tensors), limit_bytes, device, on_progress)

    def plan(self, updater: Updater) -> None:
        """Plan which rank writes what, and read what describes all checkpoints: once. ``begin`` does so if it was not called. A collective.

        Raises:
            UserError: The run's own files cannot be read.
        """
        store, described = self.store, dict[str, bytes]()
        self.planned, _ = self._find_tensors(updater)
        index = plan_index(collectives.all_gather_objects(self.planned, Holdings, store.group))
        self.parts = [*index.parts_of(self.rank.index)]
        store.run_on_owners(
            lambda: described.update(store.directory.read_description() if self.rank.is_rank0 else {}),
            store.run.path,
            store.group,
            "cannot be read",
        )
        names = collectives.broadcast_object(tuple(described), tuple[str, ...], store.group)
        self.described = {
            name: collectives.broadcast_bytes(0, described.get(name, b""), store.group) for name in names
        } | {INDEX: reader.dumps(index).encode()}
        self.described_digests = {name: _digest_of(content) for name, content in self.described.items()}

    def _find_tensors(self, updater: Updater) -> tuple[Holdings, PartTensors]:
        """Return what this rank has of the state, and its tensors, which are remembered unless they are FSDP1's copies."""
        self.addresses = _addresses(updater.units())
        holdings, tensors = find_parts(state_to_save(updater, self.rank))
        self.tensors = {} if isinstance(updater.master, FullyShardedDataParallel) else tensors
        return holdings, tensors

    def begin(
        self,
        step: int,
        updater: Updater,
        identity: RunIdentity,
        progress: TrainedSoFar,
        next_update_s: float | None = None,
    ) -> None:
        """Start writing ``step-N``: the current state, including all pending updates.

        ``progress``: how far training is; ``next_update_s``: seconds until the next updates, if known.

        Call it on all ranks after the same step, and ``finish`` before the next time.
        """
        start_s, self.step = time.monotonic(), step
        if self.staging is None:
            self.allocate_staging(updater)
        assert self.staging
        if not self.planned:
            self.plan(updater)
        units, live_tensors = updater.units(), self.tensors
        is_fsdp1 = isinstance(updater.master, FullyShardedDataParallel)
        # Torch may move what it pads. All ranks look, or none: looking reshards what is gathered.
        [must_look] = collectives.all_reduce_max([int(is_fsdp1 or _addresses(units) != self.addresses)])
        if must_look:
            holdings, live_tensors = self._find_tensors(updater)
            if holdings != self.planned:
                raise RuntimeError("the run's tensors are no longer those that were planned before step 1")
        rng = rng_state(self.rank)
        tensors = [rng[part.name] if part.name in rng else live_tensors[part.name, part.box] for part in self.parts]
        snapshot = CopyOnUpdate(units, tensors, self.staging, next_update_s)
        updater.before_update = snapshot.before_update
        self.save_future = self.thread.submit(self._save, step, snapshot, identity, progress)
        if is_fsdp1:  # it may change what its state dict refers to: wait
            self.save_future.exception()
        self.blocked_s = time.monotonic() - start_s

    def finish(self, slowdown_s: float = 0.0) -> SavedCheckpoint | UserError | None:
        """Wait for the save; return the checkpoint, or the error: then earlier checkpoints are untouched.

        ``slowdown_s``: how much longer the steps during the save took, in which updates may have waited for it.

        Older checkpoints are deleted in the background from now on: see ``finish_pruning``.

        Raises:
            UserError: Another run has taken the directory over.
        """
        if self.save_future is None:
            return None
        start_s = time.monotonic()
        future = self.save_future
        self.save_future = None
        try:
            checkpoint = future.result()
            blocked_s = self.blocked_s + max(checkpoint.stats.wait_s, slowdown_s) + time.monotonic() - start_s
            return dataclasses.replace(checkpoint, blocked_s=blocked_s)
        except UserError as error:
            self.store.check_lease()
            return error
        finally:
            self.prune_future = self.thread.submit(self._prune)

    def finish_pruning(self) -> str:
        """Wait until older checkpoints are deleted; return why one was not (the next save retries), or ''."""
        future, self.prune_future = self.prune_future, None
        return future.result() if future else ""

    def _save(
        self, step: int, snapshot: CopyOnUpdate, identity: RunIdentity, progress: TrainedSoFar
    ) -> SavedCheckpoint:
        start_s, store = time.monotonic(), self.store
        if self.rank.on_gpu:
            torch.cuda.set_device(self.rank.device)
        final = store.root / f"step-{step:08d}"
        partial, directory = store.directory.partial_path(final), store.directory
        try:
            store.run_on_owners(lambda: directory.begin(final, self.described), partial, store.group)
            local_digests = self._write(partial, snapshot)
            manifest = self._gather_manifest(step, local_digests, identity, progress)
            store.run_on_owners(
                lambda: store.saved_digests.update({str(final): directory.write_manifest_file(final, manifest)}),
                partial,
                store.group,
            )
            store.run_on_owners(lambda: directory.commit(final), final, store.group)
        finally:
            snapshot.abandon()
        if self.replication:
            self.replication.request_copies(step, store.group)
        if self.after_save:
            self.after_save.enqueue(final, store.saved_digests[str(final)])
        return SavedCheckpoint(
            final, store.saved_digests.get(str(final), ""), time.monotonic() - start_s, snapshot.stats
        )

    def _prune(self) -> str:
        store, protected_steps = self.store, self.replication.protected_steps if self.replication else set[int]()
        if self.after_save and not self.delete_unsent:
            protected_steps = protected_steps | self.after_save.pending_steps
        try:
            store.run_on_owners(
                lambda: store.directory.delete_old(self.step, store.keep, protected_steps, keep_best=store.keep_best),
                store.root,
                store.group,
                "an old checkpoint cannot be deleted",
            )
        except UserError as error:
            return str(error)
        return ""

    def _write(self, partial: Path, snapshot: CopyOnUpdate) -> dict[str, FileDigest]:
        """Write this rank's parts. A collective: if one rank fails, every rank raises."""
        failure, digests = ("", ""), dict[str, FileDigest]()
        try:
            digests = write_parts(partial, self.rank.index, self.parts, snapshot)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            failure = reason_of(error), remedy_of(error)
        failures = enumerate(collectives.all_gather_objects(failure, tuple[str, str], self.store.group))
        if failed := [(rank, *words) for rank, words in failures if words[0]]:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason, _ in failed)
            remedy = next((remedy for *_, remedy in failed if remedy), "")
            raise UserError(f"{partial}: the checkpoint could not be written ({reasons}){remedy}")
        return digests

    def _gather_manifest(
        self, step: int, local_digests: dict[str, FileDigest], identity: RunIdentity, progress: TrainedSoFar
    ) -> Manifest:
        """Return the manifest of what all ranks wrote. A collective."""
        parts = collectives.all_gather_objects(local_digests, dict[str, FileDigest], self.store.group)
        parts.append(self.described_digests)
        return Manifest(
            format=3,
            step=step,
            files=dict(sorted((name, digest) for part in parts for name, digest in part.items())),
            world_size=self.rank.world_size,
            run=self.store.run.name,
            hosts=self.store.hosts,
            identity=identity,
            sequences=progress.sequences,
            evaluation_loss=progress.evaluation_loss,
            versions=self.versions | rounding_version(identity.numerics),
        )


def _addresses(units: Sequence[UpdateUnit]) -> list[int]:
    return [tensor.data_ptr() for unit in units for tensor in unit.tensors]


def _digest_of(content: bytes) -> FileDigest:
    """Return the digest of a file without tensors."""
    hasher = BlockHasher(BLOCK_BYTES)
    hasher.update(content)
    return FileDigest(len(content), 0, hasher.blocks)


def _extension_version() -> dict[str, str]:
    """Return the hash of the user's module by its file name; empty if there is none."""
    extension = extend.current().declared
    return {extension.name: f"sha256:{extension.sha256}"} if extension.path else {}
