"""Choose the checkpoint to resume from, gather its files, and verify it by loading it.

The choice looks at manifests and file sizes. After a change of the hosts' order or number, hosts send each other missing files in pieces,
through CPU memory and the store's group. Knows files, owners and the store.
"""

import contextlib
import dataclasses
import errno
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from llama405b.checkpoint.format import CheckpointFault, CheckpointReader, DamagedError, RejectedCheckpoint, Target
from llama405b.checkpoint.state import Tensors, local_parts, state_to_load
from llama405b.checkpoint.store import CheckpointView, Store, part_directories
from llama405b.contract.checkpoints import DATA_FILE, named_path, refuse_existing, step_of
from llama405b.contract.disk import disk_free_bytes
from llama405b.contract.errors import UserError, pluralize, reason_of, remedy_of
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import OnByteProgress
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater

PIECE_BYTES = 64 << 20
READ_FAILED = -1  # sent instead of a length: the sender cannot read the file


class FileGatherer:
    """A checkpoint as this rank reads it: its files here, and files fetched from other hosts."""

    def __init__(self, store: Store, checkpoint: CheckpointView, on_progress: OnByteProgress) -> None:
        self.store = store
        self.checkpoint = checkpoint
        self.on_progress = on_progress
        self.path = store.directory.fetched_path(checkpoint.path)
        self.rank, self.owner = store.rank.index, store.owner_of[store.rank.index]
        self.fetched_names = set[str]()
        self.local_paths = dict[str, Path]()  # of files that were not fetched, once found
        self.has_directory = False
        self.sender_of: dict[tuple[str, int], int] = {}  # file and owner -> the owner that sent it
        self.owner_files = {owner: {*checkpoint.local[owner]} for owner in store.owners}

    def fetch(self, names: Iterable[str]) -> None:
        """Fetch the files that this rank needs, to where ``path_of`` finds them. A collective."""
        if self.store.shared:
            return
        needed_names = collectives.all_gather_objects(tuple(sorted({*names})), tuple[str, ...], self.store.group)
        moves = self._plan_moves(needed_names)
        if not moves:
            return
        with collectives.raise_on_all_ranks(self.store.group):
            try:
                self._prepare_directory(moves)
            except OSError as error:
                raise UserError(
                    f"{self.checkpoint.path}: {reason_of(error)} on {self.store.rank.host}{remedy_of(error)}"
                ) from None
        failure = ""
        total_bytes, received_bytes = (
            sum(self.checkpoint.manifest.files[name].bytes for name, _, target in moves if target == self.rank),
            0,
        )
        for name, source, target in moves:  # in the same order on all ranks, or sends and receives could deadlock
            try:
                if self.rank == source:
                    self._send(name, target)
                elif self.rank == target:
                    received_bytes += self._receive(name, source)
                    self.on_progress(received_bytes, total_bytes)
            except OSError as error:
                failure = failure or f"{self.checkpoint.path}/{name}: {reason_of(error)} on {self.store.rank.host}"
        with collectives.raise_on_all_ranks(self.store.group):
            if failure:
                raise UserError(f"{failure}; fix that, then resume")

    def delete_copies(self) -> None:
        """Delete the fetched files."""
        if self.has_directory:
            shutil.rmtree(self.path, ignore_errors=True)

    def _plan_moves(self, needed_names: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
        """List the missing files (name, source, target); the owners that have a file take turns to send."""
        moves = []
        for owner in self.store.owners:
            owner_needs = {
                name for rank, names in enumerate(needed_names) if self.store.owner_of[rank] == owner for name in names
            }
            for number, name in enumerate(sorted(owner_needs - self.owner_files[owner])):
                sources = [candidate for candidate in self.store.owners if name in self.checkpoint.available[candidate]]
                source = owner if owner in sources else sources[number % len(sources)]
                self.sender_of[name, owner] = source
                self.owner_files[owner].add(name)
                if source != owner:
                    moves.append((name, source, owner))
        self.fetched_names.update(name for name, _, target in moves if target == self.owner)
        return moves

    def _prepare_directory(self, moves: Sequence[tuple[str, int, int]]) -> None:
        """Create the directory for the files to receive, if the disk has room for them."""
        incoming_names = [name for name, _, target in moves if target == self.rank]
        if not incoming_names:
            return
        needed_bytes = sum(self.checkpoint.manifest.files[name].bytes for name in incoming_names)
        free_bytes = disk_free_bytes(str(self.store.root))
        if free_bytes is not None and needed_bytes > free_bytes:
            raise OSError(
                errno.ENOSPC, f"{needed_bytes / 1e9:,.2f} GB are needed, but {free_bytes / 1e9:,.2f} GB are free"
            )
        if not self.has_directory:
            self.has_directory = True
            shutil.rmtree(self.path, ignore_errors=True)
        for name in incoming_names:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)

    def path_of(self, name: str) -> Path:
        """Return where this host has a file: fetched, its own, or a copy of another host's part."""
        if name in self.fetched_names:
            return self.path / name
        if self.store.shared:
            return self.checkpoint.path / name
        if name not in self.local_paths:
            self.local_paths[name] = self._find_path(name)
        return self.local_paths[name]

    def _find_path(self, name: str) -> Path:
        size = self.checkpoint.manifest.files[name].bytes
        paths = [directory / name for directory in part_directories(self.checkpoint.path)]
        return next((path for path in paths if path.is_file() and path.stat().st_size == size), paths[0])

    def _send(self, name: str, target: int) -> None:
        remaining_bytes = self.checkpoint.manifest.files[name].bytes
        try:
            with self.path_of(name).open("rb", buffering=0) as file:
                while remaining_bytes:
                    content = bytearray(file.read(min(PIECE_BYTES, remaining_bytes)))
                    if not content:
                        raise OSError("the file shrank while it was being sent")
                    piece = torch.frombuffer(content, dtype=torch.uint8)
                    dist.send(torch.tensor([len(piece)]), target, self.store.group)
                    dist.send(piece, target, self.store.group)
                    remaining_bytes -= len(piece)
        except OSError:
            dist.send(torch.tensor([READ_FAILED]), target, self.store.group)
            raise

    def _receive(self, name: str, source: int) -> int:
        remaining_bytes, length = self.checkpoint.manifest.files[name].bytes, torch.zeros(1, dtype=torch.int64)
        write_error: OSError | None = None
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / name).open("wb"))
            except OSError as error:
                write_error = error
            while remaining_bytes > 0:
                dist.recv(length, source, self.store.group)
                if int(length) == READ_FAILED:
                    return 0  # the sender reports the reason
                piece = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(piece, source, self.store.group)
                remaining_bytes -= len(piece)
                try:
                    if write_error is None:
                        file.write(memoryview(piece.numpy()))
                except OSError as error:  # keep receiving: the sender does not know
                    write_error = error
        if write_error:
            raise write_error
        return self.checkpoint.manifest.files[name].bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a rank could not load its part of a checkpoint."""

    message: str
    damaged: bool = False  # what was read is not what was saved
    refused: bool = False  # it is unsafe, or of another model
    file: str = ""  # that is damaged: its name in the checkpoint


class LoadError(Exception):
    """Some ranks could not load a checkpoint."""

    def __init__(self, failures: dict[int, LoadFailure]) -> None:
        super().__init__(str(failures))
        self.failures = failures  # by rank


@contextlib.contextmanager
def _failures_on_all_ranks() -> Iterator[None]:
    """Raise LoadError on all ranks if something fails on one."""
    failure: LoadFailure | None = None
    try:
        yield
    except DamagedError as error:
        failure = LoadFailure(str(error), damaged=True, file=error.file)
    except UserError as error:
        failure = LoadFailure(str(error), refused=True)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
        failure = LoadFailure(reason_of(error))
    failures = enumerate(collectives.all_gather_objects(failure, LoadFailure | None))
    if failed := {rank: failure for rank, failure in failures if failure}:
        raise LoadError(failed)


def targets_of(tensors: Tensors) -> Iterator[Target]:
    """Yield what must be read to fill this rank's parts of tensors."""
    for name, tensor in tensors.items():
        for box, part in local_parts(tensor):
            yield Target(name, tuple(tensor.size()), box, part)


def restore(
    reader: CheckpointReader,
    model: torch.nn.Module,
    updater: Updater,
    rank: Rank,
    *,
    weights_only: bool = False,
    fetch: Callable[[Iterable[str]], None] = lambda _: None,
) -> None:
    """Load a checkpoint into the shards. A collective. ``fetch``: brings files here that this rank needs.

    Raises:
        LoadError: It could not be loaded on every rank; the shards are undefined.
    """
    with _failures_on_all_ranks():
        names = reader.index.tensors
    with state_to_load(model, updater, rank, names, weights_only=weights_only) as tensors:
        with _failures_on_all_ranks():
            reads = reader.plan(targets_of(tensors))
            files = reader.files_of(reads)
        fetch(files)
        with _failures_on_all_ranks():
            reader.read(reads)


class Resume:
    """The checkpoint that ``--resume`` (no, auto, a step, a path) selects. All methods are collectives."""

    def __init__(self, store: Store, requested: str, *, weights_only: bool = False) -> None:
        """Choose the checkpoint. ``weights_only``: to read its weights, not to resume; nothing is set aside.

        Raises:
            UserError: A named checkpoint is missing or incomplete; with ``auto``, no checkpoint is complete, a newer one cannot be
            read, or the checkpoints that this run saved are gone; or the directory holds checkpoints of another run.
        """
        self.store = store
        self.requested = requested
        self.weights_only = weights_only
        self.checkpoint: CheckpointView | None = None
        self.rejected: list[RejectedCheckpoint] = []
        self.candidates = store.list_checkpoints()  # newest last
        self.n_present = len(self.candidates)
        if requested == "no":
            refuse_existing(store.root, self.candidates)
        elif requested == "auto":
            self._choose_newest()
        else:
            self._choose_named()

    def load(self, model: torch.nn.Module, updater: Updater, on_progress: OnByteProgress) -> int:
        """Load the chosen checkpoint into the shards and return its step. Unused checkpoints are set aside.

        Raises:
            DamagedError: A part of it is damaged: the shards are undefined, and ``checkpoint`` is now the same
                without that file, if another host has a copy, or else an older checkpoint: call this again.
            UserError: No checkpoint can be loaded, it cannot be read, or it contains what no checkpoint does.
        """
        assert self.checkpoint
        gatherer = FileGatherer(self.store, self.checkpoint, on_progress)
        try:
            gatherer.fetch(name for name in self.checkpoint.manifest.files if not DATA_FILE.fullmatch(name))
            reader = CheckpointReader(self.checkpoint.path, self.checkpoint.manifest, gatherer.path_of, on_progress)
            restore(reader, model, updater, self.store.rank, weights_only=self.weights_only, fetch=gatherer.fetch)
        except LoadError as error:
            if refusal := next((failure.message for failure in error.failures.values() if failure.refused), ""):
                raise UserError(refusal) from None  # on every rank: none may silently use an older checkpoint
            fault = find_load_fault(self.checkpoint, error, self.store.hosts)
            if fault.fault is CheckpointFault.DAMAGED and self._exclude_damaged_files(gatherer, error):
                raise DamagedError(f"{fault}; loading its copy instead") from None
            self._reject_and_choose_older(fault)
            raise DamagedError(f"{fault}; loading {self.checkpoint.path} instead") from None
        finally:
            gatherer.delete_copies()
        self.set_aside_rejected()
        return self.checkpoint.manifest.step

    @property
    def _other_checkpoint_remedy(self) -> str:
        """What to do if the named checkpoint cannot be used."""
        return "use another one" if self.weights_only else "use another one, or auto"

    def _exclude_damaged_files(self, gatherer: FileGatherer, error: LoadError) -> bool:
        """Drop damaged files from the choice; return whether other hosts have copies of all of them."""
        assert self.checkpoint
        local = list(self.checkpoint.local)
        available = list(self.checkpoint.available)
        owner_of = self.store.owner_of
        for rank, failure in error.failures.items():
            file, owner = failure.file, owner_of[rank]
            if file not in self.checkpoint.manifest.files:
                return False
            sender = gatherer.sender_of.get((file, owner), owner)
            for other_rank in [other_rank for other_rank, other_owner in enumerate(owner_of) if other_owner == sender]:
                local[other_rank] = local[other_rank] - {file}
                available[other_rank] = available[other_rank] - {file}
        if {*self.checkpoint.manifest.files} - set().union(*available):
            return False
        self.checkpoint = dataclasses.replace(self.checkpoint, local=tuple(local), available=tuple(available))
        return True

    def set_aside_rejected(self) -> None:
        """Rename the rejected checkpoints, so that ``auto`` does not find them."""
        self.store.set_aside([rejected.path for rejected in self.rejected])

    def _choose_named(self) -> None:
        """Choose the requested checkpoint, and reject later ones; refuse if these belong to another run."""
        root = self.store.root
        path = named_path(root, self.requested)
        view = self.store.open_checkpoint(path)
        if isinstance(view, RejectedCheckpoint):
            raise UserError(f"--resume: {view}; {self._other_checkpoint_remedy}")
        later_paths = [candidate for candidate in self.candidates if step_of(candidate) > step_of(path)]
        if self.weights_only:
            later_paths = []
        if later_paths and path.parent.resolve() != root.resolve():
            raise UserError(
                f"--checkpoint.dir: {root} holds checkpoints up to {later_paths[-1].name} of another run; use another directory"
            )
        self.checkpoint = view
        self.rejected = [
            RejectedCheckpoint(later_path, CheckpointFault.LATER, f"{later_path}: saved after {path.name}")
            for later_path in later_paths
        ]

    def _choose_newest(self) -> None:
        """Choose the newest checkpoint that looks complete; refuse if a newer one cannot be read."""
        self.checkpoint = None
        while self.candidates and not self.checkpoint:
            view = self.store.open_checkpoint(self.candidates.pop())
            if isinstance(view, CheckpointView):
                self.checkpoint = view
            else:
                self._add_rejected(view)
        saved_paths = [path for path in self.store.saved_digests if Path(path).parent == self.store.root]
        if saved_paths and not self.n_present:
            raise UserError(
                f"--resume auto: {self.store.root} is empty, but this run saved {Path(max(saved_paths)).name} there; is its filesystem "
                "mounted? To start from the model's weights, use another --run"
            )
        if self.rejected and not self.checkpoint:
            raise UserError(
                f"--resume auto: {self.store.root} has {pluralize(self.n_present, 'checkpoint')}, but none verifies "
                f"({'; '.join(map(str, self.rejected))}); to start from the model's weights, use another --checkpoint.dir"
            )

    def _add_rejected(self, fault: RejectedCheckpoint) -> None:
        if fault.fault is CheckpointFault.UNREADABLE:
            raise UserError(
                f"--resume auto: {fault}; it may be intact: make it readable, or go back to an earlier step with --resume STEP"
            )
        self.rejected.append(fault)

    def _reject_and_choose_older(self, fault: RejectedCheckpoint) -> None:
        """Reject the chosen checkpoint; with ``auto``, choose an older one."""
        if self.requested != "auto":
            raise UserError(f"--resume: {fault}; {self._other_checkpoint_remedy}")
        self._add_rejected(fault)
        self._choose_newest()


def find_load_fault(checkpoint: CheckpointView, error: LoadError, hosts: tuple[str, ...]) -> RejectedCheckpoint:
    """Return why a checkpoint could not be loaded; an unreadable disk takes precedence over damage."""
    for rank, failure in error.failures.items():
        if not failure.damaged:
            reason = f"{checkpoint.path}: cannot be read ({failure.message}) on {hosts[rank]}"
            return RejectedCheckpoint(checkpoint.path, CheckpointFault.UNREADABLE, reason)
    first = next(iter(error.failures.values()))
    return RejectedCheckpoint(checkpoint.path, CheckpointFault.DAMAGED, first.message)
