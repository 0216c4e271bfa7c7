"""This rank's batches, one step after another, read ahead. Knows ranks and where the run is in its data; not the model.

A place in the order of the sequences determines what is there, so one number is the whole state, with any number of ranks and of
processes that read ahead: what they have read and no step has used is not part of it.
"""

import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from llama405b.contract.dealing import Dealing
from llama405b.contract.errors import RunError
from llama405b.data.batches import Batches
from llama405b.data.parent_watch import end_with
from llama405b.distributed.ranks import Rank
from llama405b.model.batch import IGNORE_INDEX, Batch

Windows = NDArray[np.uint32]  # (B, S + 1)


class Reader:
    """An endless iterator of steps: the micro-batches of this rank, on its device."""

    def __init__(
        self, batches: Batches, me: Rank, dealing: Dealing, micro: int, position: int = 0, workers: int = 0
    ) -> None:
        """``position``: sequences that were read before, over all ranks; ``workers``: processes that read ahead; 0: a thread.

        ``dealing``: of the step's micro-batches, of ``micro`` sequences each, to the ranks that split the batch.
        """
        self.batches = batches
        self.me = me
        self.global_batch = dealing.n_micro * micro
        self.micro = micro
        self.position = position
        first, n_own = dealing.place(me.dp.rank)
        self.idle = dealing.rounds - n_own  # micro-batches: those of the rank before, of which nothing is learnt
        rows = _Rows(batches, dealing.rounds * micro)
        begins = itertools.count(position + (first - self.idle) * micro, self.global_batch)
        self.windows = _by_workers(rows, begins, workers) if workers else _by_thread(rows, begins)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return the next step's.

        Raises:
            RunError: A process that reads ahead died.
        """
        windows = next(self.windows)
        self.position += self.global_batch
        batch = self.batches.batch(windows)
        batch.targets_BS[: self.idle * self.micro] = IGNORE_INDEX
        return [part.to(self.me.device) for part in batch.split(self.micro)]

    def close(self) -> None:
        """End what reads ahead."""
        self.windows.close()


class _Rows(Dataset[Windows]):
    """So many sequences from a place on."""

    def __init__(self, batches: Batches, each: int) -> None:
        self.batches, self.each = batches, each

    def __getitem__(self, begin: int) -> Windows:
        return self.batches.windows(range(begin, begin + self.each))


def _by_thread(rows: _Rows, begins: Iterator[int]) -> Generator[Windows]:
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        coming = thread.submit(rows.__getitem__, next(begins))
        while True:
            ready, coming = coming, thread.submit(rows.__getitem__, next(begins))
            yield ready.result()


def _by_workers(rows: _Rows, begins: Iterator[int], workers: int) -> Generator[Windows]:
    """From processes that have none of the rank's sockets or threads, and end with it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__, getattr(sys.modules["__main__"].__spec__, "name", __name__)])
    loader = DataLoader(
        rows,
        sampler=begins,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        multiprocessing_context=server,
        worker_init_fn=functools.partial(end_with, os.getpid()),
    )
    try:
        yield from loader
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise RunError(
            f"--data.workers: a process that reads ahead died ({why}); check the host's memory, or use fewer"
        ) from None


def _as_it_is(windows: Windows) -> Windows:
    return windows
