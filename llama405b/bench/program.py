"""Run the probes on this machine's GPU (``llama405b bench`` without HOSTS) or on a launch's ranks.

A single rank runs each probe in a process of its own, because pinned memory is released only when a process ends. Several ranks run
them in their own processes, and a probe that fails ends all of them.
"""

import argparse
import dataclasses
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from llama405b.bench import host, open_questions, runs, steps
from llama405b.bench.host import rates
from llama405b.bench.runs import allocator_stats, in_own_process, software, uses_gpu
from llama405b.bench.steps import knobs, more_knobs
from llama405b.contract.errors import FAILED, GOOD, UserError
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank
from llama405b.predict.run_shape import RunShape
from llama405b.spec import probes
from llama405b.spec.probes import (
    ABOUT,
    GPU_ONLY,
    LINKS,
    OPEN,
    Figure,
    Probe,
    ProbeResult,
    check_bundle,
    suits,
    write_bundle,
)

TIMEOUT_S = 120
SLOWEST = 3  # limit of a probe, as a multiple of its usual time
Say = Callable[[ProbeResult], object]
PROBES: dict[Probe, Callable[[Rank], list[Figure]]] = {
    Probe.START: host.first_collective,
    Probe.COLLECTIVES: host.checked_collectives,
    Probe.COPIES: host.copies,
    Probe.UPDATE: host.update,
    Probe.LAYER_NONE: steps.layer_none,
    Probe.LAYER_OPTIMIZER: steps.layer_optimizer,
    Probe.LAYER_ALL: steps.layer_all,
    Probe.HIDING: steps.hiding,
    Probe.EXACT: steps.exact,
    Probe.TP: steps.tp,
    Probe.CP: steps.cp,
    Probe.PP: steps.pp,
    Probe.HSDP: steps.hsdp,
    Probe.PRODUCTS: host.products,
    Probe.HOST_LINKS: host.host_links,
    Probe.KNOBS: knobs,
    Probe.KNOBS_2: more_knobs,
    Probe.COMMS: open_questions.comms,
    Probe.FSDP_COPIES: open_questions.fsdp_copies,
    Probe.ROUNDING: open_questions.rounding,
    Probe.TOKENS: open_questions.tokens,
    Probe.HOG: open_questions.hog,
    Probe.PLANNING: open_questions.planning,
}
ON_THE_DEMO: dict[Probe, Callable[[runs.Runs], list[Figure]]] = {
    Probe.ACCUMULATION: runs.accumulation,
    Probe.RESUME: runs.resume,
    Probe.PACKED: runs.packed,
    Probe.RANK0: runs.rank0,
    Probe.FSDP1: runs.fsdp1,
    Probe.EVALUATION: runs.evaluation,
    Probe.PACKED_FAST: open_questions.packed_fast,
}
# Probes that start processes of their own, before this process touches the GPU.
ALONE: dict[Probe, Callable[[str], list[Figure]]] = {
    probe: functools.partial(runs.in_a_directory, run) for probe, run in ON_THE_DEMO.items()
} | {Probe.STREAMS: open_questions.streams, Probe.HANG: open_questions.hang}


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How probes run; ``rates`` alone needs the last two."""

    device: str = "auto"
    bind: bool = False
    load: RunShape | None = None  # the planned run
    directory: Path | None = None  # that the probe `rates` writes to

    def join(self) -> Rank:
        """Join the other ranks."""
        me = ranks.join(self.device, TIMEOUT_S)
        if self.bind:
            ranks.bind(me)
        return me

    def measure(self, probe: Probe, me: Rank | None) -> list[Figure]:
        """Run one probe; ``me``: None for probes that start their own runs."""
        if me is None:
            return ALONE[probe](self.device)
        if probe is not Probe.RATES:
            return PROBES[probe](me)
        assert self.load
        assert self.directory
        return rates(me, self.load, self.directory)


def run_here(probes: Sequence[Probe], within_s: float, say: Say, options: Options = Options()) -> int:
    """Run probes as one of the ranks until one fails that all others depend on; return the exit code."""
    deadline = time.monotonic() + within_s
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        code = GOOD
        for probe in probes:
            if not suits(probe, 1) or (probe in GPU_ONLY and not uses_gpu(options.device)):
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
            os._exit(FAILED)  # no cleanup: the other ranks wait in a collective until torchrun ends them
    ranks.leave()
    return GOOD


def _alone(probe: Probe, deadline: float, options: Options) -> ProbeResult:
    """Run a probe in a process of its own; kill it at its time limit."""
    left, began = deadline - time.monotonic(), time.monotonic()
    if left < _least_s(probe, uses_gpu(options.device)):
        return ProbeResult(probe, 1, 1, skipped=True)
    limit_s = OPEN[probe].limit_s if probe in OPEN else max(TIMEOUT_S, SLOWEST * ABOUT[probe].usual_s)
    try:
        return in_own_process(min(left, limit_s), _joined, probe, options)
    except RuntimeError as error:
        return ProbeResult(probe, 1, 1, seconds=time.monotonic() - began, fault=str(error))


def _least_s(probe: Probe, on_gpu: bool) -> float:
    return ABOUT[probe].usual_s if on_gpu else 0.0


def _joined(probe: Probe, options: Options) -> ProbeResult:
    """Run a probe as the only rank, and return its result."""
    began = time.monotonic()
    try:
        me = None if probe in ALONE else options.join()
    except Exception as error:  # noqa: BLE001 - the driver may raise anything
        return ProbeResult(probe, 1, 1, seconds=time.monotonic() - began, fault=_said(error))
    return _measured(probe, me, 1, options)


def _measured(probe: Probe, me: Rank | None, n_hosts: int, options: Options) -> ProbeResult:
    """Run one probe; return a failure as a result too. ``me``: see ``Options.measure``."""
    began = time.monotonic()
    figures = []
    fault = ""
    try:
        figures = options.measure(probe, me)
    except Exception as error:  # noqa: BLE001 - CUDA, NCCL and allocations may raise anything
        fault = _said(error)
    on_gpu = me.on_gpu if me else uses_gpu(options.device)
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    seconds = time.monotonic() - began
    result = ProbeResult(
        probe, me.world if me else 1, n_hosts, device, torch.__version__, seconds, tuple(figures), fault
    )
    return dataclasses.replace(result, software=software(), allocator=allocator_stats(on_gpu=on_gpu))


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def main(args: argparse.Namespace) -> int:
    """Run the verb on this machine's first GPU; return the exit code."""
    if args.env or args.setup_line:
        raise UserError("bench: --env and --setup-line are for hosts; name a hosts file, or leave them out")
    tests, log = probes.chosen(args.tests), probes.Log(args.out)
    check_bundle(args.bundle, with_host_names=args.with_host_names)

    def say(result: probes.ProbeResult) -> None:
        log.add(result)
        print(probes.line_of(result), flush=True)

    code, date = run_here(tests, args.within, say), time.strftime("%Y-%m-%d")
    print(log.block(date))
    if args.bundle:
        write_bundle(args.bundle, log.results(), tests, date, [platform.node()], named=args.with_host_names)
    return code
