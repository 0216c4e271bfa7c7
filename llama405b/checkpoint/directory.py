"""What changes in a directory of checkpoints: each is complete or absent. All of it is the owner's, while it holds the lease.

A checkpoint is written into ``step-N.<run>.tmp`` and renamed to ``step-N`` once its manifest is there. A committed directory is
never changed or replaced, and deleted only by the run that wrote it. Knows files; not tensors or ranks.
"""

import contextlib
import errno
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from llama405b.checkpoint.digests import hash_file, open_manifest, sync
from llama405b.checkpoint.lease import Holder
from llama405b.contract.checkpoints import (
    CONFIG_FILE,
    DATA_FILE,
    MANIFEST,
    METADATA,
    MODEL_FILES,
    FileDigest,
    Manifest,
    committed,
    read_manifest,
    step_of,
    write_manifest,
)
from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.reader import MalformedError
from llama405b.contract.replicas import replicas

OLD = r"tmp-old(-[0-9a-f]{8})?"  # how the names end of what is being deleted


def directories_of(path: Path) -> list[Path]:
    """Where a checkpoint may be on this host: what its ranks wrote, and copies of other hosts' parts."""
    return [path, *replicas(path.parent, path.name)]


def best_manifest(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return that of the checkpoint with the least evaluation loss; the oldest of several, None if none was evaluated."""
    losses = [(each.evaluation_loss, each.step, each) for each in manifests if each.evaluation_loss is not None]
    return min(losses, key=lambda entry: entry[:2], default=(None, 0, None))[2]


class Directory:
    """The directory of one run's checkpoints, for the one process that changes it."""

    def __init__(self, root: Path, run: RunDir, host: str, attempt: int) -> None:
        """``run``: its name marks checkpoints as its own, and its files describe them."""
        self.root = root
        self.run = run
        self.host = host
        self.holder = Holder(root, run.name, f"{host}:{run.path.resolve()}", attempt)

    def partial(self, final: Path) -> Path:
        """Where this run writes a checkpoint; the name tells other runs that it is not theirs."""
        return final.with_name(f"{final.name}.{self.run.name}.tmp")

    def borrowed(self, final: Path) -> Path:
        """Where this run reads a checkpoint of which it has only a part."""
        return final.with_name(f"{final.name}.{self.run.name}.tmp-read")

    def begin(self, final: Path) -> None:
        """Create an empty directory to write into, after deleting what this run left half-written or half-deleted.

        Raises:
            UserError: The checkpoint exists.
        """
        if final.exists():
            raise UserError(
                f"{final}: already exists, and checkpoints are never replaced; another run may be writing here: "
                "give this one its own --checkpoint.dir"
            )
        for leftover in self._leftovers(f"tmp(-read)?|{OLD}"):
            shutil.rmtree(leftover, ignore_errors=True)  # what cannot be deleted takes room, and is said by ``retire``
        partial = self.partial(final)
        if partial.exists():
            self._give_up(partial)
        partial.mkdir()
        self._describe(partial)

    def _describe(self, partial: Path) -> None:
        """Add what a checkpoint is understood by alone: the run's settings, the model's configuration and tokenizer."""
        (partial / MODEL_FILES).mkdir()
        if self.run.config.is_file():
            shutil.copyfile(self.run.config, partial / CONFIG_FILE)
        for file in self.run.model(self.host).glob("[!.]*"):
            shutil.copyfile(file, partial / MODEL_FILES / file.name)
        sync(partial / MODEL_FILES)

    def seal_others(self, final: Path) -> dict[str, FileDigest]:
        """Seal what no tensors are in: DCP's metadata, and what describes the checkpoint."""
        return {name: hash_file(file, 0) for name, file in self._others(final).items()}

    def others(self, final: Path) -> dict[str, bytes]:
        """Return what no tensors are in, by name."""
        return {name: file.read_bytes() for name, file in self._others(final).items()}

    def _others(self, final: Path) -> dict[str, Path]:
        partial = self.partial(final)
        files = [path for path in partial.rglob("*") if path.is_file() and not DATA_FILE.fullmatch(path.name)]
        if partial / METADATA not in files:
            raise FileNotFoundError(errno.ENOENT, "what was written into it is gone")
        return {file.relative_to(partial).as_posix(): file for file in files}

    def add(self, final: Path, files: Mapping[str, bytes]) -> None:
        """Add files to a checkpoint that is being written."""
        for name, content in files.items():
            file = self.partial(final) / name
            file.write_bytes(content)
            sync(file)

    def prepare(self, final: Path, manifest: Manifest) -> str:
        """Write the manifest, so that only the final name is missing; returns the manifest's digest."""
        partial = self.partial(final)
        content, digest = write_manifest(manifest)
        (partial / MANIFEST).write_bytes(content)
        sync(partial / MANIFEST)
        sync(partial)
        return digest

    def commit(self, final: Path) -> None:
        """Give the directory its final name."""
        self.partial(final).rename(final)  # raises if another run put a checkpoint there meanwhile
        sync(self.root)

    def own(self) -> dict[Path, Manifest]:
        """Return the checkpoints that this run saved, oldest first."""
        opened = {path: open_manifest(path, {}) for path in committed(self.root)}
        return {path: each for path, each in opened.items() if isinstance(each, Manifest) and each.run == self.run.name}

    def retire(self, step: int, keep: int, spared: Set[int], *, keep_best: bool = False) -> None:
        """Delete all but the newest ``keep`` checkpoints of this run up to a step, the best if asked, and the steps to spare.

        What could not be deleted before is tried again.

        Raises:
            OSError: Something cannot be deleted, the first of it; all else is.
        """
        own = {path: manifest for path, manifest in self.own().items() if step_of(path) <= step}
        best = best_manifest(own.values()) if keep_best else None
        faults = []
        doomed = [old for old in list(own)[:-keep] if step_of(old) not in spared and own[old] is not best]
        for old in [*self._leftovers(OLD), *doomed]:
            try:
                shutil.rmtree(old if old not in own else self._give_up(old))
            except OSError as error:
                faults.append(OSError(error.errno, f"{old.name}: {error.strerror}"))
        if faults:
            raise faults[0]

    def _give_up(self, path: Path) -> Path:
        """Rename a directory before it is deleted: a kill leaves nothing that looks complete, and its name is free at once."""
        step, _, _ = path.name.partition(".")
        return path.rename(path.with_name(f"{step}.{self.run.name}.tmp-old-{uuid.uuid4().hex[:8]}"))

    def set_aside(self, paths: Sequence[Path]) -> None:
        """Rename checkpoints so that ``auto`` does not find them."""
        mark = f"aside-{time.strftime('%Y%m%d-%H%M%S')}"
        for old in [part for path in paths for part in directories_of(path) if part.exists()]:
            old.rename(old.with_name(f"{old.name}.{mark}"))

    def finish(self) -> None:
        """Commit what an attempt before this one had prepared when it was killed: it is complete, on all hosts."""
        for partial in self._leftovers("tmp"):
            final = partial.with_name(partial.name.partition(".")[0])
            with contextlib.suppress(FileNotFoundError, MalformedError):
                manifest, _ = read_manifest((partial / MANIFEST).read_bytes())
                if (manifest.run, manifest.step) == (self.run.name, step_of(final)) and not final.exists():
                    partial.rename(final)

    def _leftovers(self, ending: str) -> list[Path]:
        own = re.compile(rf"step-\d{{8}}\.{re.escape(self.run.name)}\.({ending})")
        return [path for path in self.root.iterdir() if own.fullmatch(path.name)]
