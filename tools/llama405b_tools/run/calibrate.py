"""``plan HOSTS --calibrate``: a planned run's own steps, with random weights and few of its layers, timed on its hosts."""

import contextlib
import dataclasses
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from llama405b.capacity.calibration import Calibration, Point, measured_layers
from llama405b.capacity.estimate import Load
from llama405b.contract import command, reader
from llama405b.contract.errors import RunError
from llama405b.contract.files import write_atomic
from llama405b.contract.records import Metrics
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run.endings import failure_words
from llama405b_tools.run.follow import SLACK_S, Limits, watch_run
from llama405b_tools.run.ladder import end_everywhere
from llama405b_tools.run.launch import launch
from llama405b_tools.run.request import LaunchRequest

WARM, STEPS = 3, 15  # steps before those that are timed, and all
STEP_LIMIT_S = 120.0


def calibrate(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, load: Load, made: str) -> Calibration:
    """Measure the run's steps with few of its layers; nothing is left running. ``load``: the run as planned.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or it fails there.
    """
    few, more = (point(request, hosts, fleet, layers) for layers in measured_layers(load.llama.layers))
    return Calibration(load, few, more, made)


def keep(hosts_file: Path, found: Calibration) -> None:
    """Keep it beside the hosts file."""
    write_atomic(_file_of(hosts_file), reader.dumps(found) + "\n")


def kept(hosts_file: Path) -> Calibration | None:
    """Return what was kept there; None: nothing, or of another version."""
    try:
        return reader.loads(Calibration, _file_of(hosts_file).read_text(encoding="utf-8"), "a calibration")
    except (OSError, UnicodeDecodeError, reader.MalformedError):
        return None


def _file_of(hosts_file: Path) -> Path:
    return hosts_file.with_name(f"{hosts_file.name}.calibration.json")


def point(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, layers: int) -> Point:
    """Take steps with so many layers, 0: with all; returns their medians.

    Raises:
        UserError: See ``calibrate``.
        RunError: See ``calibrate``.
    """
    trial = _trial_of(request, layers)
    assert trial.config
    plan = launch(trial, hosts, fleet, say=lambda _: None)
    limits = Limits(STEP_LIMIT_S, trial.config.timeouts.load + SLACK_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            watch = watch_run(fleet, plan, limits, lambda watch: watch.newest_step >= STEPS)
    finally:
        end_everywhere(plan, fleet, discard=True)
    if watch.newest_step < STEPS:
        worst = watch.worst()
        why = f"{worst.host}: {failure_words(worst)}" if worst else f"it ended before step {STEPS}"
        raise RunError(f"with {layers or 'all'} layers, {why}; `{fleet.typed('logs', plan.run)}` shows every rank")
    return _median(layers, [each for each in watch.metrics if each.step > WARM])


def _trial_of(request: LaunchRequest, layers: int) -> LaunchRequest:
    settings = {
        "model.layers": layers,
        "model.weights": "random",
        "training.max_steps": STEPS,
        "checkpoint.every": 0,
    }
    if request.config and request.config.evaluation.every:
        settings["evaluation.every"] = 10 * STEPS  # after the last step alone
    flags = (*request.flags, *(f"--{key}={value}" for key, value in settings.items()))
    run = f"{request.run}-{layers or 'all'}"
    return dataclasses.replace(
        request, run=run, config=command.parse(flags).config, flags=flags, allow_misfit=True, restart=0
    )


def _median(layers: int, steps: Sequence[Metrics]) -> Point:
    def of(name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in steps))

    return Point(
        layers, of("data_s"), of("forward_s"), of("backward_s"), of("optimizer_s"), max(s.peak_bytes for s in steps)
    )
