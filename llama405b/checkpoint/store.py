"""Where a run's checkpoints are, for all ranks: one directory that all hosts share, or one on each host's own disk.

Of the ranks that see the same directory the lowest keeps it: it alone changes what is there, holding its lease. Knows directories
and their owners; not tensors, the loss or the data.
"""

import contextlib
import dataclasses
import datetime
import errno
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from llama405b.capacity.disk import NoRoomError, check_room
from llama405b.checkpoint.digests import Fault, PassedOver, check_files, open_manifest, warning_of
from llama405b.checkpoint.directory import Directory, best_manifest, directories_of
from llama405b.contract.checkpoints import Manifest, committed, write_manifest
from llama405b.contract.errors import UserError
from llama405b.contract.events import RunEvent
from llama405b.contract.files import read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import reason_of, remedy_of
from llama405b.contract.replicas import replicated_steps
from llama405b.contract.trust import user_of
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank

SEEN_WITHIN_S = 15.0  # network filesystems show a new file late
MAX_EVENTS = 10_000  # read, of this run


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint that is complete, as far as that is seen without reading its tensors."""

    path: Path  # the same on all hosts
    manifest: Manifest
    available: tuple[frozenset[str], ...]  # files that each rank's owner has, its own or copies
    local: tuple[frozenset[str], ...]  # of them: what is in the checkpoint itself


@dataclasses.dataclass(frozen=True, slots=True)
class LocalView:
    """A checkpoint as it is in one directory."""

    digest: str = ""  # of its manifest; "": it has none
    files: tuple[str, ...] = ()  # present, and as the manifest says as far as that was checked
    copies: tuple[str, ...] = ()  # of other hosts' files
    fault: PassedOver | None = None  # the first
    warning: str = ""  # of who else can write it


class Store:
    """The checkpoints of one run."""

    def __init__(
        self,
        root: Path,
        keep: int,
        me: Rank,
        timeout_s: int = 1800,
        *,
        run: RunDir,
        say: Callable[[str], None] = print,
        shared: bool = True,
        keep_best: bool = False,
    ) -> None:
        """``run``: its name marks checkpoints as its own, which describe it; its events have the digests of those it saved.

        ``keep_best``: beside the newest ``keep`` the one with the least evaluation loss.
        ``shared``: all hosts see one directory; or else each has its own, by the same name.
        """
        self.keep_best = keep_best
        self.root = root
        self.keep = keep
        self.me = me
        self.run = run
        self.say = say
        self.shared = shared
        events = read_records(RunEvent, run.events("rank-0"), last=MAX_EVENTS)
        own = {event.path: (event.time, event.digest) for event in events if event.digest}
        newest: dict[str, tuple[float, str]] = {}
        for known in collectives.all_gather_objects(
            own, dict[str, tuple[float, str]]
        ):  # rank 0 may have been on another host before
            newest |= {name: entry for name, entry in known.items() if entry > newest.get(name, (0.0, ""))}
        self.saved = {name: digest for name, (_, digest) in newest.items()}  # of manifests, by path
        self.directory = Directory(root, run, me.host, me.attempt)
        self.holder = self.directory.holder
        # Saving goes on beside training, whose collectives must not mix with its own.
        self.group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=timeout_s), group_desc=ranks.BESIDE
        )
        self.hosts = tuple(collectives.all_gather_objects(me.host))  # by rank
        self.owner_of = (0,) * me.world  # by rank: who keeps the directory that it sees
        if not shared:
            self._survey()

    @property
    def is_owner(self) -> bool:
        """Whether this rank changes what is in its directory."""
        return self.owner_of[self.me.rank] == self.me.rank

    @property
    def owners(self) -> list[int]:
        """The ranks that do, each for a directory."""
        return sorted({*self.owner_of})

    def take(self) -> None:
        """Check that all ranks share the directory, and become the only run that writes into it: into all, or none.

        Raises:
            UserError: A rank cannot write there, or another run is writing there.
        """
        if self.shared:
            self._survey()
        try:
            self.on_owners(lambda: self.holder.take(self.say), self.root)
            self.on_owners(self.directory.finish, self.root)
        except UserError:
            self.close()
            raise

    def check_room(self, each_bytes: int, copies: int = 0) -> None:
        """Refuse a disk that cannot hold as many checkpoints of this size as are kept, and one that is being written.

        ``copies``: of the part of the owner before, as many.

        Raises:
            UserError: It has too little room, beside what this run has there already.
        """

        def look() -> None:
            before = self.owners[self.owners.index(self.me.rank) - 1]
            n_ranks = self.owner_of.count(self.me.rank)
            if len(self.owners) > 1:
                n_ranks += copies * self.owner_of.count(before)
            here = each_bytes * n_ranks // self.me.world
            own = len(self.directory.own())
            keep, free = self.keep + self.keep_best, shutil.disk_usage(self.root).free
            try:
                check_room(free, here, keep, own, best=self.keep_best)
            except NoRoomError as error:
                raise UserError(f"--checkpoint.dir: {self.root}{self._on_host()} {error}") from None

        self.on_owners(look, self.root, fault="cannot be looked into")

    def best_loss(self) -> float:
        """Return the least evaluation loss of this run's checkpoints; infinite if none was evaluated."""
        best = best_manifest(self.directory.own().values()) if self.is_owner else None
        losses = collectives.all_gather_objects(best.evaluation_loss if best else None, float | None)
        return min((loss for loss in losses if loss is not None), default=math.inf)

    def close(self) -> None:
        """Let the next run write into the directory."""
        self.holder.end()

    def _on_host(self) -> str:
        return "" if self.shared else f" on {self.me.host}"

    def _survey(self) -> None:
        """Find out, with a token file of each rank, which ranks see the same directory, and that all can write to it."""
        run = collectives.broadcast_object(uuid.uuid4().hex)
        tokens = [f".token-{run}-{rank}" for rank in range(self.me.world)]
        with collectives.raise_on_all_ranks():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                if os.statvfs(self.root).f_flag & os.ST_RDONLY:  # nobody's, whoever owns it
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"it belongs to {user_of(self.root.stat().st_uid)}")
                (self.root / tokens[self.me.rank]).touch()
            except OSError as error:
                raise UserError(
                    f"{self.root}: cannot be written ({error.strerror}) on {self.me.host}; set --checkpoint.dir"
                ) from None
        deadline = time.monotonic() + SEEN_WITHIN_S * self.shared
        while not (self.root / tokens[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        sees = [rank for rank, token in enumerate(tokens) if (self.root / token).exists()]
        with collectives.raise_on_all_ranks():
            if self.shared and 0 not in sees:
                raise UserError(
                    f"--checkpoint.dir: rank {self.me.rank} on {self.me.host} does not see a file in {self.root} "
                    "that rank 0 wrote; name a directory that all hosts share, or use --checkpoint.storage local"
                )
        self.owner_of = tuple(collectives.all_gather_objects(0 if self.shared else min(sees)))
        dist.barrier(self.group)
        (self.root / tokens[self.me.rank]).unlink(missing_ok=True)

    def on_owners(
        self,
        act: Callable[[], None],
        where: Path,
        group: dist.ProcessGroup | None = None,
        fault: str = "cannot be written",
    ) -> None:
        """Have owners do something with their directories while they hold them, and every rank refuse if one cannot.

        ``group``: the store's own, for what happens beside training. ``fault``: what is said of ``where`` then.
        """
        with collectives.raise_on_all_ranks(group):
            try:
                if self.is_owner:
                    self.holder.check()
                    act()
            except OSError as error:
                raise UserError(f"{where}: {fault} ({reason_of(error)}){self._on_host()}{remedy_of(error)}") from None

    def refuse_if_taken(self) -> None:
        """Check that no other run has taken the directory over."""
        with collectives.raise_on_all_ranks(), contextlib.suppress(OSError):
            if self.is_owner:
                self.holder.check()

    def present(self) -> list[Path]:
        """List the committed checkpoints that any owner sees, oldest first."""
        seen: list[str] = []

        def look() -> None:
            seen.extend({*(path.name for path in committed(self.root)), *replicated_steps(self.root)})

        self.on_owners(look, self.root, fault="cannot be listed")
        names = set[str]().union(*collectives.all_gather_objects(tuple(seen), tuple[str, ...]))
        return [self.root / name for name in sorted(names)]

    def set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them; a run that saves none takes the directory for that."""

        def rename() -> None:
            if paths and not self.holder.number:
                self.holder.take(self.say)
            self.directory.set_aside(paths)

        self.on_owners(rename, self.root)

    def look_at(self, path: Path) -> CheckpointView | PassedOver:
        """Open a checkpoint; returns the first fault that is seen without reading its tensors, but an unreadable file first.

        Warns of one that others can write.
        """
        views = collectives.all_gather_objects(self._see(path) if self.is_owner else LocalView(), LocalView)
        of_owners = [views[owner] for owner in self.owners]
        faults = [view.fault for view in of_owners if view.fault]
        if fault := self._fault(path, {view.digest for view in of_owners if view.digest}, faults):
            return fault
        manifest = self._manifest_of(path, next(owner for owner in self.owners if views[owner].digest))
        missing = sorted({*manifest.files}.difference(*((*view.files, *view.copies) for view in of_owners)))
        if missing:
            damage = next((f"{fault}; " for fault in faults if fault.fault is Fault.DAMAGED), "")
            return PassedOver(path, Fault.DAMAGED, f"{damage}{path}/{missing[0]}: on no host of this run")
        if warning := next(filter(None, (view.warning for view in of_owners)), ""):
            self.say(warning)
        local = tuple(frozenset(views[owner].files) for owner in self.owner_of)
        available = tuple(frozenset((*views[owner].files, *views[owner].copies)) for owner in self.owner_of)
        return CheckpointView(path, manifest, available, local)

    def _fault(self, path: Path, digests: set[str], faults: list[PassedOver]) -> PassedOver | None:
        """What forbids to read a manifest; None: one can be read. ``digests``: of the manifests that owners see."""
        unreadable = next((fault for fault in faults if fault.fault is Fault.UNREADABLE), None)
        if unreadable:
            return unreadable
        if faults and (self.shared or not digests):
            return faults[0]
        if not digests:
            return PassedOver(path, Fault.UNREADABLE, f"{path}: no such checkpoint")
        if len(digests) > 1:
            return PassedOver(path, Fault.DAMAGED, f"{path}: hosts have different manifests of it")
        return None

    def _manifest_of(self, path: Path, owner: int) -> Manifest:
        mine: Manifest | None = None
        if self.me.rank == owner:
            opened = [open_manifest(part, self.saved) for part in directories_of(path)]
            mine = next(each for each in opened if isinstance(each, Manifest))
        manifest = collectives.broadcast_object(mine, Manifest | None, source=owner)
        assert manifest
        return manifest

    def _see(self, path: Path) -> LocalView:
        """What of a checkpoint is in this rank's directory: its own part, and copies of others'."""
        parts = [path] if self.shared else [part for part in directories_of(path) if part.exists()]
        own = list[str]()
        copies = set[str]()
        digest = ""
        warning = ""
        fault: PassedOver | None = None
        for part in parts:
            opened = open_manifest(part, self.saved)
            if isinstance(opened, PassedOver):
                fault = fault or opened
                continue
            _, its_digest = write_manifest(opened)
            if part != path and self.saved.get(str(path), its_digest) != its_digest:
                continue  # a copy of what an earlier attempt saved after the same step
            digest = digest or its_digest
            try:
                good, why = check_files(part, opened)
                warning = warning or warning_of(part, opened)
            except OSError as error:
                said = f"{part}: cannot be read ({reason_of(error)}) on {self.me.host}"
                return LocalView(digest, fault=PassedOver(part, Fault.UNREADABLE, said))
            if part == path:
                own, fault = good, why
            elif its_digest == digest:
                copies |= {*good}
        return LocalView(digest, tuple(own), tuple(sorted(copies.difference(own))), fault, warning)
