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

from llama405b import ranks
from llama405b.commands.ladder import host, links, steps
from llama405b.contract import reader
from llama405b.contract.errors import FAILED, GOOD
from llama405b.contract.rungs import ABOUT_S, MANY_RANKS_ONLY, ONE_RANK_ONLY, SIGN, Figure, Rung, RungResult, chosen
from llama405b.ranks import Ranks

TIMEOUT_S = 120
PR_SET_PDEATHSIG = 1
Say = Callable[[RungResult], object]
CLIMB: dict[Rung, Callable[[Ranks], list[Figure]]] = {
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
    parser.add_argument("--rungs", type=chosen, required=True)
    parser.add_argument("--within", type=float, required=True, help="seconds")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    args = parser.parse_args(argv)
    return climb_here(
        args.rungs, args.within, lambda result: print(SIGN + reader.dumps(result), flush=True), args.device
    )


def climb_here(rungs: Sequence[Rung], within_s: float, say: Say, device: str = "auto") -> int:
    """Climb rungs in this process's place among the ranks; returns the exit code."""
    deadline = time.monotonic() + within_s
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        results = [_alone(rung, deadline, say, device) for rung in rungs if rung not in MANY_RANKS_ONLY]
        return GOOD if all(result.good for result in results) else FAILED
    me = ranks.join(device, TIMEOUT_S)
    for rung in rungs:
        if rung in ONE_RANK_ONLY:
            continue
        [late] = ranks.greatest_of([int(deadline - time.monotonic() < _least_s(rung, me.on_gpu))])
        result = RungResult(rung, me.world, 1, "", "", 0.0, skipped=True) if late else _climbed(rung, me)
        if me.leads:
            say(result)
        if result.fault:
            print(f"rung {rung}: {result.fault}", file=sys.stderr, flush=True)
            os._exit(FAILED)  # the other ranks wait in a collective; torchrun ends them
    ranks.leave()
    return GOOD


def _alone(rung: Rung, deadline: float, say: Say, device: str) -> RungResult:
    """Climb a rung in a process of its own, which is ended when its time is over."""
    left, began = deadline - time.monotonic(), time.monotonic()
    result = RungResult(rung, 1, 1, "", "", 0.0, skipped=True)
    if left >= _least_s(rung, device != "cpu" and torch.cuda.is_available()):
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_in_child, args=(rung, theirs, device), daemon=True)
        child.start()
        theirs.close()
        fault = f"no result after {left:.0f} s"
        try:
            if ours.poll(left):
                result, fault = ours.recv(), ""
        except EOFError:
            child.join()
            fault = f"its process ended with exit code {child.exitcode}"
        finally:
            child.kill()
            child.join()
        if fault:
            result = RungResult(rung, 1, 1, "", "", time.monotonic() - began, fault=fault)
    say(result)
    return result


def _least_s(rung: Rung, on_gpu: bool) -> float:
    return ABOUT_S[rung] if on_gpu else 0.0


def _in_child(rung: Rung, results: Connection, device: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store is for one group
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    results.send(_climbed(rung, ranks.join(device, TIMEOUT_S)))


def _climbed(rung: Rung, me: Ranks) -> RungResult:
    """Climb one rung; what fails is a result."""
    began, figures, fault = time.monotonic(), [], ""
    try:
        figures = CLIMB[rung](me)
    except Exception as error:  # noqa: BLE001 - whatever CUDA, NCCL or the memory says
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    device = torch.cuda.get_device_name() if me.on_gpu else "cpu"
    n_hosts = 1 if fault else len(set(ranks.agreed(me.host)))
    seconds = time.monotonic() - began
    return RungResult(rung, me.world, n_hosts, device, torch.__version__, seconds, tuple(figures), fault)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
