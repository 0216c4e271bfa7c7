"""A call in a process of its own, which ends with this one: pinned memory, and what CUDA reads at its start, last as long as a process."""

import ctypes
import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

PR_SET_PDEATHSIG = 1
P = ParamSpec("P")
T = TypeVar("T")


def in_own_process(limit_s: float | None, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``act`` in a fresh process, and end that; ``limit_s``: of the call, None: any time.

    Raises:
        RuntimeError: It takes longer, or its process ends without a result.
    """
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(theirs, act, args, kwargs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise RuntimeError(f"no result after {limit_s:.0f} s")
        result: T = ours.recv()
        return result
    except EOFError:
        child.join()
        raise RuntimeError(f"its process ended with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()


def _in_child(results: Connection, act: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    parent = mp.parent_process()
    if parent and not parent.is_alive():  # which may have died before that
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store is for one group
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    results.send(act(*args, **kwargs))
