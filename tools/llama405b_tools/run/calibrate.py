"""``plan HOSTS --calibrate``: a planned run's own steps, with random weights and few of its layers, timed on its hosts; and rates."""

import contextlib
import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.capacity.calibration import Alone, Calibration, Point, measured_layers
from llama405b.capacity.hardware import Gpu
from llama405b.capacity.run_shape import RunShape
from llama405b.contract import command, reader
from llama405b.contract.config import on_ranks
from llama405b.contract.errors import RunError
from llama405b.contract.paths import RunDir
from llama405b.contract.probes import Probe
from llama405b.contract.records import Metrics
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run.follow import Limits, watch_run
from llama405b_tools.run.judge import failure_words, first_step
from llama405b_tools.run.launch import launch
from llama405b_tools.run.probes import run_probes, stop_everywhere
from llama405b_tools.run.request import LaunchRequest

WARM, STEPS = 3, 15  # steps before those that are timed, and all
STEP_LIMIT_S, RATES_S = 120.0, 120.0


def calibrate(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, load: RunShape, gpu: Gpu, made: str
) -> Calibration:
    """Measure the run's steps with few of its layers, and the hosts' rates; nothing is left running. ``load``: the run as planned.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or it fails there.
    """
    fewest, most = measured_layers(load.llama.layers)
    few = point(request, hosts, fleet, fewest)
    more = point(request, hosts, fleet, most) if most > fewest else few
    micro_batch = load.micro_batch // 2 or 2
    try:
        other = point(request, hosts, fleet, more.layers, micro_batch, micro_batch * load.world)
    except RunError:  # it may not fit
        other = None
    rates = alone(request, hosts, fleet, load)
    return Calibration(load, few, more, other, rates, tuple(host.name for host in hosts), gpu.name, made)


def point(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    layers: int,
    micro_batch: int = 0,
    global_batch: int = 0,
) -> Point:
    """Take steps with so many layers, 0: with all, and batches, 0: as planned; returns their medians.

    Raises:
        UserError: See ``calibrate``.
        RunError: See ``calibrate``.
    """
    settings: dict[str, object] = {"model.layers": layers}
    if micro_batch:
        settings |= {"training.micro_batch_size": micro_batch, "training.global_batch_size": global_batch}
    trial = _trial_of(request, f"{layers or 'all'}-{micro_batch}" if micro_batch else f"{layers or 'all'}", settings)
    assert trial.config
    plan = launch(trial, hosts, fleet, say=lambda _: None)
    limits = Limits(STEP_LIMIT_S, first_step(trial.config.timeouts.load).hang_s)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            watch = watch_run(fleet, plan, limits, lambda watch: watch.newest_step >= STEPS)
    finally:
        stop_everywhere(plan, fleet)
    if watch.newest_step < STEPS:
        worst = watch.worst()
        why = f"{worst.host}: {failure_words(worst)}" if worst else f"it ended before step {STEPS}"
        raise RunError(
            f"with {layers or 'all'} layers, {why}; `{fleet.command_to_type('logs', plan.run)}` shows every rank"
        )
    training = on_ranks(trial.config, plan.axes(trial.config.parallel)).training
    steps = [each for each in watch.metrics if each.step > WARM]
    return _median(layers, training.micro_batch_size, training.global_batch_size, steps)


def alone(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, load: RunShape) -> Alone:
    """Measure what every part of a step attains on all ranks at once.

    Raises:
        RunError: See ``calibrate``.
    """
    assert request.config
    run = f"{request.run}-rates"
    checkpoints = request.config.checkpoint.dir or str(RunDir(Path("runs", run)).checkpoints)
    options = ["--load", reader.dumps(load), "--directory", checkpoints, "--bind", request.config.parallel.numa]
    trial = dataclasses.replace(request, run=run)
    [result] = run_probes(trial, hosts, fleet, [Probe.RATES], RATES_S, options=options)
    if not result.good:
        raise RunError(f"measuring rates, {result.why}; `{fleet.command_to_type('logs', run)}` shows every rank")
    return Alone(**{figure.name: figure.value for figure in result.figures})


def _trial_of(request: LaunchRequest, name: str, settings: Mapping[str, object]) -> LaunchRequest:
    settings = {
        **settings,
        "model.weights": "random",
        "training.max_steps": STEPS,
        "checkpoint.every": 0,
        "checkpoint.dir": "",
        "checkpoint.keep_best": "false",
        "evaluation.every": 0,
        "evaluation.paths": "[]",
    }
    flags = (*request.flags, *(f"--{key}={value}" for key, value in settings.items()))
    run = f"{request.run}-{name}"
    return dataclasses.replace(
        request, run=run, config=command.parse(flags).config, flags=flags, allow_misfit=True, restart=0
    )


def _median(layers: int, micro_batch: int, global_batch: int, steps: Sequence[Metrics]) -> Point:
    def of(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in steps))

    waited = statistics.median(
        max(0.0, (each.exposed_s or 0.0) - each.optimizer_s) for each in steps
    )  # beside the norm
    return Point(
        layers, micro_batch, global_batch, of("data_s"), of("forward_s"), of("backward_s"), of("optimizer_s"),
        max(each.peak_bytes for each in steps), waited,
    )  # fmt: skip
