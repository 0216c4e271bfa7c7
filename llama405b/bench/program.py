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
from llama405b.bench.host import measure_rates
from llama405b.bench.runs import allocator_stats, describe_machine, run_in_own_process, uses_gpu
from llama405b.bench.steps import measure_knobs, measure_more_knobs
from llama405b.bench.trials import run_trials
from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, UserError
from llama405b.distributed import collectives, ranks
from llama405b.distributed.ranks import Rank
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.tuning import Trials
from llama405b.spec import probes
from llama405b.spec.probes import (
    GPU_ONLY,
    OPEN_QUESTIONS,
    PROBE_INFO,
    REHEARSAL_PROBES,
    Figure,
    Probe,
    ProbeResult,
    check_bundle,
    supports_world_size,
    write_bundle,
)

TIMEOUT_S = 120
SLOW_FACTOR = 3  # limit of a probe, as a multiple of its usual time
ResultCallback = Callable[[ProbeResult], object]
PROBE_FUNCTIONS: dict[Probe, Callable[[Rank], list[Figure]]] = {
    Probe.START: host.measure_first_collective,
    Probe.COLLECTIVES: host.measure_collectives,
    Probe.COPIES: host.measure_copies,
    Probe.UPDATE: host.measure_update,
    Probe.LAYER_NONE: steps.measure_layer_none,
    Probe.LAYER_OPTIMIZER: steps.measure_layer_optimizer,
    Probe.LAYER_ALL: steps.measure_layer_all,
    Probe.HIDING: steps.measure_hiding,
    Probe.EXACT: steps.compare_exact,
    Probe.TP: steps.tp,
    Probe.CP: steps.cp,
    Probe.PP: steps.pp,
    Probe.HSDP: steps.hsdp,
    Probe.PRODUCTS: host.measure_products,
    Probe.HOST_LINKS: host.measure_host_links,
    Probe.KNOBS: measure_knobs,
    Probe.KNOBS_2: measure_more_knobs,
    Probe.COMMS: open_questions.measure_comms,
    Probe.FSDP_COPIES: open_questions.measure_fsdp_copies,
    Probe.ROUNDING: open_questions.measure_rounding,
    Probe.TOKENS: open_questions.measure_tokens,
    Probe.HOG: open_questions.measure_hog,
    Probe.PLANNING: open_questions.measure_planning,
}
DEMO_PROBES: dict[Probe, Callable[[runs.DemoRuns], list[Figure]]] = {
    Probe.ACCUMULATION: runs.compare_accumulation,
    Probe.RESUME: runs.compare_resume,
    Probe.PACKED: runs.compare_packed,
    Probe.RANK0: runs.compare_rank0,
    Probe.FSDP1: runs.compare_fsdp1,
    Probe.EVALUATION: runs.compare_evaluation,
    Probe.PACKED_FAST: open_questions.compare_packed_fast,
}
# Probes that start processes of their own, before this process touches the GPU.
OWN_PROCESS_PROBES: dict[Probe, Callable[[str], list[Figure]]] = {
    probe: functools.partial(runs.run_in_temporary_directory, run) for probe, run in DEMO_PROBES.items()
} | {Probe.STREAMS: open_questions.measure_streams, Probe.HANG: open_questions.measure_hang}


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How probes run; `rates` and `trials` alone need what follows the first two."""

    device: str = "auto"
    bind: bool = False
    run: PredictedRun | None = None  # the planned run
    directory: Path | None = None  # that `rates` writes to
    trials: Trials | None = None  # what `trials` may try
    run_dir: Path = Path()

    def join(self) -> Rank:
        """Join the other ranks."""
        rank = ranks.join_process_group(self.device, TIMEOUT_S)
        if self.bind:
            ranks.bind_cores(rank)
        return rank

    def measure(self, probe: Probe, rank: Rank | None, within_s: float) -> list[Figure]:
        """Run one probe; ``rank``: None for probes that start their own runs."""
        if rank is None:
            return OWN_PROCESS_PROBES[probe](self.device)
        if probe is Probe.TRIALS:
            assert self.trials
            return run_trials(rank, self.trials, self.run_dir, within_s)
        if probe is not Probe.RATES:
            return PROBE_FUNCTIONS[probe](rank)
        assert self.run
        assert self.directory
        return measure_rates(rank, self.run, self.directory)


def run_probes_here(
    probes: Sequence[Probe], within_s: float, on_result: ResultCallback, options: Options = Options()
) -> int:
    """Run probes as one of the ranks until one fails that all others depend on; return the exit code."""
    deadline = time.monotonic() + within_s
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        code = EXIT_OK
        for probe in probes:
            if not supports_world_size(probe, 1) or (probe in GPU_ONLY and not uses_gpu(options.device)):
                continue
            result = _run_isolated(probe, deadline, options)
            on_result(result)
            if result.fault:
                code = EXIT_FAILED
            if result.fault and probe in REHEARSAL_PROBES:
                break
            if result.fault and probe is Probe.RATES:  # trials are told beside them
                break
        return code
    rank = options.join()
    n_hosts = len(set(collectives.all_gather_objects(rank.host)))
    for probe in probes:
        if not supports_world_size(probe, rank.world_size):
            continue
        [is_late] = collectives.all_reduce_max([int(deadline - time.monotonic() < _min_time_s(probe, rank.on_gpu))])
        result = (
            ProbeResult(probe, rank.world_size, n_hosts, skipped=True)
            if is_late
            else _run_probe(probe, rank, n_hosts, options, deadline - time.monotonic())
        )
        if rank.is_rank0:
            on_result(result)
        if result.fault:
            print(f"{probe}: {result.fault}", file=sys.stderr, flush=True)
            os._exit(EXIT_FAILED)  # no cleanup: the other ranks wait in a collective until torchrun ends them
    ranks.leave_process_group()
    return EXIT_OK


def _run_isolated(probe: Probe, deadline: float, options: Options) -> ProbeResult:
    """Run a probe in a process of its own; kill it at its time limit."""
    remaining_s, start = deadline - time.monotonic(), time.monotonic()
    if remaining_s < _min_time_s(probe, uses_gpu(options.device)):
        return ProbeResult(probe, 1, 1, skipped=True)
    usual_limit_s = max(TIMEOUT_S, SLOW_FACTOR * PROBE_INFO[probe].usual_s)
    limit_s: float | None = min(
        remaining_s, OPEN_QUESTIONS[probe].limit_s if probe in OPEN_QUESTIONS else usual_limit_s
    )
    if probe is Probe.TRIALS:  # one that has begun ends; the operator's side knows how long that may take
        limit_s = None
    try:
        return run_in_own_process(limit_s, _run_as_only_rank, probe, options, remaining_s)
    except RuntimeError as error:
        return ProbeResult(probe, 1, 1, seconds=time.monotonic() - start, fault=str(error))


def _min_time_s(probe: Probe, on_gpu: bool) -> float:
    return PROBE_INFO[probe].usual_s if on_gpu else 0.0


def _run_as_only_rank(probe: Probe, options: Options, within_s: float) -> ProbeResult:
    """Run a probe as the only rank, and return its result."""
    start = time.monotonic()
    try:
        rank = None if probe in OWN_PROCESS_PROBES else options.join()
    except Exception as error:  # noqa: BLE001 - the driver may raise anything
        return ProbeResult(probe, 1, 1, seconds=time.monotonic() - start, fault=_describe_error(error))
    return _run_probe(probe, rank, 1, options, within_s)


def _run_probe(probe: Probe, rank: Rank | None, n_hosts: int, options: Options, within_s: float) -> ProbeResult:
    """Run one probe; return a failure as a result too. ``rank``: see ``Options.measure``; ``within_s``: the time that is left."""
    start = time.monotonic()
    figures = []
    fault = ""
    try:
        figures = options.measure(probe, rank, within_s)
    except Exception as error:  # noqa: BLE001 - CUDA, NCCL and allocations may raise anything
        fault = _describe_error(error)
    on_gpu = rank.on_gpu if rank else uses_gpu(options.device)
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    seconds = time.monotonic() - start
    result = ProbeResult(
        probe, rank.world_size if rank else 1, n_hosts, device, torch.__version__, seconds, tuple(figures), fault
    )
    return dataclasses.replace(result, software=describe_machine(), allocator=allocator_stats(on_gpu=on_gpu))


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def main(args: argparse.Namespace) -> int:
    """Run the verb on this machine's first GPU; return the exit code."""
    if args.env or args.env_file or args.secret or args.setup_line:
        raise UserError(
            "bench: --env, --env-file, --secret and --setup-line are for hosts; name a hosts file, or leave them out"
        )
    tests, log = probes.select_tests(args.tests), probes.ResultDirectory(args.out)
    check_bundle(args.bundle, with_host_names=args.with_host_names)

    def on_result(result: probes.ProbeResult) -> None:
        log.add(result)
        print(probes.format_result(result), flush=True)

    code, date = run_probes_here(tests, args.time_limit, on_result), time.strftime("%Y-%m-%d")
    print(log.format_report(date))
    if args.bundle:
        write_bundle(args.bundle, log.results(), tests, date, [platform.node()], keep_names=args.with_host_names)
    return code
