"""Run probes in this process's place among the ranks.

One rank runs each probe in a process of its own: pinned memory is given back only when a process ends. Several ranks run
them in their own processes, and a probe that fails ends them all.
"""

import ctypes
import dataclasses
import functools
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from llama405b.capacity.run_shape import RunShape
from llama405b.commands.probes import host, links, meshes, open_questions, steps
from llama405b.commands.probes.knobs import knobs
from llama405b.commands.probes.rates import rates
from llama405b.commands.probes.runs import RUNS, in_a_directory
from llama405b.commands.probes.software import allocator_stats, software
from llama405b.contract.errors import FAILED, GOOD
from llama405b.contract.probes import (
    ABOUT_S,
    GPU_ONLY,
    LINKS,
    OPEN,
    Figure,
    Probe,
    ProbeResult,
    suits,
)
from llama405b.distributed import collectives, numa, ranks
from llama405b.distributed.ranks import Rank

TIMEOUT_S = 120
SLOWEST = 3  # times what a probe usually takes
PR_SET_PDEATHSIG = 1
Say = Callable[[ProbeResult], object]
PROBES: dict[Probe, Callable[[Rank], list[Figure]]] = {
    Probe.START: links.first_collective,
    Probe.COLLECTIVES: links.checked_collectives,
    Probe.COPIES: host.copies,
    Probe.UPDATE: host.update,
    Probe.LAYER_NONE: steps.layer_none,
    Probe.LAYER_OPTIMIZER: steps.layer_optimizer,
    Probe.LAYER_ALL: steps.layer_all,
    Probe.HIDING: steps.hiding,
    Probe.EXACT: steps.exact,
    Probe.TP: meshes.tp,
    Probe.CP: meshes.cp,
    Probe.PP: meshes.pp,
    Probe.HSDP: meshes.hsdp,
    Probe.PRODUCTS: host.products,
    Probe.HOST_LINKS: links.host_links,
    Probe.KNOBS: knobs,
    Probe.COMMS: open_questions.comms,
    Probe.FSDP_COPIES: open_questions.fsdp_copies,
    Probe.ROUNDING: open_questions.rounding,
    Probe.TOKENS: open_questions.tokens,
    Probe.HOG: open_questions.hog,
    Probe.PLANNING: open_questions.planning,
}
ALONE: dict[Probe, Callable[[str], list[Figure]]] = (
    RUNS
    | {  # what makes processes of its own, before this one has touched the GPU
        Probe.PACKED_FAST: functools.partial(in_a_directory, open_questions.packed_fast),
        Probe.STREAMS: open_questions.streams,
        Probe.HANG: open_questions.hang,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How probes run; ``rates`` alone needs the last two."""

    device: str = "auto"
    bind: bool = False
    load: RunShape | None = None  # the planned run
    directory: Path | None = None  # where it writes

    def join(self) -> Rank:
        """Join the other ranks."""
        me = ranks.join(self.device, TIMEOUT_S)
        if self.bind:
            numa.bind(me)
        return me

    def measure(self, probe: Probe, me: Rank | None) -> list[Figure]:
        """Run one probe; ``me``: None for whole runs, whose ranks join by themselves."""
        if me is None:
            return ALONE[probe](self.device)
        if probe is not Probe.RATES:
            return PROBES[probe](me)
        assert self.load
        assert self.directory
        return rates(me, self.load, self.directory)


def run_here(probes: Sequence[Probe], within_s: float, say: Say, options: Options = Options()) -> int:
    """Run probes in this process's place among the ranks, until one fails that all others need; returns the exit code."""
    deadline = time.monotonic() + within_s
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        code = GOOD
        on_gpu = options.device != "cpu" and torch.cuda.is_available()
        for probe in probes:
            if not suits(probe, 1) or (probe in GPU_ONLY and not on_gpu):
                continue
            result = _alone(probe, deadline, options)
            say(result)
            if result.fault:
                code = FAILED
            if result.fault and probe in LINKS:
                break
        return code
    me = options.join()
    n_hosts = len(set(collectives.all_gather_objects(me.host)))
    for probe in probes:
        if not suits(probe, me.world):
            continue
        [late] = collectives.all_reduce_max([int(deadline - time.monotonic() < _least_s(probe, me.on_gpu))])
        result = ProbeResult(probe, me.world, n_hosts, skipped=True) if late else _measured(probe, me, n_hosts, options)
        if me.is_rank0:
            say(result)
        if result.fault:
            print(f"{probe}: {result.fault}", file=sys.stderr, flush=True)
            os._exit(FAILED)  # the other ranks wait in a collective; torchrun ends them
    ranks.leave()
    return GOOD


def _alone(probe: Probe, deadline: float, options: Options) -> ProbeResult:
    """Run a probe in a process of its own, which is ended when its time is over."""
    left, began = deadline - time.monotonic(), time.monotonic()
    if left < _least_s(probe, options.device != "cpu" and torch.cuda.is_available()):
        return ProbeResult(probe, 1, 1, skipped=True)
    usual_s = max(TIMEOUT_S, SLOWEST * ABOUT_S[probe])
    limit_s = min(left, OPEN[probe].limit_s if probe in OPEN else usual_s)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(probe, theirs, options), daemon=True)
    child.start()
    theirs.close()
    fault = f"no result after {limit_s:.0f} s"
    try:
        if ours.poll(limit_s):
            result: ProbeResult = ours.recv()
            return result
    except EOFError:
        child.join()
        fault = f"its process ended with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()
    return ProbeResult(probe, 1, 1, seconds=time.monotonic() - began, fault=fault)


def _least_s(probe: Probe, on_gpu: bool) -> float:
    return ABOUT_S[probe] if on_gpu else 0.0


def _in_child(probe: Probe, results: Connection, options: Options) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive its parent
    parent = mp.parent_process()
    if parent and not parent.is_alive():  # which may have died before that
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torchrun's store is for one group
        os.environ.pop(name, None)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    began = time.monotonic()
    try:
        me = None if probe in ALONE else options.join()
    except Exception as error:  # noqa: BLE001 - whatever the driver says
        results.send(ProbeResult(probe, 1, 1, seconds=time.monotonic() - began, fault=_said(error)))
        return
    results.send(_measured(probe, me, 1, options))


def _measured(probe: Probe, me: Rank | None, n_hosts: int, options: Options) -> ProbeResult:
    """Run one probe; what fails is a result. ``me``: see ``Options.measure``."""
    began = time.monotonic()
    figures = []
    fault = ""
    try:
        figures = options.measure(probe, me)
    except Exception as error:  # noqa: BLE001 - whatever CUDA, NCCL or the memory says
        fault = _said(error)
    on_gpu = me.on_gpu if me else options.device != "cpu" and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    seconds = time.monotonic() - began
    result = ProbeResult(
        probe, me.world if me else 1, n_hosts, device, torch.__version__, seconds, tuple(figures), fault
    )
    return dataclasses.replace(result, software=software(), allocator=allocator_stats(on_gpu=on_gpu))


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
