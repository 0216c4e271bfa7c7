"""Climb rungs on all ranks; rank 0 prints what each found, as soon as it ends.

One rank climbs each rung in a process of its own: pinned memory is given back only when a process ends. Several ranks climb
them in their own processes, and a rung that fails ends them all.
"""

import argparse
import ctypes
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch

from llama405b.commands.ladder import host, links, steps
from llama405b.contract import reader
from llama405b.contract.errors import FAILED, GOOD
from llama405b.contract.rungs import (
    ABOUT_S,
    LINKS,
    MANY_RANKS_ONLY,
    ONE_RANK_ONLY,
    SIGN,
    Figure,
    Rung,
    RungResult,
    chosen,
)
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank

TIMEOUT_S = 120
SLOWEST = 3  # times what a rung usually takes
PR_SET_PDEATHSIG = 1
Say = Callable[[RungResult], object]
CLIMB: dict[Rung, Callable[[Rank], list[Figure]]] = {
    Rung.START: links.first_collective,
    Rung.COLLECTIVES: links.checked_collectives,
    Rung.COPIES: links.copy_rates,
    Rung.UPDATE: host.update,
    Rung.LAYER_NONE: steps.layer_none,
    Rung.LAYER_STATES: steps.layer_states,
    Rung.LAYER_FULL: steps.layer_full,
    Rung.HIDING: steps.hiding,
    Rung.EXACT: steps.exact,
}


def main(argv: Sequence[str]) -> int:
    """Climb as one of the ranks that torchrun has started."""
    parser = argparse.ArgumentParser(prog="llama405b.commands.ladder.program", description=__doc__)
    parser.add_argument("--tests", type=chosen, required=True)
    parser.add_argument("--within", type=float, required=True, help="seconds")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    args = parser.parse_args(argv)
    return climb_here(
        args.tests, args.within, lambda result: print(SIGN + reader.dumps(result), flush=True), args.device
    )


def climb_here(rungs: Sequence[Rung], within_s: float, say: Say, device: str = "auto") -> int:
    """Climb rungs in this process's place among the ranks, until one fails that all others need; returns the exit code."""
    deadline = time.monotonic() + within_s
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        code = GOOD
        for rung in rungs:
            if rung in MANY_RANKS_ONLY:
                continue
            result = _alone(rung, deadline, device)
            say(result)
            if result.fault:
                code = FAILED
            if result.fault and rung in LINKS:
                break
        return code
    me = ranks.join(device, TIMEOUT_S)
    n_hosts = len(set(collectives.all_gather_objects(me.host)))
    for rung in rungs:
        if rung in ONE_RANK_ONLY:
            continue
        [late] = collectives.all_reduce_max([int(deadline - time.monotonic() < _least_s(rung, me.on_gpu))])
        result = RungResult(rung, me.world, n_hosts, skipped=True) if late else _climbed(rung, me, n_hosts)
        if me.is_rank0:
            say(result)
        if result.fault:
            print(f"rung {rung}: {result.fault}", file=sys.stderr, flush=True)
            os._exit(FAILED)  # the other ranks wait in a collective; torchrun ends them
    ranks.leave()
    return GOOD


def _alone(rung: Rung, deadline: float, device: str) -> RungResult:
    """Climb a rung in a process of its own, which is ended when its time is over."""
    left, began = deadline - time.monotonic(), time.monotonic()
    if left < _least_s(rung, device != "cpu" and torch.cuda.is_available()):
        return RungResult(rung, 1, 1, skipped=True)
    limit_s = min(left, max(TIMEOUT_S, SLOWEST * ABOUT_S[rung]))
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(rung, theirs, device), daemon=True)
    child.start()
    theirs.close()
    fault = f"no result after {limit_s:.0f} s"
    try:
        if ours.poll(limit_s):
            result: RungResult = ours.recv()
            return result
    except EOFError:
        child.join()
        fault = f"its process ended with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()
    return RungResult(rung, 1, 1, seconds=time.monotonic() - began, fault=fault)


def _least_s(rung: Rung, on_gpu: bool) -> float:
    return ABOUT_S[rung] if on_gpu else 0.0


def _in_child(rung: Rung, results: Connection, device: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store is for one group
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    began = time.monotonic()
    try:
        me = ranks.join(device, TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever the driver says
        results.send(RungResult(rung, 1, 1, seconds=time.monotonic() - began, fault=_said(error)))
        return
    results.send(_climbed(rung, me, 1))


def _climbed(rung: Rung, me: Rank, n_hosts: int) -> RungResult:
    """Climb one rung; what fails is a result."""
    began = time.monotonic()
    figures = []
    fault = ""
    try:
        figures = CLIMB[rung](me)
    except Exception as error:  # noqa: BLE001 - whatever CUDA, NCCL or the memory says
        fault = _said(error)
    device = torch.cuda.get_device_name() if me.on_gpu else "cpu"
    seconds = time.monotonic() - began
    return RungResult(rung, me.world, n_hosts, device, torch.__version__, seconds, tuple(figures), fault)


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
