"""The directory of a run's checkpoints, for all ranks: taken by one run, shared by all hosts, and what is in it.

Knows the directory and its one writer; not tensors, the loss or the data.
"""

import contextlib
import dataclasses
import datetime
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from llama405b import ranks
from llama405b.checkpoint.commit import Directory
from llama405b.checkpoint.seal import Fault, PassedOver, find_fault, open_manifest
from llama405b.contract.checkpoints import (
    LEAST_KEPT,
    Manifest,
    committed,
)
from llama405b.contract.errors import UserError
from llama405b.contract.events import RunEvent
from llama405b.contract.files import read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import reason_of
from llama405b.contract.trust import user_of
from llama405b.ranks import Ranks

SEEN_WITHIN_S = 15.0  # network filesystems show a new file late
MAX_EVENTS = 10_000  # read, of this run


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that is complete, as far as that is seen without reading its tensors."""

    path: Path
    manifest: Manifest


class Store:
    """The checkpoints of one run, in a directory that all hosts share."""

    def __init__(
        self,
        root: Path,
        keep: int,
        me: Ranks,
        timeout_s: int = 1800,
        *,
        run: RunDir,
        say: Callable[[str], None] = print,
    ) -> None:
        """``run``: its name marks checkpoints as its own, which describe it; its events have the digests of those it saved."""
        self.root, self.keep, self.me, self.run, self.say = root, keep, me, run, say
        events = read_records(RunEvent, run.events("rank-0"), last=MAX_EVENTS)
        self.saved = {event.path: event.digest for event in events if event.digest}  # of manifests, by path
        self.directory = Directory(root, run, me.host, me.attempt)
        self.holder = self.directory.holder
        # Saving goes on beside training, whose collectives must not mix with its own.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.hosts = tuple(ranks.agreed(me.host))  # by rank

    def take(self) -> None:
        """Check that all ranks share the directory, and become the only run that writes into it.

        Raises:
            UserError: A rank cannot write there, or another run is writing there.
        """
        self.prove_shared()
        self.on_rank0(lambda: self.holder.take(self.say), self.root)

    def check_room(self, each_bytes: int) -> None:
        """Refuse a disk that cannot hold as many checkpoints of this size as are kept, and one that is being written.

        Raises:
            UserError: It has too little room, beside what this run has there already.
        """
        with ranks.refusing_together():
            if not self.me.leads:
                return
            own = sum(self.directory.wrote(path) for path in committed(self.root))
            free = shutil.disk_usage(self.root).free
            if (self.keep + 1 - min(own, self.keep)) * each_bytes <= free:
                return
            fits = free // each_bytes + min(own, self.keep) - 1
            remedy = (
                f"use --checkpoint.keep {fits}, or another directory" if fits >= LEAST_KEPT else "use another directory"
            )
            raise UserError(
                f"--checkpoint.dir: {self.root} has {free / 1e9:,.2f} GB free, but a checkpoint takes {each_bytes / 1e9:,.2f} GB, "
                f"{self.keep} are kept, and one more is being written; {remedy}"
            )

    def close(self) -> None:
        """Let the next run write into the directory."""
        self.holder.end()

    def prove_shared(self) -> None:
        """Check, with a token file, that all ranks see the same directory and can write to it.

        Raises:
            UserError: A rank does not, or cannot; names its host.
        """
        token = ranks.from_rank0(f".token-{uuid.uuid4().hex}")
        with ranks.refusing_together():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"it belongs to {user_of(self.root.stat().st_uid)}")
                if self.me.leads:
                    (self.root / token).touch()
            except OSError as error:
                raise UserError(
                    f"{self.root}: cannot be written ({error.strerror}) on {self.me.host}; set --checkpoint.dir"
                ) from None
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not (self.root / token).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        with ranks.refusing_together():
            if not (self.root / token).exists():
                raise UserError(
                    f"--checkpoint.dir: rank {self.me.rank} on {self.me.host} does not see a file in {self.root} "
                    "that rank 0 wrote; name a directory that all hosts share"
                )
        dist.barrier(self.group)
        if self.me.leads:
            (self.root / token).unlink(missing_ok=True)

    def on_rank0(self, act: Callable[[], None], where: Path, group: dist.ProcessGroup | None = None) -> None:
        """Have rank 0 do something with the directory while it holds it, and every rank refuse if it cannot.

        ``group``: the store's own, for what happens beside training.
        """
        with ranks.refusing_together(group):
            try:
                if self.me.leads:
                    self.holder.check()
                    act()
            except OSError as error:
                raise UserError(f"{where}: cannot be written ({reason_of(error)}); free space there") from None

    def refuse_if_taken(self) -> None:
        """Check that no other run has taken the directory over.

        Raises:
            UserError: One has.
        """
        with ranks.refusing_together(), contextlib.suppress(OSError):
            if self.me.leads:
                self.holder.check()

    def remember(self, path: Path, digest: str) -> None:
        """Keep the digest of a manifest that this run wrote."""
        self.saved[str(path)] = digest

    def present(self) -> list[Path]:
        """List the committed checkpoints that rank 0 sees, oldest first."""
        seen: list[str] = []
        self.on_rank0(lambda: seen.extend(path.name for path in committed(self.root)), self.root)
        return [self.root / name for name in ranks.from_rank0(tuple(seen), tuple[str, ...])]

    def set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them; a run that saves none takes the directory for that."""

        def rename() -> None:
            if paths and not self.holder.number:
                self.holder.take(self.say)
            self.directory.set_aside(paths)

        self.on_rank0(rename, self.root)

    def look_at(self, path: Path) -> Found | PassedOver:
        """Open a checkpoint; returns the first fault that is seen without reading its tensors, but an unreadable file first."""
        opened: Manifest | PassedOver = PassedOver(path, Fault.UNREADABLE, "rank 0 knows")
        if self.me.leads:
            opened = open_manifest(path, self.saved)
        opened = ranks.from_rank0(opened, Manifest | PassedOver)
        if isinstance(opened, PassedOver):
            return opened
        try:
            mine = find_fault(path, opened)
        except OSError as error:
            why = f"{path}: cannot be read ({reason_of(error)}) on {self.me.host}"
            mine = PassedOver(path, Fault.UNREADABLE, why)
        faults = [each for each in ranks.agreed(mine, PassedOver | None) if each]
        return min(faults, key=lambda each: each.fault is not Fault.UNREADABLE, default=Found(path, opened))
