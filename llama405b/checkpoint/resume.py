"""Choose the checkpoint to resume from, gather its files, and verify it by loading it.

The choice looks at manifests and file sizes; DCP itself loads torn directories and flipped bits without an error. After a change of the
hosts' order or number, hosts send each other missing files in pieces, through CPU memory and the store's group. Knows files, owners and
the store.
"""

import contextlib
import dataclasses
import errno
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.api import CheckpointException

from llama405b.checkpoint.saving import restore, restore_weights
from llama405b.checkpoint.store import CheckpointView, Store, directories_of
from llama405b.checkpoint.verified import DamagedError, Fault, PassedOver, UnsafeError, VerifiedReader
from llama405b.contract.checkpoints import DATA_FILE, named_path, refuse_held, step_of
from llama405b.contract.disk import disk_free_bytes
from llama405b.contract.errors import UserError, counted, reason_of, remedy_of
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import Progress
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater

PIECE_BYTES = 64 << 20
FAILED = -1  # sent instead of a length: the sender cannot read the file


class Gathered:
    """A checkpoint as this rank reads it: its files here, and files fetched from other hosts."""

    def __init__(self, store: Store, found: CheckpointView, progress: Progress) -> None:
        self.store = store
        self.found = found
        self.progress = progress
        self.path = store.directory.borrowed(found.path)  # of fetched files
        self.rank, self.owner = store.me.rank, store.owner_of[store.me.rank]
        self.brought = set[str]()
        self.places = dict[str, Path]()  # of files that were not fetched, once found
        self.is_made = False
        self.sent_by: dict[tuple[str, int], int] = {}  # file and owner -> the owner that sent it
        self.have = {owner: {*found.local[owner]} for owner in store.owners}

    def describe(self) -> None:
        """Fetch the files that all ranks need: those without tensors."""
        self.bring([name for name in self.found.manifest.files if not DATA_FILE.fullmatch(name)])

    def bring(self, names: Iterable[str]) -> None:
        """Fetch the files that this rank needs, to where ``at`` finds them. A collective."""
        if self.store.shared:
            return
        needs = collectives.all_gather_objects(tuple(sorted({*names})), tuple[str, ...], self.store.group)
        moves = self._moves(needs)
        if not moves:
            return
        with collectives.raise_on_all_ranks(self.store.group):
            try:
                self._make_room(moves)
            except OSError as error:
                raise UserError(
                    f"{self.found.path}: {reason_of(error)} on {self.store.me.host}{remedy_of(error)}"
                ) from None
        failed = ""
        total, done = sum(self.found.manifest.files[name].bytes for name, _, to in moves if to == self.rank), 0
        for name, source, to in moves:  # in the same order on all ranks, or sends and receives could deadlock
            try:
                if self.rank == source:
                    self._send(name, to)
                elif self.rank == to:
                    done += self._receive(name, source)
                    self.progress(done, total)
            except OSError as error:
                failed = failed or f"{self.found.path}/{name}: {reason_of(error)} on {self.store.me.host}"
        with collectives.raise_on_all_ranks(self.store.group):
            if failed:
                raise UserError(f"{failed}; fix that, then resume")

    def drop(self) -> None:
        """Delete the fetched files."""
        if self.is_made:
            shutil.rmtree(self.path, ignore_errors=True)

    def _moves(self, needs: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
        """List the missing files (name, source, target); the owners that have a file take turns to send."""
        moves = []
        for owner in self.store.owners:
            wanted = {name for rank, names in enumerate(needs) if self.store.owner_of[rank] == owner for name in names}
            for number, name in enumerate(sorted(wanted - self.have[owner])):
                sources = [other for other in self.store.owners if name in self.found.available[other]]
                source = owner if owner in sources else sources[number % len(sources)]
                self.sent_by[name, owner] = source
                self.have[owner].add(name)
                if source != owner:
                    moves.append((name, source, owner))
        self.brought.update(name for name, _, to in moves if to == self.owner)
        return moves

    def _make_room(self, moves: Sequence[tuple[str, int, int]]) -> None:
        """Create the directory for the files to receive, if the disk has room for them."""
        coming = [name for name, _, to in moves if to == self.rank]
        if not coming:
            return
        needed = sum(self.found.manifest.files[name].bytes for name in coming)
        free = disk_free_bytes(str(self.store.root))
        if free is not None and needed > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e9:,.2f} GB are needed, but {free / 1e9:,.2f} GB are free")
        if not self.is_made:
            self.is_made = True
            shutil.rmtree(self.path, ignore_errors=True)
        for name in coming:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)

    def at(self, name: str) -> Path:
        """Return where this host has a file: fetched, its own, or a copy of another host's part."""
        if name in self.brought:
            return self.path / name
        if self.store.shared:
            return self.found.path / name
        if name not in self.places:
            self.places[name] = self._place_of(name)
        return self.places[name]

    def _place_of(self, name: str) -> Path:
        size = self.found.manifest.files[name].bytes
        places = [part / name for part in directories_of(self.found.path)]
        return next((place for place in places if place.is_file() and place.stat().st_size == size), places[0])

    def _send(self, name: str, to: int) -> None:
        left = self.found.manifest.files[name].bytes
        try:
            with self.at(name).open("rb", buffering=0) as file:
                while left:
                    content = bytearray(file.read(min(PIECE_BYTES, left)))
                    if not content:
                        raise OSError("the file shrank while it was being sent")
                    piece = torch.frombuffer(content, dtype=torch.uint8)
                    dist.send(torch.tensor([len(piece)]), to, self.store.group)
                    dist.send(piece, to, self.store.group)
                    left -= len(piece)
        except OSError:
            dist.send(torch.tensor([FAILED]), to, self.store.group)
            raise

    def _receive(self, name: str, source: int) -> int:
        left, size = self.found.manifest.files[name].bytes, torch.zeros(1, dtype=torch.int64)
        trouble: OSError | None = None
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / name).open("wb"))
            except OSError as error:
                trouble = error
            while left > 0:
                dist.recv(size, source, self.store.group)
                if int(size) == FAILED:
                    return 0  # the sender reports the reason
                piece = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(piece, source, self.store.group)
                left -= len(piece)
                try:
                    if trouble is None:
                        file.write(memoryview(piece.numpy()))
                except OSError as error:  # keep receiving: the sender does not know
                    trouble = error
        if trouble:
            raise trouble
        return self.found.manifest.files[name].bytes


class Resume:
    """The checkpoint that ``--resume`` (no, auto, a step, a path) selects. All methods are collectives."""

    def __init__(self, store: Store, wanted: str, *, weights_only: bool = False) -> None:
        """Choose the checkpoint. ``weights_only``: to read its weights, not to resume; nothing is set aside.

        Raises:
            UserError: A named checkpoint is missing or incomplete; with ``auto``, no checkpoint is complete, a newer one cannot be
            read, or the checkpoints that this run saved are gone; or the directory holds checkpoints of another run.
        """
        self.store = store
        self.wanted = wanted
        self.weights_only = weights_only
        self.found: CheckpointView | None = None
        self.passed_over: list[PassedOver] = []
        self.untried = store.present()  # newest last
        self.n_present = len(self.untried)
        if wanted == "no":
            refuse_held(store.root, self.untried)
        elif wanted == "auto":
            self._choose_newest()
        else:
            self._choose_named()

    def load(self, model: torch.nn.Module, updater: Updater, me: Rank, progress: Progress) -> int:
        """Load the chosen checkpoint into the shards and return its step. Unused checkpoints are set aside.

        Raises:
            DamagedError: A part of it is damaged: the shards are undefined, and ``found`` is now the same
                without that file, if another host has a copy, or else an older checkpoint: call this again.
            UserError: No checkpoint can be loaded, it cannot be read, or it contains what no checkpoint does.
        """
        assert self.found
        gathered = Gathered(self.store, self.found, progress)
        try:
            gathered.describe()
            reader = GatheringReader(gathered, progress)
            with collectives.raise_on_all_ranks():
                reader.read_metadata()
            load = restore_weights if self.weights_only else restore
            done = load(self.found.path, model, updater, me, reader)
        except CheckpointException as failed:
            _refuse_unsafe(failed)
            fault = _fault(self.found, failed, self.store.hosts)
            if fault.fault is Fault.DAMAGED and self._leave_out(gathered, failed):
                raise DamagedError(f"{fault}; loading its copy instead") from None
            self._reject(fault)
            raise DamagedError(f"{fault}; loading {self.found.path} instead") from None
        finally:
            gathered.drop()
        self.settle()
        return done

    @property
    def _another(self) -> str:
        """What to do if the named checkpoint cannot be used."""
        return "use another one" if self.weights_only else "use another one, or auto"

    def _leave_out(self, gathered: Gathered, failed: CheckpointException) -> bool:
        """Drop damaged files from the choice; return whether other hosts have copies of all of them."""
        assert self.found
        local = list(self.found.local)
        available = list(self.found.available)
        owner_of = self.store.owner_of
        for rank, cause in failed.failures.items():
            assert isinstance(cause[0], DamagedError)
            file, owner = cause[0].file, owner_of[rank]
            if file not in self.found.manifest.files:
                return False
            sender = gathered.sent_by.get((file, owner), owner)
            for other in [other for other, its in enumerate(owner_of) if its == sender]:
                local[other] = local[other] - {file}
                available[other] = available[other] - {file}
        if {*self.found.manifest.files} - set().union(*available):
            return False
        self.found = dataclasses.replace(self.found, local=tuple(local), available=tuple(available))
        return True

    def settle(self) -> None:
        """Rename the rejected checkpoints, so that ``auto`` does not find them."""
        self.store.set_aside([each.path for each in self.passed_over])

    def _choose_named(self) -> None:
        """Choose the requested checkpoint, and reject later ones; refuse if these belong to another run."""
        root = self.store.root
        path = named_path(root, self.wanted)
        found = self.store.look_at(path)
        if isinstance(found, PassedOver):
            raise UserError(f"--resume: {found}; {self._another}")
        later = [each for each in self.untried if step_of(each) > step_of(path)]
        if self.weights_only:
            later = []
        if later and path.parent.resolve() != root.resolve():
            raise UserError(
                f"--checkpoint.dir: {root} holds checkpoints up to {later[-1].name} of another run; use another directory"
            )
        self.found = found
        self.passed_over = [PassedOver(old, Fault.LATER, f"{old}: saved after {path.name}") for old in later]

    def _choose_newest(self) -> None:
        """Choose the newest checkpoint that looks complete; refuse if a newer one cannot be read."""
        self.found = None
        while self.untried and not self.found:
            looked = self.store.look_at(self.untried.pop())
            if isinstance(looked, CheckpointView):
                self.found = looked
            else:
                self._pass_over(looked)
        known = [path for path in self.store.saved if Path(path).parent == self.store.root]
        if known and not self.n_present:
            raise UserError(
                f"--resume auto: {self.store.root} is empty, but this run saved {Path(max(known)).name} there; is its filesystem "
                "mounted? To start from the model's weights, use another --run"
            )
        if self.passed_over and not self.found:
            raise UserError(
                f"--resume auto: {self.store.root} has {counted(self.n_present, 'checkpoint')}, but none verifies "
                f"({'; '.join(map(str, self.passed_over))}); to start from the model's weights, use another --checkpoint.dir"
            )

    def _pass_over(self, fault: PassedOver) -> None:
        if fault.fault is Fault.UNREADABLE:
            raise UserError(
                f"--resume auto: {fault}; it may be intact: make it readable, or go back to an earlier step with --resume STEP"
            )
        self.passed_over.append(fault)

    def _reject(self, fault: PassedOver) -> None:
        """Reject the chosen checkpoint; with ``auto``, choose an older one."""
        if self.wanted != "auto":
            raise UserError(f"--resume: {fault}; {self._another}")
        self._pass_over(fault)
        self._choose_newest()


class GatheringReader(VerifiedReader):
    """Fetches the files that this rank's plan needs, and verifies what it reads."""

    def __init__(self, gathered: Gathered, told: Progress) -> None:
        super().__init__(gathered.found.path, gathered.found.manifest)
        self.gathered, self.told = gathered, told

    def at(self, name: str) -> Path:
        """Return where this host has a file."""
        return self.gathered.at(name)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Fetch the files of the plan; DCP calls this on all ranks."""
        self.gathered.bring(self.storage_data[item.storage_index].relative_path for item in plan.items)
        return super().prepare_local_plan(plan)


def _refuse_unsafe(failed: CheckpointException) -> None:
    """Raise on every rank if one found unsafe content: none may silently use an older checkpoint."""
    for _, (cause, _) in sorted(failed.failures.items()):
        if isinstance(cause, UnsafeError):
            raise UserError(str(cause)) from None


def _fault(found: CheckpointView, failed: CheckpointException, hosts: tuple[str, ...]) -> PassedOver:
    """Return why a checkpoint could not be loaded; an unreadable disk takes precedence over damage."""
    causes = {rank: cause[0] for rank, cause in sorted(failed.failures.items())}
    for rank, cause in causes.items():
        if not isinstance(cause, DamagedError):
            why = f"{found.path}: cannot be read ({reason_of(cause)}) on {hosts[rank]}"
            return PassedOver(found.path, Fault.UNREADABLE, why)
    return PassedOver(found.path, Fault.DAMAGED, str(next(iter(causes.values()))))
