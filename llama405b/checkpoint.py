"""Checkpoints that are whole or not there.

Written by DCP into ``step-N.tmp``; every rank fsyncs and hashes its own files; rank 0 gathers the manifest, and
only then is the directory renamed to ``step-N``. A directory is never written into again. Resume reads only what
verifies against its manifest: DCP itself loads torn directories and flipped bits without an error.

Knows directories, hashes and DCP; not the loss or the data. What a checkpoint holds: model, optimizer (FP32 or
BF16 as kept), and every rank's random state. The step number fixes schedule and data position.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from llama405b import ranks
from llama405b.errors import UserError
from llama405b.ranks import Ranks
from llama405b.rundir import read_json, write_json

STEP_DIR = re.compile(r"step-(\d{8})")
MANIFEST = "manifest.json"
SEEN_WITHIN_S = 15.0  # network filesystems show a new file late


class Store:
    """The checkpoints of one run, in one directory that every host sees."""

    def __init__(self, root: Path, keep: int, me: Ranks, timeout_s: int = 1800) -> None:
        self.root, self.keep, self.me = root, keep, me
        # DCP on the process group that trains can deadlock with it: it gets one of its own.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def prove_shared(self) -> None:
        """Check, with a token file, that all ranks see one directory and may write to it.

        Raises:
            UserError: A rank does not; names it.
        """
        token, error = "", None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if self.me.leads:
                token = f".token-{uuid.uuid4().hex}"
                (self.root / token).touch()
        except OSError as found:
            error = UserError(
                f"{self.root}: cannot be written ({found.strerror}) on {self.me.host}; set --checkpoint.dir"
            )
        ranks.refuse_together(error)
        token = ranks.from_rank0(token)
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not (self.root / token).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        if not (self.root / token).exists():
            error = UserError(
                f"--checkpoint.dir: rank {self.me.rank} on {self.me.host} does not see in {self.root} what rank 0 wrote "
                "there; name a directory that all hosts share"
            )
        ranks.refuse_together(error)
        dist.barrier(self.group)
        if self.me.leads:
            (self.root / token).unlink(missing_ok=True)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
        """Write ``step-N``, then delete all but the newest ``keep``.

        Raises:
            UserError: A rank could not write or read back its files; earlier checkpoints are untouched.
        """
        final = self.root / f"step-{step:08d}"
        partial = final.with_suffix(".tmp")
        if self.me.leads:
            for leftover in self.root.glob("step-*.tmp"):
                shutil.rmtree(leftover)
            partial.mkdir()
        dist.barrier(self.group)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {
            "model": model_state,
            "optimizer": optimizer_state,
            "rng": {str(self.me.rank): _rng_state(self.me)},
        }
        writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True, overwrite=False)
        try:
            dcp.save(state, storage_writer=writer, process_group=self.group)
        except dcp.api.CheckpointException as failed:
            causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(failed.failures.items()))
            raise UserError(
                f"{partial}: the checkpoint could not be written ({causes}); free space, then resume"
            ) from None
        mine = {path.name: _seal(path) for path in partial.iterdir() if self._is_mine(path.name)}
        files = {name: entry for part in ranks.agreed(mine) for name, entry in part.items()}
        if self.me.leads:
            self._commit(partial, final, step, files)
            self._retire(step)
        dist.barrier(self.group)
        return final

    def find(self, resume: str) -> tuple[Path | None, list[str]]:
        """The checkpoint that ``resume`` (no, auto, a step, a path) means, and why newer ones were passed over.

        Raises:
            UserError: A named checkpoint is not there or does not verify, or the directory holds checkpoints of a
            run that this one does not go on with.
        """
        present = ranks.from_rank0(_committed(self.root) if self.me.leads else None)
        if resume == "no":
            if present:
                raise UserError(
                    f"--checkpoint.dir: {self.root} holds checkpoints up to {present[-1].name}; take another directory, "
                    "or go on with --resume auto"
                )
            return None, []
        if resume == "auto":
            passed_over: list[str] = []
            for path in reversed(present):
                if not (why := self._verify(path)):
                    return path, passed_over
                passed_over.append(why)
            return None, passed_over
        path = self.root / f"step-{int(resume):08d}" if resume.isdecimal() else Path(resume)
        if why := self._verify(path):
            raise UserError(f"--resume: {why}; take another, or auto")
        return path, self._set_aside([later for later in present if step_of(later) > step_of(path)], path)

    def _set_aside(self, later: list[Path], path: Path) -> list[str]:
        """Going back to ``path``: what was saved after it is kept, under names that ``auto`` does not take."""
        if later and path.parent.resolve() != self.root.resolve():
            raise UserError(
                f"--checkpoint.dir: {self.root} holds checkpoints up to {later[-1].name}, of another run; "
                "take another directory"
            )
        mark = f"aside-{time.strftime('%Y%m%d-%H%M%S')}"
        for old in later if self.me.leads else []:
            old.rename(old.with_name(f"{old.name}.{mark}"))
        dist.barrier(self.group)
        return [f"{old}: saved after {path.name}; renamed to …aside" for old in later]

    def _verify(self, path: Path) -> str:
        """Hash the files, shared out over the ranks; returns the first fault found, as a clause, or ''."""
        why = ""
        try:
            why = _fault(path, self.me.rank, self.me.world)
        except OSError as error:
            why = f"{path}: cannot be read ({error.strerror})"
        return next((found for found in ranks.agreed(why) if found), "")

    def _is_mine(self, name: str) -> bool:
        return name.startswith(f"__{self.me.rank}_") or (self.me.leads and not name.startswith("__"))

    def _commit(self, partial: Path, final: Path, step: int, files: dict[str, Any]) -> None:
        """Seal the manifest and give the directory its name."""
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        write_json(
            partial / MANIFEST,
            {
                "step": step,
                "world_size": self.me.world,
                "versions": versions,
                "files": dict(sorted(files.items())),
            },
        )
        _fsync(partial / MANIFEST)
        _fsync(partial)
        if final.exists():  # an earlier attempt's, from before this run went back: replaced whole, never written into
            aside = final.with_suffix(".old")
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        partial.rename(final)
        _fsync(self.root)
        shutil.rmtree(final.with_suffix(".old"), ignore_errors=True)

    def _retire(self, step: int) -> None:
        for old in [path for path in _committed(self.root) if step_of(path) <= step][: -self.keep]:
            doomed = old.with_suffix(".tmp")  # first the name, so that a kill leaves nothing that looks whole
            old.rename(doomed)
            shutil.rmtree(doomed)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, me: Ranks) -> int:
    """Load a verified checkpoint into the shards; returns its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    reader = dcp.FileSystemReader(path)
    if f"rng.{me.rank}.cpu" in reader.read_metadata().state_dict_metadata:
        state["rng"] = {str(me.rank): _rng_state(me)}
    dcp.load(state, storage_reader=reader)
    asked = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for group, settings in zip(optimizer.param_groups, asked, strict=True):  # what is configured now counts
        group.update(settings)
    if "rng" in state:
        torch.set_rng_state(state["rng"][str(me.rank)]["cpu"])
        if "cuda" in state["rng"][str(me.rank)]:
            torch.cuda.set_rng_state(state["rng"][str(me.rank)]["cuda"])
    return step_of(path)


def step_of(path: Path) -> int:
    """The step a checkpoint was saved after.

    Raises:
        UserError: Its name is not ``step-<8 digits>``.
    """
    match = STEP_DIR.fullmatch(path.name)
    if not match:
        raise UserError(f"{path}: not named step-<8 digits>; name a checkpoint directory")
    return int(match[1])


def _committed(root: Path) -> list[Path]:
    """Checkpoint directories by step, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if STEP_DIR.fullmatch(path.name))
    return []


def _fault(path: Path, part: int, parts: int) -> str:
    """What is wrong with a checkpoint, looking at every ``parts``-th file from ``part`` on; '' where nothing is."""
    if not path.is_dir():
        return f"{path}: no such checkpoint"
    if path.stat().st_uid != os.getuid():  # its .metadata is a pickle: read it only from our own hand
        return f"{path}: it belongs to another user"
    manifest = read_json(path / MANIFEST)
    if manifest is None or not isinstance(manifest.get("files"), dict):
        return f"{path}: it has no manifest that can be read"
    if manifest.get("step") != step_of(path):
        return f"{path}: its manifest is of step {manifest.get('step')}"
    for name, entry in list(manifest["files"].items())[part::parts]:
        file = path / name
        if not file.is_file():
            return f"{file}: missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{file}: {file.stat().st_size} bytes where the manifest says {entry['bytes']}"
        if _sha256(file) != entry["sha256"]:
            return f"{file}: its content differs from its checksum"
    return ""


def _seal(path: Path) -> dict[str, Any]:
    _fsync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rng_state(me: Ranks) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if me.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state
