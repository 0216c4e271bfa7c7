"""This host's place in the ring in which checkpoints are copied; the copying itself is a process of the node runner's.

Knows owners and the files of ``contract.replicas``; not tensors.
"""

import contextlib
import dataclasses
import time

import torch.distributed as dist

from llama405b.checkpoint.store import Store
from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.replicas import Copied, Endpoint, Ring
from llama405b.distributed import collectives

FOUND_WITHIN_S = 30.0


class Replication:
    """The copies of a run's checkpoints: each host's part on the next one."""

    def __init__(self, store: Store) -> None:
        """Join the ring, unless there is no other host.

        Raises:
            UserError: On every rank: the process that copies is not running on a host.
        """
        self.store, owners = store, store.owners
        self.everywhere = self.step = self.resumed = 0
        self.ring: Ring | None = None
        self.active = len(owners) > 1
        if not self.active:
            return
        spots = collectives.all_gather_objects(self._spot() if store.is_owner else None, Endpoint | None)
        with collectives.raise_on_all_ranks():
            if store.is_owner and spots[store.me.rank] is None:
                raise UserError(
                    f"--checkpoint.replicas: no process copies checkpoints on {store.me.host}; start the run with llama405b launch, "
                    "or use --checkpoint.replicas 0"
                )
        if store.is_owner:
            at = owners.index(store.me.rank)
            after = spots[owners[(at + 1) % len(owners)]]
            assert after
            before = store.hosts[owners[at - 1]]
            self.ring = Ring(store.me.attempt, before, after, str(store.root.resolve()), store.run.name, store.keep)

    def begin(self, resumed: int) -> None:
        """Have copies made from now on; ``resumed``: the step from which the run goes on, of which there may be copies."""
        self.resumed = resumed
        self._tell()

    @property
    def spared(self) -> set[int]:
        """The steps that are not deleted: the newest that was copied, and the one that is being copied."""
        return {self.everywhere or self.resumed, self.step} if self.active else set()

    def after_save(self, step: int, group: dist.ProcessGroup | None = None) -> None:
        """Have all hosts copy this step, once they have copied the one before it.

        All copy the same step: of what each would choose by itself, none might be whole when a host is lost.
        """
        if not self.active:
            return
        if self.survey(group) == self.step:
            self.step = step
        self._tell()

    def survey(self, group: dist.ProcessGroup | None = None) -> int:
        """Return the newest step of which every host has a copy on the next one, 0 if there is none; all ranks call it alike."""
        copied = None
        if self.store.is_owner:
            read = read_record(Copied, self.store.run.copied(self.store.me.host))
            copied = read if read and read.attempt == self.store.me.attempt else Copied()
        newest = min(
            (each.step for each in collectives.all_gather_objects(copied, Copied | None, group) if each), default=0
        )
        if newest > self.everywhere:
            self.everywhere = newest
            self._tell()
        return self.everywhere

    def _tell(self) -> None:
        if self.ring:
            self.ring = dataclasses.replace(self.ring, step=self.step, everywhere=self.everywhere)
            with contextlib.suppress(OSError):  # it is told again after the next save
                write_json(self.store.run.ring(self.store.me.host), self.ring)

    def _spot(self) -> Endpoint | None:
        """Where this host takes copies; waits until the process that does has said so."""
        deadline = time.monotonic() + FOUND_WITHIN_S
        while True:
            spot = read_record(Endpoint, self.store.run.spot(self.store.me.host))
            if spot and spot.attempt == self.store.me.attempt:
                return spot
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
