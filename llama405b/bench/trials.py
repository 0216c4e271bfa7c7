"""Try settings of a run, one after the other, in the same processes: its own parts and data, random weights, few of its layers.

Rank 0 chooses what comes next (``predict.tuning``), and prints what begins and what was measured. If a trial fails, all ranks end, as the
others may wait in a collective; the operator's side starts them again for the rest.
"""

import contextlib
import gc
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llama405b import extend
from llama405b.bench.steps import median_seconds, run_steps
from llama405b.contract import reader
from llama405b.contract.errors import EXIT_FAILED, UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.records import describe_rank_exit
from llama405b.distributed import collectives, ranks
from llama405b.distributed.host_memory import free_bytes, peak_memory, reset_peak_memory
from llama405b.distributed.ranks import Rank
from llama405b.predict.calibration import MeasuredStep
from llama405b.predict.tuning import COMPARED_STEPS, Candidate, Trial, Trials
from llama405b.settings import command
from llama405b.settings.schema import Config
from llama405b.spec.probes import MEMORY_IS_FULL, Figure, Probe, ProbeResult, encode_result
from llama405b.training.build import build_host_inputs
from llama405b.training.context import RankContext, cause_of
from llama405b.training.journal import HeartbeatWriter
from llama405b.training.setup import Purpose, build_reader, prepare

WARMUP_STEPS, STEPS = 2, 4  # before those that are timed, and of those at a time
MAX_EMPTY_STEPS = 40  # of those in which none but one has a target
# Steps are timed until their median is known so well, as a share, or they took so long, or so much of the time for all trials.
ENOUGH_SD, ENOUGH_S, ENOUGH_SHARE = 0.02, 5.0, 1 / 48
FULL_SHARE = 0.5  # of the host memory that was free: with less, new processes go on, as these keep what they pinned


def run_trials(rank: Rank, trials: Trials, directory: Path, within_s: float) -> list[Figure]:
    """Run trials until no other is worth its time, there is no time for another, or host memory is full.

    Return how many were run, and whether memory is full: pinned memory is kept until a process ends. ``directory``: of the run.
    """
    gc.set_threshold(700)  # as the trainer does: garbage that holds GPU memory must be freed soon
    deadline, latest_s, n_run = time.monotonic() + within_s, 0.0, 0
    enough_s, free_at_start = min(ENOUGH_S, ENOUGH_SHARE * within_s), free_bytes()
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
        steps = [_try(trials, candidate, n, enough_s, rank, heartbeat) for n in dict.fromkeys(candidate.layers)]
        compared = next((first for point, first in steps if point.layers == trials.compared_layers), ())
        outcome = Trial(tuple(point for point, _ in steps), compared)
        latest_s, n_run = time.monotonic() - start, n_run + 1
        trials = trials.with_result(candidate.label, trials.step_s(outcome.points))
        _report(rank, candidate, outcome)


def _report(rank: Rank, candidate: Candidate, outcome: Trial | None = None) -> None:
    """Print what a candidate gave; None: it begins."""
    if rank.is_rank0:
        fault, text = (outcome.fault, reader.dumps(outcome)) if outcome else ("", "")
        result = ProbeResult(Probe.TRIALS, rank.world_size, 0, fault=fault, trial=candidate.label, outcome=text)
        print(*encode_result(result), sep="\n", flush=True)


def _try(
    trials: Trials, candidate: Candidate, layers: int, enough_s: float, rank: Rank, heartbeat: HeartbeatWriter
) -> tuple[MeasuredStep, tuple[float, ...]]:
    """Measure steps with so many layers, and what the first gave; end the process if that fails."""
    try:
        config = command.parse([*trials.flags, *candidate.flags, f"--model.layers={layers}"]).config
        extend.use(config.training.extend)
        return _measure(config, layers, enough_s, rank, heartbeat)
    except Exception as error:  # noqa: BLE001 - CUDA, NCCL and allocations may raise anything
        cause = cause_of(error, heartbeat)
        print(f"{candidate.label}: {describe_rank_exit(cause)}", file=sys.stderr, flush=True)
        heartbeat.record_failure(cause)
        if rank.world_size == 1:  # a child of what torchrun started; of several ranks, the cause may be another's
            _report(rank, candidate, Trial(fault=describe_rank_exit(cause)))
        os._exit(EXIT_FAILED)


def _median_sd(values: Sequence[float]) -> float:
    """Return the standard deviation of the median of values that are about normal, as a share of it."""
    return math.sqrt(math.pi / 2 / len(values)) * statistics.stdev(values) / statistics.median(values)


def _measure(
    config: Config, layers: int, enough_s: float, rank: Rank, heartbeat: HeartbeatWriter
) -> tuple[MeasuredStep, tuple[float, ...]]:
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
        first, *_ = run_steps(passes, updater, itertools.islice(reader, WARMUP_STEPS), context.rank, max_norm)
        ranks.set_timeout(config.timeouts.step)
        seconds, n_taken, needs_more = [], 0, 1
        while needs_more:
            _, more, work = run_steps(passes, updater, itertools.islice(reader, STEPS), context.rank, max_norm)
            seconds += more[1:] if work else more  # no update of the host is hidden by the first forward
            totals, n_taken = [sum(parts.values()) for parts in seconds], n_taken + STEPS
            is_enough = n_taken >= MAX_EMPTY_STEPS  # where few steps have a target
            if len(totals) > 1:
                is_enough = sum(totals) > enough_s or _median_sd(totals) < ENOUGH_SD
            [needs_more] = collectives.all_reduce_max([int(not is_enough)])
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
    return point, (*(result.loss for result in compared), *(result.grad_norm for result in compared))
