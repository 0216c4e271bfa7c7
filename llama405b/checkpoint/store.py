"""Checkpoints that are complete or absent.

DCP writes into ``step-N.<run>.tmp``; every rank fsyncs and hashes its own files; rank 0 gathers the manifest, and
only then is the directory renamed to ``step-N``. A committed directory is never changed, replaced, or deleted for
being damaged. Resume reads only what verifies against its manifest: DCP itself loads torn directories and flipped
bits without an error.

Knows directories, hashes and DCP; not the loss or the data. A checkpoint holds the model, the optimizer (in the dtype
kept, FP32 or BF16), and every rank's random state. The step number determines schedule and data position.
"""

import dataclasses
import datetime
import enum
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from llama405b import ranks
from llama405b.contract import reader
from llama405b.contract.checkpoints import MANIFEST, committed, step_of
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.phrases import counted, reason_of
from llama405b.ranks import Ranks

SEEN_WITHIN_S = 15.0  # network filesystems show a new file late


class Fault(enum.StrEnum):
    """Why a checkpoint is not the one to resume from."""

    DAMAGED = "damaged"  # its content is not what was saved: it will never verify
    UNREADABLE = "unreadable"  # a permission, a mount or a disk prevents reading: it may be intact
    LATER = "later"  # the run goes back to an earlier step


@dataclasses.dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that resume does not use."""

    path: Path
    fault: Fault
    why: str  # names the file

    def __str__(self) -> str:
        return self.why


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """What the manifest records about a file."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a directory a checkpoint: its files by name, and what wrote them."""

    step: int
    files: Mapping[str, Seal]
    world_size: int = 0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by package


class Store:
    """The checkpoints of one run, in a directory that all hosts share."""

    def __init__(self, root: Path, keep: int, me: Ranks, timeout_s: int = 1800, *, run: str = "run") -> None:
        """``run``: its name, which marks unfinished directories as its own."""
        self.root, self.keep, self.me, self.run = root, keep, me, run
        # DCP can deadlock with training on the same process group: it gets its own.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def prove_shared(self) -> None:
        """Check, with a token file, that all ranks see the same directory and can write to it.

        Raises:
            UserError: A rank does not, or cannot; names its host.
        """
        token = ranks.from_rank0(f".token-{uuid.uuid4().hex}")
        with ranks.refusing_together():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
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

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write ``step-N``, then delete all but the newest ``keep``.

        Raises:
            UserError: A rank could not write or read back its files, or the step exists already; earlier checkpoints
            are untouched.
        """
        final = self.root / f"step-{step:08d}"
        partial = self._partial(final)
        self._on_rank0(lambda: self._begin(partial, final), partial)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "rng": {str(self.me.rank): _rng_state(self.me)}}
        writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True, overwrite=False)
        try:
            dcp.save(state, storage_writer=writer, process_group=self.group)
        except dcp.api.CheckpointException as failed:
            causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(failed.failures.items()))
            raise UserError(
                f"{partial}: the checkpoint could not be written ({causes}); free space, then resume"
            ) from None
        mine = {path.name: _seal(path) for path in partial.iterdir() if self._is_mine(path.name)}
        files = {name: seal for part in ranks.agreed(mine, dict[str, Seal]) for name, seal in part.items()}
        self._on_rank0(lambda: self._commit(partial, final, step, files), final)
        self._on_rank0(lambda: self._retire(step), self.root)
        return final

    def _partial(self, final: Path) -> Path:
        """Where this run writes or deletes a checkpoint; the name tells other runs that it is not theirs."""
        return final.with_name(f"{final.name}.{self.run}.tmp")

    def _on_rank0(self, act: Callable[[], None], where: Path) -> None:
        """Have rank 0 do something with the directory, and every rank refuse if it cannot."""
        with ranks.refusing_together():
            try:
                if self.me.leads:
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

    def find(self, resume: str) -> tuple[Path | None, list[PassedOver]]:
        """Find the checkpoint that ``resume`` (no, auto, a step, a path) names, and set newer ones aside.

        Raises:
            UserError: A named checkpoint is missing or does not verify; ``auto`` finds checkpoints but none verifies, or
            a newer one cannot be read; or the directory holds checkpoints of another run.
        """
        seen: list[str] = []
        self._on_rank0(lambda: seen.extend(path.name for path in committed(self.root)), self.root)
        present = [self.root / name for name in ranks.from_rank0(tuple(seen), tuple[str, ...])]
        if resume == "no":
            if present:
                raise UserError(
                    f"--checkpoint.dir: {self.root} holds checkpoints up to {present[-1].name}; use another directory, "
                    "or continue with --resume auto"
                )
            return None, []
        if resume == "auto":
            return self._newest(present)
        if resume.isdecimal():
            return self._named(self.root / f"step-{int(resume):08d}", present)
        return self._named(Path(resume), present)

    def _named(self, path: Path, present: list[Path]) -> tuple[Path, list[PassedOver]]:
        """The requested checkpoint; later ones are set aside, unless they belong to another run."""
        if unusable := self._verify(path):
            raise UserError(f"--resume: {unusable}; use another one, or auto")
        later = [found for found in present if step_of(found) > step_of(path)]
        if later and path.parent.resolve() != self.root.resolve():
            raise UserError(
                f"--checkpoint.dir: {self.root} holds checkpoints up to {later[-1].name}, of another run; "
                "use another directory"
            )
        self._set_aside(later)
        return path, [PassedOver(old, Fault.LATER, f"{old}: saved after {path.name}") for old in later]

    def _newest(self, present: list[Path]) -> tuple[Path | None, list[PassedOver]]:
        """The newest of these that verifies; damaged newer ones are set aside, one that may be intact is an error."""
        passed_over: list[PassedOver] = []
        for path in reversed(present):
            unusable = self._verify(path)
            if unusable is None:
                self._set_aside([newer.path for newer in passed_over])
                return path, passed_over
            if unusable.fault is Fault.UNREADABLE:
                raise UserError(
                    f"--resume auto: {unusable}; it may be intact: make it readable, or go back to an earlier step "
                    "with --resume STEP"
                )
            passed_over.append(unusable)
        if passed_over:
            raise UserError(
                f"--resume auto: {self.root} has {counted(len(present), 'checkpoint')}, but none verifies "
                f"({'; '.join(map(str, passed_over))}); to start from the model's weights, use another --checkpoint.dir"
            )
        return None, []

    def _set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them."""
        mark = f"aside-{time.strftime('%Y%m%d-%H%M%S')}"

        def rename() -> None:
            for old in paths:
                old.rename(old.with_name(f"{old.name}.{mark}"))

        self._on_rank0(rename, self.root)

    def _verify(self, path: Path) -> PassedOver | None:
        """Hash the files, split over the ranks; returns the first fault found, but an unreadable checkpoint first."""
        try:
            mine = _fault_of(path, self.me.rank, self.me.world)
        except OSError as error:
            why = f"{path}: cannot be read ({error.strerror}) on {self.me.host}"
            mine = PassedOver(path, Fault.UNREADABLE, why)
        found = [each for each in ranks.agreed(mine, PassedOver | None) if each]
        return min(found, key=lambda each: each.fault is not Fault.UNREADABLE, default=None)

    def _is_mine(self, name: str) -> bool:
        return name.startswith(f"__{self.me.rank}_") or (self.me.leads and not name.startswith("__"))

    def _commit(self, partial: Path, final: Path, step: int, files: Mapping[str, Seal]) -> None:
        """Write the manifest and give the directory its final name."""
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        write_json(partial / MANIFEST, Manifest(step, dict(sorted(files.items())), self.me.world, versions))
        _fsync(partial / MANIFEST)
        _fsync(partial)
        partial.rename(final)  # raises if another run put a checkpoint there meanwhile
        _fsync(self.root)

    def _retire(self, step: int) -> None:
        for old in [path for path in committed(self.root) if step_of(path) <= step][: -self.keep]:
            doomed = self._partial(old)  # rename first, so that a kill leaves nothing that looks complete
            old.rename(doomed)
            shutil.rmtree(doomed)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, me: Ranks) -> int:
    """Load a verified checkpoint into the shards; returns its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    files = dcp.FileSystemReader(path)
    if f"rng.{me.rank}.cpu" in files.read_metadata().state_dict_metadata:
        state["rng"] = {str(me.rank): _rng_state(me)}
    dcp.load(state, storage_reader=files)
    asked = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for group, settings in zip(optimizer.param_groups, asked, strict=True):  # the current configuration wins
        group.update(settings)
    rng = state.get("rng", {}).get(str(me.rank), {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return step_of(path)


def _rng_state(me: Ranks) -> dict[str, torch.Tensor]:
    """The state of this rank's random generators."""
    state = {"cpu": torch.get_rng_state()}
    if me.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _fault_of(path: Path, part: int, parts: int) -> PassedOver | None:
    """The first fault of a checkpoint, checking every ``parts``-th file from ``part`` on.

    Raises:
        OSError: A disk, a mount or a permission prevents reading.
    """
    if not path.is_dir():
        return PassedOver(path, Fault.UNREADABLE, f"{path}: no such checkpoint")
    if path.stat().st_uid != os.getuid():  # its .metadata is a pickle: read only our own
        return PassedOver(path, Fault.UNREADABLE, f"{path}: belongs to another user")
    damaged = functools.partial(PassedOver, path, Fault.DAMAGED)
    try:
        manifest = reader.loads(Manifest, (path / MANIFEST).read_bytes(), MANIFEST)
    except (FileNotFoundError, reader.MalformedError):
        return damaged(f"{path}: has no readable manifest")
    if manifest.step != step_of(path):
        return damaged(f"{path}: its manifest is for step {manifest.step}")
    for name, seal in list(manifest.files.items())[part::parts]:
        file = path / name
        if not file.exists():
            return damaged(f"{file}: missing")
        if file.stat().st_size != seal.bytes:
            return damaged(f"{file}: {file.stat().st_size} bytes, but the manifest says {seal.bytes}")
        if _sha256(file) != seal.sha256:
            return damaged(f"{file}: its content does not match its checksum")
    return None


def _seal(path: Path) -> Seal:
    _fsync(path)
    return Seal(path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
