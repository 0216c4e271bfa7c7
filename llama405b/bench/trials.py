"""Try settings of a run, one after the other, in the same processes: its own parts and data, random weights, few of its layers.

Rank 0 chooses what comes next (``predict.tuning``), and prints what begins and what was measured. If a trial fails, all ranks end, as the
others may wait in a collective; the operator's side starts them again for the rest.
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b import extend
from llama405b.bench.steps import median_seconds, run_steps
from llama405b.contract.errors import EXIT_FAILED, UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.records import describe_rank_exit
from llama405b.distributed import collectives, ranks
from llama405b.distributed.host_memory import free_bytes, peak_memory, reset_peak_memory
from llama405b.distributed.ranks import Rank
from llama405b.predict.calibration import MeasuredStep
from llama405b.predict.tuning import COMPARED_STEPS, Candidate, Trials
from llama405b.settings import command
from llama405b.settings.schema import Config
from llama405b.spec.probes import MEMORY_IS_FULL, Figure, Probe, ProbeResult, encode_result
from llama405b.training.build import build_host_inputs
from llama405b.training.context import RankContext, cause_of
from llama405b.training.journal import HeartbeatWriter
from llama405b.training.setup import Purpose, build_reader, prepare

WARMUP_STEPS, MIN_STEPS, MAX_STEPS = 2, 3, 12  # steps before those that are timed, and of those
TIMED_S = 2.0  # seconds of steps that are enough
FULL_SHARE = 0.5  # of the host memory that was free: with less, new processes go on, as these keep what they pinned


def run_trials(rank: Rank, trials: Trials, directory: Path, within_s: float) -> list[Figure]:
    """Run trials until no other is worth its time, there is no time for another, or host memory is full.

    Return how many were run, and whether memory is full: pinned memory is kept until a process ends. ``directory``: of the run.
    """
    gc.set_threshold(700)  # as the trainer does: garbage that holds GPU memory must be freed soon
    deadline, latest_s, n_run = time.monotonic() + within_s, 0.0, 0
    free_at_start = free_bytes()
    heartbeat = HeartbeatWriter(RunDir(directory), rank)
    while True:
        [is_full] = collectives.all_reduce_max([int(n_run and free_bytes() < FULL_SHARE * free_at_start)])
        start = time.monotonic()
        candidate = None if is_full or start + latest_s > deadline else trials.next()
        number = collectives.broadcast_object(trials.candidates.index(candidate) if candidate else -1)
        if number < 0:
            return [Figure("trials", n_run, ""), Figure(MEMORY_IS_FULL, is_full, "")]
        candidate = trials.candidates[number]
        _report(rank, candidate)
        points, figures = [], []
        for layers in dict.fromkeys(candidate.layers):
            point, more = _try(trials, candidate, layers, rank, heartbeat)
            points.append(point)
            figures += more
        latest_s, n_run = time.monotonic() - start, n_run + 1
        trials = trials.with_result(candidate.label, trials.step_s(points))
        _report(rank, candidate, time.monotonic() - start, figures)


def _report(
    rank: Rank, candidate: Candidate, seconds: float = 0.0, figures: Sequence[Figure] = (), fault: str = ""
) -> None:
    """Print what a trial measured or why it failed, or without either that it begins."""
    if rank.is_rank0:
        result = ProbeResult(
            Probe.TRIALS, rank.world_size, 0, "", "", seconds, tuple(figures), fault, trial=candidate.label
        )
        print(*encode_result(result), sep="\n", flush=True)


def _try(
    trials: Trials, candidate: Candidate, layers: int, rank: Rank, heartbeat: HeartbeatWriter
) -> tuple[MeasuredStep, list[Figure]]:
    """Measure steps with so many layers; end the process if that fails."""
    try:
        config = command.parse([*trials.flags, *candidate.flags, f"--model.layers={layers}"]).config
        extend.use(config.training.extend)
        point, first_steps = _measure(config, layers, rank, heartbeat)
    except Exception as error:  # noqa: BLE001 - CUDA, NCCL and allocations may raise anything
        cause = cause_of(error, heartbeat)
        print(f"{candidate.label}: {describe_rank_exit(cause)}", file=sys.stderr, flush=True)
        heartbeat.record_failure(cause)
        if rank.world_size == 1:  # a child of what torchrun started; of several ranks, the cause may be another's
            _report(rank, candidate, fault=describe_rank_exit(cause))
        os._exit(EXIT_FAILED)
    figures = [
        Figure(f"{layers} {name}", float(value), "")
        for name, value in dataclasses.asdict(point).items()
        if name != "layers"
    ]
    if layers == trials.compared_layers:
        figures += [Figure(f"{layers} first {i}", value, "") for i, value in enumerate(first_steps)]
    return point, figures


def _measure(config: Config, layers: int, rank: Rank, heartbeat: HeartbeatWriter) -> tuple[MeasuredStep, list[float]]:
    """Return the medians of steps, and the losses and gradient norms of the first."""
    reset_peak_memory(on_gpu=rank.on_gpu)
    ranks.leave_other_groups()
    ranks.set_timeout(config.timeouts.load)
    context = RankContext.from_rank(ranks.with_mesh(rank, config.parallel), heartbeat)
    setup = prepare(config, "no", context, Purpose.TRAIN)
    start, passes, updater = setup.start, setup.forward_backward, setup.updater
    assert start.batches
    build_host_inputs(start.config, setup.module, start.llama, context)
    training = start.config.training
    with contextlib.closing(
        build_reader(training, start.config.data.workers, start.batches, start.point(None), context)
    ) as reader:
        max_norm = start.config.optimizer.max_norm
        first, seconds, _ = run_steps(passes, updater, itertools.islice(reader, WARMUP_STEPS), context.rank, max_norm)
        ranks.set_timeout(config.timeouts.step)
        enough = math.ceil(TIMED_S / max(1e-3, sum(seconds[-1].values()))) if seconds else MAX_STEPS
        [count] = collectives.all_reduce_max([min(MAX_STEPS, max(MIN_STEPS, enough))])
        _, seconds, work = run_steps(passes, updater, itertools.islice(reader, count), context.rank, max_norm)
    if not seconds:
        raise UserError("--data: no step has a target; prompts may be longer than --data.seq_len, or all is skipped")
    median = median_seconds(seconds)
    waited_s = max(0.0, work.exposed_s - median["optimizer"]) if work else 0.0  # beside the norm
    [peak_bytes] = collectives.all_reduce_max([peak_memory(on_gpu=rank.on_gpu).peak_bytes])
    point = MeasuredStep(
        layers, training.micro_batch_size, training.global_batch_size, median["data"], median.get("forward", 0.0),
        median["backward"], median["optimizer"], peak_bytes, waited_s,
    )  # fmt: skip
    if start.saving:
        start.saving.store.close()
    compared = first[:COMPARED_STEPS]
    return point, [result.loss for result in compared] + [result.grad_norm for result in compared]
