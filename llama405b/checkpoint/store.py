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

from llama405b.checkpoint.format import (
    CheckpointFault,
    RejectedCheckpoint,
    check_files,
    open_manifest,
    write_access_warning,
)
from llama405b.contract.checkpoints import (
    CONFIG_FILE,
    INDEX,
    MANIFEST,
    MODEL_FILES,
    Lease,
    Manifest,
    NoRoomError,
    check_disk_space,
    is_metadata_file,
    list_committed,
    read_manifest,
    replicas,
    replicated_steps,
    step_of,
    write_manifest,
)
from llama405b.contract.disk import disk_free_bytes, sync, unsupported_operation
from llama405b.contract.errors import UserError, reason_of, remedy_of
from llama405b.contract.files import read_record, read_records, user_name, write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.records import RunEvent
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank

RENEW_EVERY_S = 15.0
STALE_S = 90.0  # more than NFS caches a directory (60 s) and a renewal takes
LEASE_FILE = re.compile(r"lease-(\d{8})\.json")


class LeaseHolder:
    """The lease with which this process may write into a directory."""

    def __init__(self, root: Path, run: str, location: str, attempt: int) -> None:
        self.root, self.number = root, 0  # 0: no lease held
        self.lease = Lease(run, location, attempt, uuid.uuid4().hex)
        self.mount = ""  # where its filesystem is mounted
        self.say: Callable[[str], None] = print
        self.end_requested = threading.Event()
        self.renewer = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Acquire the lease; wait while it is unclear whether another holder is alive."""
        while True:
            latest = self._latest_number()
            self._wait_until_free(latest, say)
            if self._create(latest + 1):
                break
        self.mount, self.say = mount_point(self.root), say
        for path in self.root.iterdir():
            if _number_of(path) in range(1, self.number):
                path.unlink(missing_ok=True)
        self.renewer.start()

    def check(self) -> None:
        """Raise if another process has taken the directory over; recreate the directory if it was removed."""
        if not self.number:
            return
        is_lost = self._is_lost()
        if is_lost and mount_point(self.root) != self.mount:
            raise OSError(errno.ENODEV, f"the filesystem on {self.mount} is no longer mounted")
        latest = self._latest_number()
        if latest > self.number or (is_lost and latest and not self._is_free(self._read(latest))):
            raise UserError(
                f"{self.root}: {_describe_holder(self._read(latest))} took over this directory because this run was silent for "
                f"{STALE_S:.0f} s or was launched again; this attempt will save nothing more"
            )
        if is_lost:
            self._reacquire(latest)

    def _reacquire(self, latest: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._create(max(latest + 1, self.number)):
            self.check()  # another process created it first: find out whether that is an error
            return
        self.say(f"{self.root}: was removed or emptied during the run; saving continues there")

    def _is_lost(self) -> bool:
        """Whether this process's lease is missing from the directory."""
        lease = self._read(self.number)
        return not self._path(self.number).exists() if lease is None else lease.token != self.lease.token

    def release(self) -> None:
        """End the lease, so that the next run can take the directory at once."""
        if self.number and not self.end_requested.is_set():
            self.end_requested.set()
            self.renewer.join(RENEW_EVERY_S)
            with contextlib.suppress(OSError):
                if not self._is_lost():
                    self._write(self.number, ended=True)

    def _wait_until_free(self, number: int, say: Callable[[str], None]) -> None:
        """Return once the directory is free to take; see ``acquire``."""
        previous = self._read(number)
        if number == 0 or self._is_free(previous):
            return
        say(
            f"{self.root}: {_describe_holder(previous)} used this directory and may still be running; watching it for {STALE_S:.0f} s"
        )
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_S / 10))
            latest = self._latest_number()
            current = self._read(latest)
            if self._is_free(current):
                return
            if (latest, current) != (number, previous):
                raise UserError(
                    f"--checkpoint.dir: {_describe_holder(current)} is writing checkpoints into {self.root}; stop it, "
                    f"or give this run its own directory"
                )

    def _is_free(self, lease: Lease | None) -> bool:
        own_lease = self.lease
        return lease is not None and (
            lease.ended
            or ((lease.run, lease.where) == (own_lease.run, own_lease.where) and lease.attempt < own_lease.attempt)
        )

    def _renew(self) -> None:
        while not self.end_requested.wait(RENEW_EVERY_S):
            with contextlib.suppress(OSError):  # the next renewal will do
                if self._latest_number() > self.number:
                    return
                if not self._is_lost():
                    self._write(self.number)

    def _latest_number(self) -> int:
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


def mount_point(path: Path) -> str:
    """Return the mount point of a path, which need not exist; '' if unknown (proc(5), mountinfo)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    points = [re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[4]) for line in lines]
    real_path = path.resolve()
    return max((point for point in points if real_path.is_relative_to(point)), key=len, default="")


def _number_of(path: Path) -> int:
    match = LEASE_FILE.fullmatch(path.name)
    return int(match[1]) if match else 0


def _describe_holder(lease: Lease | None) -> str:
    if lease is None:
        return "another run"
    return f"run '{lease.run}' (attempt {lease.attempt}, {lease.where})"


DELETING_SUFFIX = r"tmp-old(-[0-9a-f]{8})?"  # suffix of a directory that is being deleted


def part_directories(path: Path) -> list[Path]:
    """List where a checkpoint may be on this host: its own part, and copies of other hosts' parts."""
    return [path, *replicas(path.parent, path.name)]


def best_manifest(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the manifest with the lowest evaluation loss; of equals the oldest; None if none has one."""
    losses = [
        (manifest.evaluation_loss, manifest.step, manifest)
        for manifest in manifests
        if manifest.evaluation_loss is not None
    ]
    return min(losses, key=lambda entry: entry[:2], default=(None, 0, None))[2]


FileVersion = tuple[Path, int, int, int]  # other numbers tell that a file was replaced


def _identify(file: Path) -> FileVersion:
    try:
        info = file.stat()
    except OSError:
        return file, 0, 0, 0
    return file, info.st_ino, info.st_size, info.st_mtime_ns


class CheckpointDirectory:
    """The directory of one run's checkpoints, for the one process that changes it."""

    def __init__(self, root: Path, run: RunDir, host: str, attempt: int) -> None:
        """``run``: its name marks its checkpoints, and its files (settings, model) are copied into them."""
        self.root = root
        self.run = run
        self.host = host
        self.prepared: tuple[
            Manifest, str
        ]  # of the checkpoint that is being saved: its manifest, and that one's digest
        self.opened: dict[
            FileVersion, tuple[Manifest, str]
        ] = {}  # of this run: a manifest may be large, and is read once
        self.holder = LeaseHolder(root, run.name, f"{host}:{run.path.resolve()}", attempt)

    def partial_path(self, final: Path) -> Path:
        """Return the directory in which this run writes a checkpoint; its name includes the run."""
        return final.with_name(f"{final.name}.{self.run.name}.tmp")

    def fetched_path(self, final: Path) -> Path:
        """Return the directory for files of a checkpoint that this run fetches from other hosts."""
        return final.with_name(f"{final.name}.{self.run.name}.tmp-read")

    def read_description(self) -> dict[str, bytes]:
        """Return the files that describe this run's checkpoints, by name: its settings, the model's configuration and tokenizer."""
        files = {f"{MODEL_FILES}/{file.name}": file for file in self.run.model(self.host).glob("[!.]*")}
        if self.run.config.is_file():
            files[CONFIG_FILE] = self.run.config
        return {name: file.read_bytes() for name, file in sorted(files.items()) if is_metadata_file(name)}

    def begin(self, final: Path, described: Mapping[str, bytes]) -> None:
        """Create a directory to write into; first delete this run's half-written or half-deleted ones.

        ``described``: the content of the files without tensors, by name.
        """
        if final.exists():
            raise UserError(
                f"{final}: already exists, and checkpoints are never replaced; another run may be writing here: "
                "give this one its own --checkpoint.dir"
            )
        for leftover in self._leftovers(f"tmp(-read)?|{DELETING_SUFFIX}"):
            shutil.rmtree(leftover, ignore_errors=True)  # what remains takes room, and is reported by ``delete_old``
        partial = self.partial_path(final)
        if partial.exists():
            self._rename_for_deletion(partial)
        partial.mkdir()
        (partial / MODEL_FILES).mkdir()
        for name, content in described.items():
            (partial / name).write_bytes(content)
            sync(str(partial / name))
        sync(str(partial / MODEL_FILES))

    def write_manifest_file(self, final: Path, manifest: Manifest) -> str:
        """Write the manifest, after which only the rename is missing; return the manifest's digest."""
        partial = self.partial_path(final)
        if not (partial / INDEX).exists():
            raise FileNotFoundError(errno.ENOENT, "its files have disappeared")
        content, digest = write_manifest(manifest)
        (partial / MANIFEST).write_bytes(content)
        sync(str(partial / MANIFEST))
        # everything is on the disk before the rename makes it a checkpoint
        sync(str(partial))
        self.prepared = manifest, digest
        return digest

    def commit(self, final: Path) -> None:
        """Rename the directory to its final name."""
        self.partial_path(final).rename(final)  # fails if another run has put a checkpoint there
        self.opened[_identify(final / MANIFEST)] = self.prepared
        sync(str(self.root))

    def own_checkpoints(self) -> dict[Path, tuple[Manifest, str]]:
        """Return the checkpoints that this run saved, with their manifests and the digests of these, oldest first."""
        files = {path: _identify(path / MANIFEST) for path in list_committed(self.root)}
        found = {path: self.opened.get(file) or open_manifest(path) for path, file in files.items()}
        own = {
            path: opened
            for path, opened in found.items()
            if not isinstance(opened, RejectedCheckpoint) and opened[0].run == self.run.name
        }
        self.opened = {files[path]: opened for path, opened in own.items()}
        return own

    def delete_old(self, step: int, keep: int, protected_steps: Set[int], *, keep_best: bool = False) -> None:
        """Delete this run's old checkpoints; keep the newest ``keep``, protected steps and maybe the best.

        Earlier deletions that failed are retried.
        """
        manifests = {path: manifest for path, (manifest, _) in self.own_checkpoints().items() if step_of(path) <= step}
        best = best_manifest(manifests.values()) if keep_best else None
        faults = []
        deletable = [
            old_path
            for old_path in list(manifests)[:-keep]
            if step_of(old_path) not in protected_steps and manifests[old_path] is not best
        ]
        for old_path in [*self._leftovers(DELETING_SUFFIX), *deletable]:
            try:
                shutil.rmtree(old_path if old_path not in manifests else self._rename_for_deletion(old_path))
            except OSError as error:
                faults.append(OSError(error.errno, f"{old_path.name}: {reason_of(error)}"))
        if faults:
            raise faults[0]

    def _rename_for_deletion(self, path: Path) -> Path:
        """Rename a directory before deleting it: a kill then leaves nothing that looks complete."""
        step, _, _ = path.name.partition(".")
        return path.rename(path.with_name(f"{step}.{self.run.name}.tmp-old-{uuid.uuid4().hex[:8]}"))

    def set_aside(self, paths: Sequence[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them."""
        mark = f"aside-{time.strftime('%Y%m%d-%H%M%S')}"
        for old_path in [part for path in paths for part in part_directories(path) if part.exists()]:
            old_path.rename(old_path.with_name(f"{old_path.name}.{mark}"))

    def commit_prepared(self) -> None:
        """Commit the complete checkpoints that an earlier attempt wrote but was killed before renaming."""
        for partial in self._leftovers("tmp"):
            final = partial.with_name(partial.name.partition(".")[0])
            with contextlib.suppress(FileNotFoundError, MalformedError):
                manifest, _ = read_manifest((partial / MANIFEST).read_bytes())
                if (manifest.run, manifest.step) == (self.run.name, step_of(final)) and not final.exists():
                    partial.rename(final)

    def _leftovers(self, ending: str) -> list[Path]:
        pattern = re.compile(rf"step-\d{{8}}\.{re.escape(self.run.name)}\.({ending})")
        return [path for path in self.root.iterdir() if pattern.fullmatch(path.name)]


VISIBILITY_TIMEOUT_S = 15.0  # network filesystems show a new file late
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
    fault: RejectedCheckpoint | None = None  # the first
    warning: str = ""  # if others can write it


class Store:
    """The checkpoints of one run."""

    def __init__(
        self,
        root: Path,
        keep: int,
        rank: Rank,
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
        self.rank = rank
        self.run = run
        self.say = say
        self.shared = shared
        events = read_records(RunEvent, run.events("rank-0"), last=MAX_EVENTS)
        local_entries = {event.path: (event.time, event.digest) for event in events if event.digest}
        latest_entries: dict[str, tuple[float, str]] = {}
        for rank_entries in collectives.all_gather_objects(
            local_entries, dict[str, tuple[float, str]]
        ):  # all ranks are asked: rank 0 may have been on another host before
            latest_entries |= {
                name: entry for name, entry in rank_entries.items() if entry > latest_entries.get(name, (0.0, ""))
            }
        self.saved_digests = {name: digest for name, (_, digest) in latest_entries.items()}  # of manifests, by path
        self.directory = CheckpointDirectory(root, run, rank.host, rank.attempt)
        self.holder = self.directory.holder
        # Saves run in a background thread: their collectives must not mix with those of training.
        self.group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=timeout_s), group_desc=ranks.BACKGROUND_GROUP
        )
        self.hosts = tuple(collectives.all_gather_objects(rank.host))  # by rank
        self.owner_of = (0,) * rank.world_size  # by rank: the owner of the directory that it sees
        if not shared:
            self._find_owners()

    @property
    def is_owner(self) -> bool:
        """Whether this rank changes what is in its directory."""
        return self.owner_of[self.rank.index] == self.rank.index

    @property
    def owners(self) -> list[int]:
        """The ranks that change a directory, one for each directory."""
        return sorted({*self.owner_of})

    def acquire(self) -> None:
        """Check that all ranks can use the directory, and acquire its lease: on all owners or on none.

        Raises:
            UserError: A rank cannot write there, or another run is writing there.
        """
        if self.shared:
            self._find_owners()
        try:
            self.run_on_owners(self._check_filesystem, self.root)
            self.run_on_owners(lambda: self.holder.acquire(self.say), self.root)
            self.run_on_owners(self.directory.commit_prepared, self.root)
        except UserError:
            self.close()
            raise

    def _check_filesystem(self) -> None:
        """Refuse a filesystem that lacks an operation of a save."""
        if operation := unsupported_operation(str(self.root)):
            raise UserError(
                f"--checkpoint.dir: in {self.root}{self._host_clause()} a run cannot {operation}; use another directory"
            )

    def check_disk_space(self, checkpoint_bytes: int, copies: int = 0) -> None:
        """Refuse a disk that is too small for the checkpoints that are kept and one that is being written.

        ``copies``: how many copies of the previous owner's part it also keeps of each.

        Raises:
            UserError: A disk has too little room, given what this run has there already.
        """

        def check_local() -> None:
            previous_owner = self.owners[self.owners.index(self.rank.index) - 1]
            n_ranks = self.owner_of.count(self.rank.index)
            if len(self.owners) > 1:
                n_ranks += copies * self.owner_of.count(previous_owner)
            local_bytes = checkpoint_bytes * n_ranks // self.rank.world_size
            n_own = len(self.directory.own_checkpoints())
            keep, free_bytes = self.keep + self.keep_best, disk_free_bytes(str(self.root))
            try:
                check_disk_space(free_bytes, local_bytes, keep, n_own, keep_best=self.keep_best)
            except NoRoomError as error:
                raise UserError(f"--checkpoint.dir: {self.root}{self._host_clause()} {error}") from None

        self.run_on_owners(check_local, self.root, fault="cannot be checked")

    def best_loss(self) -> float:
        """Return the lowest evaluation loss of this run's checkpoints; infinite if none was evaluated."""
        own = self.directory.own_checkpoints() if self.is_owner else {}
        best = best_manifest(manifest for manifest, _ in own.values())
        losses = collectives.all_gather_objects(best.evaluation_loss if best else None, float | None)
        return min((loss for loss in losses if loss is not None), default=math.inf)

    def close(self) -> None:
        """Release the lease."""
        self.holder.release()

    def _host_clause(self) -> str:
        return "" if self.shared else f" on {self.rank.host}"

    def _find_owners(self) -> None:
        """Find, by a token file per rank, which ranks see the same directory; check that all can write to it."""
        nonce = collectives.broadcast_object(uuid.uuid4().hex)
        tokens = [f".token-{nonce}-{rank}" for rank in range(self.rank.world_size)]
        with collectives.raise_on_all_ranks():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                if os.statvfs(self.root).f_flag & os.ST_RDONLY:  # checked first: permissions do not matter then
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"it belongs to {user_name(self.root.stat().st_uid)}")
                (self.root / tokens[self.rank.index]).touch()
            except OSError as error:
                raise UserError(
                    f"{self.root}: cannot be written ({reason_of(error)}) on {self.rank.host}; set --checkpoint.dir"
                ) from None
        deadline = time.monotonic() + VISIBILITY_TIMEOUT_S * self.shared
        while not (self.root / tokens[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        visible_ranks = [rank for rank, token in enumerate(tokens) if (self.root / token).exists()]
        with collectives.raise_on_all_ranks():
            if self.shared and 0 not in visible_ranks:
                raise UserError(
                    f"--checkpoint.dir: rank {self.rank.index} on {self.rank.host} does not see a file in {self.root} "
                    "that rank 0 wrote; name a directory that all hosts share, or use --checkpoint.storage local"
                )
        self.owner_of = tuple(collectives.all_gather_objects(0 if self.shared else min(visible_ranks)))
        # no token is deleted before all ranks have looked
        dist.barrier(self.group)
        (self.root / tokens[self.rank.index]).unlink(missing_ok=True)

    def run_on_owners(
        self,
        action: Callable[[], None],
        path: Path,
        group: dist.ProcessGroup | None = None,
        fault: str = "cannot be written",
    ) -> None:
        """Run an action on every owner that still holds its lease; if one fails, every rank raises.

        ``group``: the store's own group, for what runs asynchronously. ``fault``: what the error says of ``path`` then.
        """
        with collectives.raise_on_all_ranks(group):
            try:
                if self.is_owner:
                    self.holder.check()
                    action()
            except OSError as error:
                raise UserError(
                    f"{path}: {fault} ({reason_of(error)}){self._host_clause()}{remedy_of(error)}"
                ) from None

    def check_lease(self) -> None:
        """Refuse on all ranks if another run has taken the directory over."""
        with collectives.raise_on_all_ranks(), contextlib.suppress(OSError):
            if self.is_owner:
                self.holder.check()

    def list_checkpoints(self) -> list[Path]:
        """List the committed checkpoints that any owner sees, oldest first. A collective."""
        seen: list[str] = []

        def list_local() -> None:
            seen.extend({*(path.name for path in list_committed(self.root)), *replicated_steps(self.root)})

        self.run_on_owners(list_local, self.root, fault="cannot be listed")
        names = set[str]().union(*collectives.all_gather_objects(tuple(seen), tuple[str, ...]))
        return [self.root / name for name in sorted(names)]

    def set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them; a run without the lease acquires it first."""

        def rename() -> None:
            if paths and not self.holder.number:
                self.holder.acquire(self.say)
            self.directory.set_aside(paths)

        self.run_on_owners(rename, self.root)

    def open_checkpoint(self, path: Path) -> CheckpointView | RejectedCheckpoint:
        """Open a checkpoint, or return its first fault; unreadable files take precedence. A collective.

        Its tensors are not read. It warns if others can write the checkpoint.
        """
        views = collectives.all_gather_objects(self._inspect_local(path) if self.is_owner else LocalView(), LocalView)
        owner_views = [views[owner] for owner in self.owners]
        faults = [view.fault for view in owner_views if view.fault]
        if fault := self._find_manifest_fault(path, {view.digest for view in owner_views if view.digest}, faults):
            return fault
        source = next(owner for owner in self.owners if views[owner].digest)
        manifest = self._broadcast_manifest(path, source, views[source].digest)
        missing = sorted({*manifest.files}.difference(*((*view.files, *view.copies) for view in owner_views)))
        if missing:
            damage = next((f"{fault}; " for fault in faults if fault.fault is CheckpointFault.DAMAGED), "")
            return RejectedCheckpoint(
                path, CheckpointFault.DAMAGED, f"{damage}{path}/{missing[0]}: not on any host of this run"
            )
        if warning := next(filter(None, (view.warning for view in owner_views)), ""):
            self.say(warning)
        local = tuple(frozenset(views[owner].files) for owner in self.owner_of)
        available = tuple(frozenset((*views[owner].files, *views[owner].copies)) for owner in self.owner_of)
        return CheckpointView(path, manifest, available, local)

    def _find_manifest_fault(
        self, path: Path, digests: set[str], faults: list[RejectedCheckpoint]
    ) -> RejectedCheckpoint | None:
        """Return why no manifest can be used, or None. ``digests``: of the manifests that owners see."""
        unreadable = next((fault for fault in faults if fault.fault is CheckpointFault.UNREADABLE), None)
        if unreadable:
            return unreadable
        if faults and (self.shared or not digests):
            return faults[0]
        if not digests:
            return RejectedCheckpoint(path, CheckpointFault.UNREADABLE, f"{path}: no such checkpoint")
        if len(digests) > 1:
            return RejectedCheckpoint(path, CheckpointFault.DAMAGED, f"{path}: its manifest differs between hosts")
        return None

    def _broadcast_manifest(self, path: Path, source: int, digest: str) -> Manifest:
        manifest: Manifest | None = None
        if self.rank.index == source:
            found = [open_manifest(part, self.saved_digests) for part in part_directories(path)]
            manifest = next(each[0] for each in found if not isinstance(each, RejectedCheckpoint) and each[1] == digest)
        manifest = collectives.broadcast_object(manifest, Manifest | None, source=source)
        assert manifest
        return manifest

    def _inspect_local(self, path: Path) -> LocalView:
        """Return what this rank's directory has of a checkpoint: its own part, and copies of other parts."""
        parts = [path] if self.shared else [part for part in part_directories(path) if part.exists()]
        local_files = list[str]()
        copies = set[str]()
        digest = ""
        warning = ""
        fault: RejectedCheckpoint | None = None
        for part in parts:
            opened = open_manifest(part, self.saved_digests)
            if isinstance(opened, RejectedCheckpoint):
                fault = fault or opened
                continue
            manifest, part_digest = opened
            if part != path and self.saved_digests.get(str(path), part_digest) != part_digest:
                continue  # a copy from an earlier attempt, which saved the same step
            digest = digest or part_digest
            try:
                intact_files, part_fault = check_files(part, manifest)
                warning = warning or write_access_warning(part, manifest)
            except OSError as error:
                message = f"{part}: cannot be read ({reason_of(error)}) on {self.rank.host}"
                return LocalView(digest, fault=RejectedCheckpoint(part, CheckpointFault.UNREADABLE, message))
            if part == path:
                local_files, fault = intact_files, part_fault
            elif part_digest == digest:
                copies |= {*intact_files}
        return LocalView(digest, tuple(local_files), tuple(sorted(copies.difference(local_files))), fault, warning)
