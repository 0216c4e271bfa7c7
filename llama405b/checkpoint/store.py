"""Checkpoints that are complete or absent.

DCP writes into ``step-N.<run>.tmp``; every rank flushes and hashes its own files; rank 0 gathers the manifest, and
only then is the directory renamed to ``step-N``. A committed directory is never changed or replaced, and deleted only by
the run that wrote it. Resume reads only what verifies against its manifest: DCP itself loads torn directories and flipped
bits without an error.

Knows the directory and its one writer (``lease``); not the loss or the data.
"""

import contextlib
import dataclasses
import datetime
import errno
import importlib.metadata
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llama405b import ranks
from llama405b.checkpoint.lease import Holder
from llama405b.checkpoint.seal import Fault, PassedOver, find_fault, open_manifest, seal, sync
from llama405b.checkpoint.snapshot import state_to_save
from llama405b.checkpoint.write import SealingWriter, kept_in_cpu_memory
from llama405b.contract.checkpoints import (
    CONFIG_FILE,
    DATA_FILE,
    MANIFEST,
    MODEL_FILES,
    Manifest,
    RunIdentity,
    Seal,
    committed,
    refuse_held,
    step_of,
    write_manifest,
)
from llama405b.contract.errors import UserError
from llama405b.contract.events import RunEvent
from llama405b.contract.files import read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import counted, reason_of
from llama405b.contract.trust import user_of
from llama405b.ranks import Ranks
from llama405b.step import Updater

SEEN_WITHIN_S = 15.0  # network filesystems show a new file late
LEAST_KEPT = 2  # so that one always verifies
MAX_EVENTS = 10_000  # read, of this run


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that verifies."""

    path: Path
    manifest: Manifest


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    """Have torch write no CRC-32 of each tensor: the manifest has SHA-256, and the CRC halves the speed of writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _seals_of_others(partial: Path) -> dict[str, Seal]:
    """Seal what no tensors are in: DCP's metadata, and what describes the checkpoint. They are rank 0's."""
    files = [path for path in partial.rglob("*") if path.is_file() and not DATA_FILE.fullmatch(path.name)]
    return {path.relative_to(partial).as_posix(): seal(path, 0) for path in files}


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
        self.root, self.keep, self.me, self.run, self.say = root, keep, me, run.name, say
        self.described = run
        events = read_records(RunEvent, run.events("rank-0"), last=MAX_EVENTS)
        self.saved = {event.path: event.digest for event in events if event.digest}  # of manifests, by path
        self.holder = Holder(root, run.name, f"{me.host}:{run.path.resolve()}", me.attempt)
        # DCP can deadlock with training on the same process group: it gets its own.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def take(self) -> None:
        """Check that all ranks share the directory, and become the only run that writes into it.

        Raises:
            UserError: A rank cannot write there, or another run is writing there.
        """
        self.prove_shared()
        self._on_rank0(lambda: self.holder.take(self.say), self.root)

    def check_room(self, each_bytes: int) -> None:
        """Refuse a disk that cannot hold as many checkpoints of this size as are kept, and one that is being written.

        Raises:
            UserError: It has too little room, beside what this run has there already.
        """
        with ranks.refusing_together():
            if not self.me.leads:
                return
            own = sum(self._wrote(path) for path in committed(self.root))
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

    def save(self, step: int, updater: Updater, identity: RunIdentity) -> Path:
        """Write ``step-N``, then delete all but the newest ``keep`` of this run.

        Raises:
            UserError: A rank could not write or read back its files, the step exists already, or another run has taken the
            directory over; earlier checkpoints are untouched.
        """
        final = self.root / f"step-{step:08d}"
        partial = self._partial(final)
        self._on_rank0(lambda: self._begin(partial, final), partial)
        writer = SealingWriter(partial, self.me.rank, in_cpu_memory=kept_in_cpu_memory(updater.kept))
        try:
            with without_crc():
                dcp.save(state_to_save(updater, self.me), storage_writer=writer, process_group=self.group)
        except dcp.api.CheckpointException as failed:
            causes = "; ".join(f"rank {rank}: {reason_of(cause[0])}" for rank, cause in sorted(failed.failures.items()))
            raise UserError(
                f"{partial}: the checkpoint could not be written ({causes}); free space, then resume"
            ) from None
        mine = writer.seals
        self._on_rank0(lambda: mine.update(_seals_of_others(partial)), partial)
        files = {name: sealed for part in ranks.agreed(mine, dict[str, Seal]) for name, sealed in part.items()}
        manifest = Manifest(
            format=2,
            step=step,
            files=dict(sorted(files.items())),
            world_size=self.me.world,
            run=self.run,
            hosts=tuple(ranks.agreed(self.me.host)),
            identity=identity,
            sequences=step * identity.global_batch_size,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        )
        self._on_rank0(lambda: self._commit(partial, final, manifest), final)
        self._on_rank0(lambda: self._retire(step), self.root)
        return final

    def _partial(self, final: Path) -> Path:
        """Where this run writes or deletes a checkpoint; the name tells other runs that it is not theirs."""
        return final.with_name(f"{final.name}.{self.run}.tmp")

    def _on_rank0(self, act: Callable[[], None], where: Path) -> None:
        """Have rank 0 do something with the directory while it holds it, and every rank refuse if it cannot."""
        with ranks.refusing_together():
            try:
                if self.me.leads:
                    self.holder.check()
                    act()
            except OSError as error:
                raise UserError(f"{where}: cannot be written ({reason_of(error)}); free space, then resume") from None

    def _begin(self, partial: Path, final: Path) -> None:
        """Create an empty directory to write into, after deleting those that this run left half-written."""
        if final.exists():
            raise UserError(
                f"{final}: already exists, and checkpoints are never replaced; another run may be writing here: "
                "give this one its own --checkpoint.dir"
            )
        own = re.compile(rf"step-\d{{8}}\.{re.escape(self.run)}\.tmp")
        for leftover in [path for path in self.root.iterdir() if own.fullmatch(path.name)]:
            shutil.rmtree(leftover)
        partial.mkdir()
        self._describe(partial)

    def _describe(self, partial: Path) -> None:
        """Add what a checkpoint is understood by alone: the run's settings, the model's configuration and tokenizer."""
        (partial / MODEL_FILES).mkdir()
        if self.described.config.is_file():
            shutil.copyfile(self.described.config, partial / CONFIG_FILE)
        for file in self.described.model(self.me.host).glob("[!.]*"):
            shutil.copyfile(file, partial / MODEL_FILES / file.name)
        sync(partial / MODEL_FILES)

    def find(self, resume: str) -> tuple[Found | None, list[PassedOver]]:
        """Find the checkpoint that ``resume`` (no, auto, a step, a path) names, and set newer ones aside.

        Raises:
            UserError: A named checkpoint is missing or does not verify; ``auto`` finds checkpoints but none verifies, or
            a newer one cannot be read; or the directory holds checkpoints of another run.
        """
        seen: list[str] = []
        self._on_rank0(lambda: seen.extend(path.name for path in committed(self.root)), self.root)
        present = [self.root / name for name in ranks.from_rank0(tuple(seen), tuple[str, ...])]
        if resume == "no":
            refuse_held(self.root, present)
            return None, []
        if resume == "auto":
            return self._newest(present)
        if resume.isdecimal():
            return self._named(self.root / f"step-{int(resume):08d}", present)
        return self._named(Path(resume), present)

    def _named(self, path: Path, present: list[Path]) -> tuple[Found, list[PassedOver]]:
        """The requested checkpoint; later ones are set aside, unless they belong to another run."""
        found = self._verify(path)
        if isinstance(found, PassedOver):
            raise UserError(f"--resume: {found}; use another one, or auto")
        later = [each for each in present if step_of(each) > step_of(path)]
        if later and path.parent.resolve() != self.root.resolve():
            raise UserError(
                f"--checkpoint.dir: {self.root} holds checkpoints up to {later[-1].name}, of another run; "
                "use another directory"
            )
        self._set_aside(later)
        return found, [PassedOver(old, Fault.LATER, f"{old}: saved after {path.name}") for old in later]

    def _newest(self, present: list[Path]) -> tuple[Found | None, list[PassedOver]]:
        """The newest of these that verifies; damaged newer ones are set aside, one that may be intact is an error."""
        passed_over: list[PassedOver] = []
        for path in reversed(present):
            found = self._verify(path)
            if isinstance(found, Found):
                self._set_aside([newer.path for newer in passed_over])
                return found, passed_over
            if found.fault is Fault.UNREADABLE:
                raise UserError(
                    f"--resume auto: {found}; it may be intact: make it readable, or go back to an earlier step "
                    "with --resume STEP"
                )
            passed_over.append(found)
        if passed_over:
            raise UserError(
                f"--resume auto: {self.root} has {counted(len(present), 'checkpoint')}, but none verifies "
                f"({'; '.join(map(str, passed_over))}); to start from the model's weights, use another --checkpoint.dir"
            )
        return None, []

    def _set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them; a run that saves none takes the directory for that."""
        mark = f"aside-{time.strftime('%Y%m%d-%H%M%S')}"

        def rename() -> None:
            if paths and not self.holder.number:
                self.holder.take(self.say)
            for old in paths:
                old.rename(old.with_name(f"{old.name}.{mark}"))

        self._on_rank0(rename, self.root)

    def _verify(self, path: Path) -> Found | PassedOver:
        """Hash the blocks, split over the ranks; returns the first fault found, but an unreadable checkpoint first."""
        opened: Manifest | PassedOver = PassedOver(path, Fault.UNREADABLE, "rank 0 knows")
        if self.me.leads:
            opened = open_manifest(path, self.saved)
        opened = ranks.from_rank0(opened, Manifest | PassedOver)
        if isinstance(opened, PassedOver):
            return opened
        try:
            mine = find_fault(path, opened, self.me.rank, self.me.world)
        except OSError as error:
            why = f"{path}: cannot be read ({reason_of(error)}) on {self.me.host}"
            mine = PassedOver(path, Fault.UNREADABLE, why)
        faults = [each for each in ranks.agreed(mine, PassedOver | None) if each]
        return min(faults, key=lambda each: each.fault is not Fault.UNREADABLE, default=Found(path, opened))

    def _commit(self, partial: Path, final: Path, manifest: Manifest) -> None:
        """Write the manifest and give the directory its final name."""
        content, self.saved[str(final)] = write_manifest(manifest)
        (partial / MANIFEST).write_bytes(content)
        sync(partial / MANIFEST)
        sync(partial)
        partial.rename(final)  # raises if another run put a checkpoint there meanwhile
        sync(self.root)

    def _retire(self, step: int) -> None:
        for old in [path for path in committed(self.root) if step_of(path) <= step and self._wrote(path)][: -self.keep]:
            doomed = self._partial(old)  # rename first, so that a kill leaves nothing that looks complete
            old.rename(doomed)
            shutil.rmtree(doomed)

    def _wrote(self, path: Path) -> bool:
        """Whether this run saved a checkpoint."""
        opened = open_manifest(path, {})
        return isinstance(opened, Manifest) and opened.run == self.run
