"""Manage a directory of checkpoints: who may write, which are complete, which are kept. Knows files and owners; not tensors, loss or data.

Leases are numbered, and the highest number counts. A process takes the directory over by creating the next number exclusively, which
works on any filesystem that supports O_EXCL (flock is unreliable on NFS). The previous holder notices at its next check. A lease that is
neither renewed nor ended within ``STALE_S`` is dead; others watch it for that long, because clocks differ. If a holder's lease is missing,
the directory was removed or its filesystem unmounted; nothing is written below a bare mount point.

A checkpoint is written into ``step-N.<run>.tmp`` and renamed to ``step-N`` once its manifest is complete. A committed directory is never
changed or replaced, and is deleted only by the run that wrote it. All hosts share one directory, or each host has its own on its disk.
Of the ranks that see the same directory, only the lowest (its owner) changes it.
"""

import contextlib
import dataclasses
import datetime
import errno
import math
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path

import torch.distributed as dist

from llama405b.checkpoint.verified import Fault, PassedOver, check_files, hash_file, open_manifest, sync, warning_of
from llama405b.contract.checkpoints import (
    CONFIG_FILE,
    MANIFEST,
    METADATA,
    MODEL_FILES,
    FileDigest,
    Lease,
    Manifest,
    NoRoomError,
    check_room,
    committed,
    is_other,
    read_manifest,
    replicas,
    replicated_steps,
    step_of,
    write_manifest,
)
from llama405b.contract.disk import disk_free_bytes, refused_call, sync_directory
from llama405b.contract.errors import UserError, reason_of, remedy_of
from llama405b.contract.files import read_record, read_records, user_of, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import RunEvent
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank

RENEW_S = 15.0
STALE_S = 90.0  # more than NFS caches a directory (60 s) and a renewal takes
FILE = re.compile(r"lease-(\d{8})\.json")


class Holder:
    """The lease with which this process may write into a directory."""

    def __init__(self, root: Path, run: str, where: str, attempt: int) -> None:
        self.root, self.number = root, 0  # 0: no lease held
        self.lease = Lease(run, where, attempt, uuid.uuid4().hex)
        self.mount = ""  # where its filesystem is mounted
        self.say: Callable[[str], None] = print
        self.leaving = threading.Event()
        self.renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Acquire the lease; wait while it is unclear whether another holder is alive."""
        while True:
            newest = self._newest()
            self._wait_for(newest, say)
            if self._create(newest + 1):
                break
        self.mount, self.say = mount_of(self.root), say
        for path in self.root.iterdir():
            if _number_of(path) in range(1, self.number):
                path.unlink(missing_ok=True)
        self.renewer.start()

    def check(self) -> None:
        """Raise if another process has taken the directory over; recreate the directory if it was removed."""
        if not self.number:
            return
        lost = self._is_lost()
        if lost and mount_of(self.root) != self.mount:
            raise OSError(errno.ENODEV, f"the filesystem on {self.mount} is no longer mounted")
        newest = self._newest()
        if newest > self.number or (lost and newest and not self._is_free(self._read(newest))):
            raise UserError(
                f"{self.root}: {_named(self._read(newest))} took over this directory because this run was silent for "
                f"{STALE_S:.0f} s or was launched again; this attempt will save nothing more"
            )
        if lost:
            self._take_again(newest)

    def _take_again(self, newest: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._create(max(newest + 1, self.number)):
            self.check()  # another process created it first: find out whether that is an error
            return
        self.say(f"{self.root}: was removed or emptied during the run; saving continues there")

    def _is_lost(self) -> bool:
        """Whether this process's lease is missing from the directory."""
        found = self._read(self.number)
        return not self._path(self.number).exists() if found is None else found.token != self.lease.token

    def end(self) -> None:
        """End the lease, so that the next run can take the directory at once."""
        if self.number and not self.leaving.is_set():
            self.leaving.set()
            self.renewer.join(RENEW_S)
            with contextlib.suppress(OSError):
                if not self._is_lost():
                    self._write(self.number, ended=True)

    def _wait_for(self, number: int, say: Callable[[str], None]) -> None:
        """Return once the directory is free to take; see ``take``."""
        known = self._read(number)
        if number == 0 or self._is_free(known):
            return
        say(
            f"{self.root}: {_named(known)} used this directory and may still be running; watching it for {STALE_S:.0f} s"
        )
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_S / 10))
            newest = self._newest()
            now = self._read(newest)
            if self._is_free(now):
                return
            if (newest, now) != (number, known):
                raise UserError(
                    f"--checkpoint.dir: {_named(now)} is writing checkpoints into {self.root}; stop it, or give this run its own directory"
                )

    def _is_free(self, held: Lease | None) -> bool:
        mine = self.lease
        return held is not None and (
            held.ended or ((held.run, held.where) == (mine.run, mine.where) and held.attempt < mine.attempt)
        )

    def _renew(self) -> None:
        while not self.leaving.wait(RENEW_S):
            with contextlib.suppress(OSError):  # the next renewal will do
                if self._newest() > self.number:
                    return
                if not self._is_lost():
                    self._write(self.number)

    def _newest(self) -> int:
        paths = self.root.iterdir() if self.root.exists() else ()
        return max(map(_number_of, paths), default=0)

    def _path(self, number: int) -> Path:
        return self.root / f"lease-{number:08d}.json"

    def _read(self, number: int) -> Lease | None:
        return read_record(Lease, self._path(number))

    def _create(self, number: int) -> bool:
        try:
            self._path(number).touch(exist_ok=False)
        except FileExistsError:
            return False
        try:
            self._write(number)
        except OSError:
            self._path(number).unlink(missing_ok=True)  # so that no process waits for an empty lease
            raise
        self.number = number
        return True

    def _write(self, number: int, *, ended: bool = False) -> None:
        write_json(self._path(number), dataclasses.replace(self.lease, renewed=time.time(), ended=ended))


def mount_of(path: Path) -> str:
    """Return the mount point of a path, which need not exist; '' if unknown (proc(5), mountinfo)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    points = [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in lines]
    real = path.resolve()
    return max((point for point in points if real.is_relative_to(point)), key=len, default="")


def _number_of(path: Path) -> int:
    match = FILE.fullmatch(path.name)
    return int(match[1]) if match else 0


def _named(lease: Lease | None) -> str:
    if lease is None:
        return "another run"
    return f"run '{lease.run}' (attempt {lease.attempt}, {lease.where})"


OLD = r"tmp-old(-[0-9a-f]{8})?"  # suffix of a directory that is being deleted


def directories_of(path: Path) -> list[Path]:
    """List where a checkpoint may be on this host: its own part, and copies of other hosts' parts."""
    return [path, *replicas(path.parent, path.name)]


def best_manifest(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the manifest with the lowest evaluation loss; of equals the oldest; None if none has one."""
    losses = [(each.evaluation_loss, each.step, each) for each in manifests if each.evaluation_loss is not None]
    return min(losses, key=lambda entry: entry[:2], default=(None, 0, None))[2]


class Directory:
    """The directory of one run's checkpoints, for the one process that changes it."""

    def __init__(self, root: Path, run: RunDir, host: str, attempt: int) -> None:
        """``run``: its name marks its checkpoints, and its files (settings, model) are copied into them."""
        self.root = root
        self.run = run
        self.host = host
        self.holder = Holder(root, run.name, f"{host}:{run.path.resolve()}", attempt)

    def partial(self, final: Path) -> Path:
        """Return the directory in which this run writes a checkpoint; its name includes the run."""
        return final.with_name(f"{final.name}.{self.run.name}.tmp")

    def borrowed(self, final: Path) -> Path:
        """Return the directory for files of a checkpoint that this run fetches from other hosts."""
        return final.with_name(f"{final.name}.{self.run.name}.tmp-read")

    def begin(self, final: Path) -> None:
        """Create an empty directory to write into; first delete this run's half-written or half-deleted ones."""
        if final.exists():
            raise UserError(
                f"{final}: already exists, and checkpoints are never replaced; another run may be writing here: "
                "give this one its own --checkpoint.dir"
            )
        for leftover in self._leftovers(f"tmp(-read)?|{OLD}"):
            shutil.rmtree(leftover, ignore_errors=True)  # what remains takes room, and is reported by ``retire``
        partial = self.partial(final)
        if partial.exists():
            self._give_up(partial)
        partial.mkdir()
        self._describe(partial)

    def _describe(self, partial: Path) -> None:
        """Copy in the run's settings, and the model's configuration and tokenizer."""
        (partial / MODEL_FILES).mkdir()
        if self.run.config.is_file():
            shutil.copyfile(self.run.config, partial / CONFIG_FILE)
        for file in self.run.model(self.host).glob("[!.]*"):
            shutil.copyfile(file, partial / MODEL_FILES / file.name)
        sync_directory(str(partial / MODEL_FILES))

    def seal_others(self, final: Path) -> dict[str, FileDigest]:
        """Flush and hash the files without tensors: DCP's metadata, settings, model files."""
        return {name: hash_file(file, 0) for name, file in self._others(final).items()}

    def others(self, final: Path) -> dict[str, bytes]:
        """Return the content of the files without tensors, by name."""
        return {name: file.read_bytes() for name, file in self._others(final).items()}

    def _others(self, final: Path) -> dict[str, Path]:
        partial = self.partial(final)
        files = {path.relative_to(partial).as_posix(): path for path in partial.rglob("*") if path.is_file()}
        if METADATA not in files:
            raise FileNotFoundError(errno.ENOENT, "its files have disappeared")
        return {name: file for name, file in files.items() if is_other(name)}

    def add(self, final: Path, files: Mapping[str, bytes]) -> None:
        """Write files into a checkpoint that is not committed yet."""
        for name, content in files.items():
            file = self.partial(final) / name
            file.write_bytes(content)
            sync(file)

    def prepare(self, final: Path, manifest: Manifest) -> str:
        """Write the manifest, after which only the rename is missing; return the manifest's digest."""
        partial = self.partial(final)
        content, digest = write_manifest(manifest)
        (partial / MANIFEST).write_bytes(content)
        sync(partial / MANIFEST)
        # everything is on the disk before the rename makes it a checkpoint
        sync_directory(str(partial))
        return digest

    def commit(self, final: Path) -> None:
        """Rename the directory to its final name."""
        self.partial(final).rename(final)  # fails if another run has put a checkpoint there
        sync_directory(str(self.root))

    def own(self) -> dict[Path, Manifest]:
        """Return the checkpoints that this run saved, with their manifests, oldest first."""
        opened = {path: open_manifest(path, {}) for path in committed(self.root)}
        return {path: each for path, each in opened.items() if isinstance(each, Manifest) and each.run == self.run.name}

    def retire(self, step: int, keep: int, spared: Set[int], *, keep_best: bool = False) -> None:
        """Delete this run's old checkpoints; keep the newest ``keep``, protected steps and maybe the best.

        Earlier deletions that failed are retried.
        """
        own = {path: manifest for path, manifest in self.own().items() if step_of(path) <= step}
        best = best_manifest(own.values()) if keep_best else None
        faults = []
        doomed = [old for old in list(own)[:-keep] if step_of(old) not in spared and own[old] is not best]
        for old in [*self._leftovers(OLD), *doomed]:
            try:
                shutil.rmtree(old if old not in own else self._give_up(old))
            except OSError as error:
                faults.append(OSError(error.errno, f"{old.name}: {reason_of(error)}"))
        if faults:
            raise faults[0]

    def _give_up(self, path: Path) -> Path:
        """Rename a directory before deleting it: a kill then leaves nothing that looks complete."""
        step, _, _ = path.name.partition(".")
        return path.rename(path.with_name(f"{step}.{self.run.name}.tmp-old-{uuid.uuid4().hex[:8]}"))

    def set_aside(self, paths: Sequence[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them."""
        mark = f"aside-{time.strftime('%Y%m%d-%H%M%S')}"
        for old in [part for path in paths for part in directories_of(path) if part.exists()]:
            old.rename(old.with_name(f"{old.name}.{mark}"))

    def finish(self) -> None:
        """Commit the complete checkpoints that an earlier attempt wrote but was killed before renaming."""
        for partial in self._leftovers("tmp"):
            final = partial.with_name(partial.name.partition(".")[0])
            with contextlib.suppress(FileNotFoundError, MalformedError):
                manifest, _ = read_manifest((partial / MANIFEST).read_bytes())
                if (manifest.run, manifest.step) == (self.run.name, step_of(final)) and not final.exists():
                    partial.rename(final)

    def _leftovers(self, ending: str) -> list[Path]:
        own = re.compile(rf"step-\d{{8}}\.{re.escape(self.run.name)}\.({ending})")
        return [path for path in self.root.iterdir() if own.fullmatch(path.name)]


SEEN_WITHIN_S = 15.0  # network filesystems show a new file late
MAX_EVENTS = 10_000  # of this run that are read


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint that looks complete; its tensors have not been read."""

    path: Path  # the same on all hosts
    manifest: Manifest
    available: tuple[frozenset[str], ...]  # by rank: the files that its owner has, its own or copies
    local: tuple[frozenset[str], ...]  # of them: those in the checkpoint's own directory


@dataclasses.dataclass(frozen=True, slots=True)
class LocalView:
    """A checkpoint as it is in one directory."""

    digest: str = ""  # of its manifest; "": it has none
    files: tuple[str, ...] = ()  # that are present and match the manifest as far as was checked
    copies: tuple[str, ...] = ()  # of other hosts' files
    fault: PassedOver | None = None  # the first
    warning: str = ""  # if others can write it


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
        """``run``: its name marks its checkpoints, and its events have the digests of those that it saved.

        ``keep_best``: also keep the checkpoint with the lowest evaluation loss, in addition to the newest ``keep``.
        ``shared``: all hosts see one directory; otherwise each has its own of that name.
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
        ):  # all ranks are asked: rank 0 may have been on another host before
            newest |= {name: entry for name, entry in known.items() if entry > newest.get(name, (0.0, ""))}
        self.saved = {name: digest for name, (_, digest) in newest.items()}  # of manifests, by path
        self.directory = Directory(root, run, me.host, me.attempt)
        self.holder = self.directory.holder
        # Saves run in a background thread: their collectives must not mix with those of training.
        self.group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=timeout_s), group_desc=ranks.BESIDE
        )
        self.hosts = tuple(collectives.all_gather_objects(me.host))  # by rank
        self.owner_of = (0,) * me.world  # by rank: the owner of the directory that it sees
        if not shared:
            self._survey()

    @property
    def is_owner(self) -> bool:
        """Whether this rank changes what is in its directory."""
        return self.owner_of[self.me.rank] == self.me.rank

    @property
    def owners(self) -> list[int]:
        """The ranks that change a directory, one for each directory."""
        return sorted({*self.owner_of})

    def take(self) -> None:
        """Check that all ranks can use the directory, and acquire its lease: on all owners or on none.

        Raises:
            UserError: A rank cannot write there, or another run is writing there.
        """
        if self.shared:
            self._survey()
        try:
            self.on_owners(self._try, self.root)
            self.on_owners(lambda: self.holder.take(self.say), self.root)
            self.on_owners(self.directory.finish, self.root)
        except UserError:
            self.close()
            raise

    def _try(self) -> None:
        """Refuse a filesystem that lacks an operation of a save."""
        if refused := refused_call(str(self.root)):
            raise UserError(
                f"--checkpoint.dir: in {self.root}{self._on_host()} a run cannot {refused}; use another directory"
            )

    def check_room(self, each_bytes: int, copies: int = 0) -> None:
        """Refuse a disk that is too small for the checkpoints that are kept and one that is being written.

        ``copies``: how many copies of the previous owner's part it also keeps of each.

        Raises:
            UserError: A disk has too little room, given what this run has there already.
        """

        def look() -> None:
            before = self.owners[self.owners.index(self.me.rank) - 1]
            n_ranks = self.owner_of.count(self.me.rank)
            if len(self.owners) > 1:
                n_ranks += copies * self.owner_of.count(before)
            here = each_bytes * n_ranks // self.me.world
            own = len(self.directory.own())
            keep, free = self.keep + self.keep_best, disk_free_bytes(str(self.root))
            try:
                check_room(free, here, keep, own, best=self.keep_best)
            except NoRoomError as error:
                raise UserError(f"--checkpoint.dir: {self.root}{self._on_host()} {error}") from None

        self.on_owners(look, self.root, fault="cannot be checked")

    def best_loss(self) -> float:
        """Return the lowest evaluation loss of this run's checkpoints; infinite if none was evaluated."""
        best = best_manifest(self.directory.own().values()) if self.is_owner else None
        losses = collectives.all_gather_objects(best.evaluation_loss if best else None, float | None)
        return min((loss for loss in losses if loss is not None), default=math.inf)

    def close(self) -> None:
        """Release the lease."""
        self.holder.end()

    def _on_host(self) -> str:
        return "" if self.shared else f" on {self.me.host}"

    def _survey(self) -> None:
        """Find, by a token file per rank, which ranks see the same directory; check that all can write to it."""
        run = collectives.broadcast_object(uuid.uuid4().hex)
        tokens = [f".token-{run}-{rank}" for rank in range(self.me.world)]
        with collectives.raise_on_all_ranks():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                if os.statvfs(self.root).f_flag & os.ST_RDONLY:  # checked first: permissions do not matter then
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"it belongs to {user_of(self.root.stat().st_uid)}")
                (self.root / tokens[self.me.rank]).touch()
            except OSError as error:
                raise UserError(
                    f"{self.root}: cannot be written ({reason_of(error)}) on {self.me.host}; set --checkpoint.dir"
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
        # no token is deleted before all ranks have looked
        dist.barrier(self.group)
        (self.root / tokens[self.me.rank]).unlink(missing_ok=True)

    def on_owners(
        self,
        act: Callable[[], None],
        where: Path,
        group: dist.ProcessGroup | None = None,
        fault: str = "cannot be written",
    ) -> None:
        """Run an action on every owner that still holds its lease; if one fails, every rank raises.

        ``group``: the store's own group, for what runs asynchronously. ``fault``: what the error says of ``where`` then.
        """
        with collectives.raise_on_all_ranks(group):
            try:
                if self.is_owner:
                    self.holder.check()
                    act()
            except OSError as error:
                raise UserError(f"{where}: {fault} ({reason_of(error)}){self._on_host()}{remedy_of(error)}") from None

    def refuse_if_taken(self) -> None:
        """Refuse on all ranks if another run has taken the directory over."""
        with collectives.raise_on_all_ranks(), contextlib.suppress(OSError):
            if self.is_owner:
                self.holder.check()

    def present(self) -> list[Path]:
        """List the committed checkpoints that any owner sees, oldest first. A collective."""
        seen: list[str] = []

        def look() -> None:
            seen.extend({*(path.name for path in committed(self.root)), *replicated_steps(self.root)})

        self.on_owners(look, self.root, fault="cannot be listed")
        names = set[str]().union(*collectives.all_gather_objects(tuple(seen), tuple[str, ...]))
        return [self.root / name for name in sorted(names)]

    def set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them; a run without the lease acquires it first."""

        def rename() -> None:
            if paths and not self.holder.number:
                self.holder.take(self.say)
            self.directory.set_aside(paths)

        self.on_owners(rename, self.root)

    def look_at(self, path: Path) -> CheckpointView | PassedOver:
        """Open a checkpoint, or return its first fault; unreadable files take precedence. A collective.

        Its tensors are not read. It warns if others can write the checkpoint.
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
            return PassedOver(path, Fault.DAMAGED, f"{damage}{path}/{missing[0]}: not on any host of this run")
        if warning := next(filter(None, (view.warning for view in of_owners)), ""):
            self.say(warning)
        local = tuple(frozenset(views[owner].files) for owner in self.owner_of)
        available = tuple(frozenset((*views[owner].files, *views[owner].copies)) for owner in self.owner_of)
        return CheckpointView(path, manifest, available, local)

    def _fault(self, path: Path, digests: set[str], faults: list[PassedOver]) -> PassedOver | None:
        """Return why no manifest can be used, or None. ``digests``: of the manifests that owners see."""
        unreadable = next((fault for fault in faults if fault.fault is Fault.UNREADABLE), None)
        if unreadable:
            return unreadable
        if faults and (self.shared or not digests):
            return faults[0]
        if not digests:
            return PassedOver(path, Fault.UNREADABLE, f"{path}: no such checkpoint")
        if len(digests) > 1:
            return PassedOver(path, Fault.DAMAGED, f"{path}: its manifest differs between hosts")
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
        """Return what this rank's directory has of a checkpoint: its own part, and copies of other parts."""
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
                continue  # a copy from an earlier attempt, which saved the same step
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
