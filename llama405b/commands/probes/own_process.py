"""A call in a process of its own, which ends with this one: pinned memory, and what CUDA reads at its start, last as long as a process."""

import contextlib
import ctypes
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar, TypeVarTuple

PR_SET_PDEATHSIG = 1
Args = TypeVarTuple("Args")
T = TypeVar("T")


@contextlib.contextmanager
def own_process(act: Callable[..., Any], *args: Any) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Call ``act`` in a fresh process, which is ended with the block; yields it, and where its result arrives."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(theirs, act, args))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()


def in_own_process(limit_s: float | None, act: Callable[[*Args], T], *args: *Args) -> T:
    """Return what ``act`` returns in a process of its own; ``limit_s``: of the call, None: any time.

    Raises:
        RuntimeError: It takes longer, or its process ends without a result.
    """
    with own_process(act, *args) as (child, results):
        if not results.poll(limit_s):
            raise RuntimeError(f"no result after {limit_s:.0f} s")
        try:
            result: T = results.recv()
        except EOFError:
            child.join()
            raise RuntimeError(f"its process ended with exit code {child.exitcode}") from None
        return result


def _in_child(results: Connection, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    parent = mp.parent_process()
    if parent and not parent.is_alive():  # which may have died before that
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store is for one group
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    results.send(act(*args))
