"""Bring what a host lacks of a checkpoint from the hosts that have it: after a change of the hosts' order, or of their number.

Files cross in pieces, through CPU memory and the store's group. Knows files and owners; not tensors. What comes is
verified where it is read.
"""

import contextlib
import errno
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from llama405b.checkpoint.directory import directories_of
from llama405b.checkpoint.store import CheckpointView, Store
from llama405b.contract.checkpoints import DATA_FILE
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import reason_of, remedy_of
from llama405b.distributed import collectives
from llama405b.distributed.host_memory import Progress

PIECE_BYTES = 64 << 20
FAILED = -1  # instead of a length: the sender cannot read


class Gathered:
    """A checkpoint as this rank reads it: where it is, or links to that beside copies of what was lacking."""

    def __init__(self, store: Store, found: CheckpointView, progress: Progress) -> None:
        self.store = store
        self.found = found
        self.progress = progress
        self.path = found.path
        self.rank, self.owner = store.me.rank, store.owner_of[store.me.rank]
        self.made: list[Path] = []
        self.sent_by: dict[tuple[str, int], int] = {}  # file and owner -> the owner that sent it
        self.have = {owner: {*found.local[owner]} for owner in store.owners}

    def describe(self) -> None:
        """Bring what all ranks need: everything without tensors."""
        self.bring([name for name in self.found.manifest.files if not DATA_FILE.fullmatch(name)])

    def bring(self, names: Iterable[str]) -> None:
        """Bring files that this rank needs, to where ``path`` then is; all ranks call it alike.

        Raises:
            UserError: A file cannot be read or written.
        """
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
        moves = [move for move in moves if move[1] != move[2]]  # what it has itself is linked
        total, done = sum(self.found.manifest.files[name].bytes for name, _, to in moves if to == self.rank), 0
        for name, source, to in moves:  # in one order on all ranks: none waits for one that waits for it
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
                raise UserError(f"{failed}; correct that, then resume")

    def drop(self) -> None:
        """Delete the copies."""
        for path in self.made:
            shutil.rmtree(path, ignore_errors=True)

    def _moves(self, needs: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
        """List what each owner lacks, and which owner sends it: those in turns that have it."""
        moves = []
        for owner in self.store.owners:
            wanted = {name for rank, names in enumerate(needs) if self.store.owner_of[rank] == owner for name in names}
            for number, name in enumerate(sorted(wanted - self.have[owner])):
                sources = [other for other in self.store.owners if name in self.found.available[other]]
                source = owner if owner in sources else sources[number % len(sources)]
                moves.append((name, source, owner))
                self.sent_by[name, owner] = source
                self.have[owner].add(name)
        if any(to == self.owner for _, _, to in moves):
            self.path = self.store.directory.borrowed(self.found.path)
        return moves

    def _make_room(self, moves: Sequence[tuple[str, int, int]]) -> None:
        """Make the directory to read from, with links to what this host has; files are to come beside them."""
        coming = [name for name, source, to in moves if to == self.rank != source]
        linked = [name for name, source, to in moves if to == self.rank == source]
        if self.rank != self.owner or not (coming or linked):
            return
        needed = sum(self.found.manifest.files[name].bytes for name in coming)
        free = shutil.disk_usage(self.store.root).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e9:,.2f} GB are to come, but {free / 1e9:,.2f} GB are free")
        if self.path not in self.made:
            self.made.append(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
            linked += self.found.local[self.owner]
        for name in linked:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).symlink_to(self._at(name).resolve())
        for name in coming:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)

    def _at(self, name: str) -> Path:
        """Where this host has a file, its own or a copy."""
        size = self.found.manifest.files[name].bytes
        places = [part / name for part in directories_of(self.found.path)]
        return next(place for place in places if place.is_file() and place.stat().st_size == size)

    def _send(self, name: str, to: int) -> None:
        left = self.found.manifest.files[name].bytes
        try:
            with self._at(name).open("rb", buffering=0) as file:
                while left:
                    content = bytearray(file.read(min(PIECE_BYTES, left)))
                    if not content:
                        raise OSError("it shrank while it was being sent")
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
                    return 0  # the sender says why
                piece = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(piece, source, self.store.group)
                left -= len(piece)
                try:
                    if trouble is None:
                        file.write(memoryview(piece.numpy()))
                except OSError as error:  # the sender does not know
                    trouble = error
        if trouble:
            raise trouble
        return self.found.manifest.files[name].bytes
