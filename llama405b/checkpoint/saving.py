"""Save asynchronously: snapshot, write, hash, commit. Knows the store and DCP; not when to save.

A checkpoint holds the model, the optimizer state (in its own dtype, FP32 or BF16) and every rank's random state; with adapters, only the
adapters and their state. The step number determines the schedule and the position in the data. Several threads write a rank's part directly
from the tensors that training uses (``copy_on_update``), and hash each block on its way to the disk. Weights are in separate files, so that
an export need not fetch the rest from other hosts.
"""

import contextlib
import dataclasses
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.futures
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from llama405b import extend
from llama405b.checkpoint.compatibility import software_versions
from llama405b.checkpoint.copy_on_update import CopyOnUpdate, SnapshotStats, Staging, lower_thread_priority
from llama405b.checkpoint.replication import AfterSave, Replication
from llama405b.checkpoint.store import Store
from llama405b.checkpoint.verified import TensorPlanner, TensorReader
from llama405b.contract.checkpoints import (
    WEIGHTS_PREFIX,
    FileDigest,
    Manifest,
    RunIdentity,
    TrainedSoFar,
    step_of,
    write_manifest,
)
from llama405b.contract.errors import STAGING_SHARE, UserError, reason_of, remedy_of
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher, DirectFile
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import OnByteProgress, free_bytes
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater
from llama405b.spec.adapters import is_lora_name


def state_to_save(updater: Updater, rank: Rank) -> dict[str, Any]:
    """Return this rank's part of the state that DCP saves: the live tensors, whose updates may be pending."""
    model_state, optimizer_state = _model_and_optimizer_state(updater)
    return {"model": model_state, "optimizer": optimizer_state, "rng": {str(rank.index): _rng_state(rank)}}


def restore(path: Path, model: nn.Module, updater: Updater, rank: Rank, reader: TensorReader | None = None) -> int:
    """Load a checkpoint into the shards and return its step. ``reader``: what reads it; None: a reader that verifies nothing.

    Only tensors are read: the optimizer keeps its current settings.
    """
    master, optimizer = updater.master, updater.optimizer
    updater.wait()
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a unit stays gathered after a forward without a backward
            module.reshard()
    model_state, optimizer_state = _model_and_optimizer_state(updater)
    state: dict[str, Any] = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
    reader = reader or TensorReader(path)
    if f"rng.{rank.index}.cpu" in reader.read_metadata().state_dict_metadata:
        state["rng"] = {str(rank.index): _rng_state(rank)}
    dcp.load(state, storage_reader=reader, planner=TensorPlanner())
    if isinstance(model, FullyShardedDataParallel):  # FSDP1 returned copies; others were filled in place
        set_state_dict(master, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    updater.sync_weights()
    rng = state.get("rng", {}).get(str(rank.index), {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return step_of(path)


def restore_weights(
    path: Path, model: nn.Module, updater: Updater, _rank: Rank, reader: TensorReader | None = None
) -> int:
    """Load only the weights, without creating optimizer state; see ``restore``."""
    master = updater.master
    state: dict[str, Any] = {"model": _adapters_or_all(get_model_state_dict(master))}
    dcp.load(state, storage_reader=reader or TensorReader(path), planner=TensorPlanner())
    if isinstance(model, FullyShardedDataParallel):
        set_model_state_dict(master, state["model"])
    updater.sync_weights()
    return step_of(path)


def _model_and_optimizer_state(updater: Updater) -> tuple[dict[str, Any], Any]:
    """Return the tensors of model and optimizer; before the first update, the moments are zero.

    torch creates the moments by a step with zero gradients and counts it. Its step counts are reset here, or Adam's bias correction would
    treat the first update as the second.
    """
    master, optimizer = updater.master, updater.optimizer
    if not optimizer.state:
        optimizer.zero_grad()  # torch creates no moments while there are gradients
        get_state_dict(master, optimizer)
        for state in optimizer.state.values():
            state["step"].zero_()
    weights, moments = get_state_dict(master, optimizer)
    return _adapters_or_all(weights), moments


def _adapters_or_all(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the adapters; all weights if there are none."""
    return {name: weight for name, weight in weights.items() if is_lora_name(name)} or weights


def _rng_state(rank: Rank) -> dict[str, torch.Tensor]:
    """Return the state of this rank's random generators."""
    state = {"cpu": torch.get_rng_state()}
    if rank.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


THREADS = 4  # per rank; hashing and writing release the GIL
PIECE_BYTES = 1 << 20  # small enough to be hashed while it is in the CPU's cache


class HashingWriter(dcp.FileSystemWriter):
    """Writes this rank's data files into an empty directory, and records their digests."""

    def __init__(self, path: Path, rank: int, snapshot: CopyOnUpdate) -> None:
        super().__init__(path, overwrite=False)
        self.directory = path
        self.rank = rank
        self.snapshot = snapshot
        self.digests: dict[str, FileDigest] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that the directory exists: torch would create it below an unmounted mount point."""
        self.directory.stat()
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's part and flush it to the disk; DCP reports an exception to all ranks."""
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        self.snapshot.plan([planner.resolve_data(item).detach() for item in tensors])
        names = [f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}" for number in range(2 * THREADS)]
        bytes_items = iter(
            [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        )  # shared: the first thread to ask writes them

        def write_some(thread: int) -> list[WriteResult]:
            with (
                self._open_hashed(names[thread], weights=True) as weights_file,
                self._open_hashed(names[THREADS + thread], weights=False) as other_file,
            ):
                results = [other_file.add(item, planner.resolve_data(item)) for item in bytes_items]
                for number, tensor in self.snapshot.read():
                    item = tensors[number]
                    output = weights_file if item.index.fqn.startswith(WEIGHTS_PREFIX) else other_file
                    results.append(output.add(item, tensor))
                return results

        with ThreadPoolExecutor(THREADS, "writer", lower_thread_priority) as threads:
            parts = [threads.submit(write_some, thread) for thread in range(THREADS)]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([result for part in parts for result in part.result()])
        assert len(future.value()) == len(plan.items)
        return future

    @contextlib.contextmanager
    def _open_hashed(self, name: str, *, weights: bool) -> "Iterator[_HashingFile]":
        """Open a file that is hashed and, at the end, flushed; an error also ends the other threads."""
        try:
            with contextlib.closing(DirectFile(self.directory / name, copy=_copy_without_gil)) as file:
                yield (output := _HashingFile(file))
                file.flush()
        except BaseException:
            self.snapshot.abandon()
            raise
        self.digests[name] = FileDigest(output.hasher.n_bytes, self.rank, output.hasher.blocks, weights=weights)


def _copy_without_gil(memory: memoryview, data: memoryview) -> None:
    """Copy bytes without holding the GIL, which training needs meanwhile."""
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(data, np.uint8)


class _HashingFile(io.RawIOBase):
    """A file that is written sequentially and hashed block by block."""

    def __init__(self, file: DirectFile) -> None:
        self.file, self.hasher = file, BlockHasher(BLOCK_BYTES)

    def add(self, item: WriteItem, content: "Tensor | io.BytesIO") -> WriteResult:
        """Append an item in DCP's format."""
        begin = self.hasher.n_bytes
        if isinstance(content, Tensor):
            if content.untyped_storage().nbytes() != content.nbytes:
                content = content.clone()  # torch.save writes the full storage of a view
            try:
                torch.save(content, self)
            except RuntimeError as error:
                # as it unwinds, torch writes more and hides the disk's error behind an "unexpected pos"
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        else:
            self.write(content.getbuffer())
        length = self.hasher.n_bytes - begin
        return WriteResult(item.index, length, _StorageInfo(self.file.path.name, begin, length))

    def write(self, content: "bytes | memoryview") -> int:  # type: ignore[override]
        """Write and hash the content, and return its size."""
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self.file.write(piece)
            self.hasher.update(piece)
        return len(view)

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self.hasher.n_bytes

    def writable(self) -> bool:
        """Return True."""
        return True

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when it is complete."""


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
        self.versions = software_versions()  # read now: files may change while the run goes on
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
            self.after_save.begin(
                {path: write_manifest(manifest)[1] for path, manifest in self.store.directory.own_checkpoints().items()}
            )

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
        state = state_to_save(updater, self.rank)
        snapshot = CopyOnUpdate(updater.units(), self.staging, next_update_s)
        updater.before_update = snapshot.before_update
        self.save_future = self.thread.submit(self._save, step, state, snapshot, identity, progress)
        if isinstance(updater.master, FullyShardedDataParallel):  # FSDP1 may change what its state dict refers to: wait
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
        self, step: int, state: dict[str, Any], snapshot: CopyOnUpdate, identity: RunIdentity, progress: TrainedSoFar
    ) -> SavedCheckpoint:
        start_s, store = time.monotonic(), self.store
        if self.rank.on_gpu:
            torch.cuda.set_device(self.rank.device)
        final = store.root / f"step-{step:08d}"
        partial, directory = store.directory.partial_path(final), store.directory
        try:
            store.run_on_owners(lambda: directory.begin(final), partial, store.group)
            local_digests = self._write(partial, state, snapshot)
            metadata_files = self._share_metadata_files(final)
            store.run_on_owners(lambda: directory.add_files(final, metadata_files), partial, store.group)
            store.run_on_owners(
                lambda: local_digests.update(directory.hash_metadata_files(final) if self.rank.is_rank0 else {}),
                partial,
                store.group,
            )
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

    def _write(self, partial: Path, state: dict[str, Any], snapshot: CopyOnUpdate) -> dict[str, FileDigest]:
        writer = HashingWriter(partial, self.rank.index, snapshot)
        try:
            with without_crc():
                dcp.save(
                    state,
                    storage_writer=writer,
                    planner=DefaultSavePlanner(enable_plan_caching=True),
                    process_group=self.store.group,
                )
        except dcp.api.CheckpointException as error:
            clear_plan_caches()
            causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            reasons = "; ".join(f"rank {rank}: {reason_of(cause)}" for rank, cause in causes.items())
            remedy = next(filter(None, map(remedy_of, causes.values())), "")
            raise UserError(f"{partial}: the checkpoint could not be written ({reasons}){remedy}") from None
        return writer.digests

    def _share_metadata_files(self, final: Path) -> dict[str, bytes]:
        """Broadcast rank 0's files without tensors; return them where they are missing."""
        store, files = self.store, dict[str, bytes]()
        if store.shared:
            return {}
        store.run_on_owners(
            lambda: files.update(store.directory.read_metadata_files(final) if self.rank.is_rank0 else {}),
            final,
            store.group,
        )
        names = collectives.broadcast_object(tuple(files), tuple[str, ...], store.group)
        received_files = {name: collectives.broadcast_bytes(0, files.get(name, b""), store.group) for name in names}
        return {} if self.rank.is_rank0 else received_files

    def _gather_manifest(
        self, step: int, local_digests: dict[str, FileDigest], identity: RunIdentity, progress: TrainedSoFar
    ) -> Manifest:
        """Return the manifest of what all ranks wrote. A collective."""
        parts = collectives.all_gather_objects(local_digests, dict[str, FileDigest], self.store.group)
        return Manifest(
            format=2,
            step=step,
            files=dict(sorted((name, digest) for part in parts for name, digest in part.items())),
            world_size=self.rank.world_size,
            run=self.store.run.name,
            hosts=self.store.hosts,
            identity=identity,
            sequences=progress.sequences,
            evaluation_loss=progress.evaluation_loss,
            versions=self.versions | _extension_version(),
        )


def clear_plan_caches() -> None:
    """Clear torch's cached save plans, so that the next save plans anew. All ranks call it together.

    A plan does not change in a run, so torch keeps that of the first save: 64 ranks' plans of 405B take rank 0 half a minute of
    Python, which stops its training. After a failed save, ranks could have different caches.
    """
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.clear()


def _extension_version() -> dict[str, str]:
    """Return the hash of the user's module by its file name; empty if there is none."""
    extension = extend.current().declared
    return {extension.name: f"sha256:{extension.sha256}"} if extension.path else {}


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    """Disable torch's CRC-32 of tensors: the manifest has SHA-256, and the CRC halves the writing speed."""
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)
