"""Short runs on the real hosts: probes, ``launch --rehearse`` and ``plan HOSTS --calibrate``.

Probes (``llama405b.bench``) are launched like any run; each result is reported as it comes.

A rehearsal is a complete run on the real hosts, with the real layer shapes but only two layers. First the three tests of ``bench`` that
need nothing: a collective, all collectives checked, copies. Then start, load (random weights, made by each rank), two steps, save, a
third step, kill -9, resume, and the step after the checkpoint again, with the same loss. A failure is reported with its phase and host.
The checkpoints are deleted. Every host ends its part by itself once this process is gone.

A calibration times a planned run's own steps on its hosts, with random weights and few of its layers, and measures rates.
"""

import contextlib
import dataclasses
import io
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, RunError, UserError, fmt_if
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics
from llama405b.predict.calibration import Calibration, MeasuredStep, StandaloneRates, layers_to_measure
from llama405b.predict.hardware import Gpu
from llama405b.predict.run_shape import PredictedRun
from llama405b.settings import command
from llama405b.settings.config import with_global_batch
from llama405b.spec.plan import REHEARSAL, Plan
from llama405b.spec.probes import (
    REHEARSAL_PROBES,
    Probe,
    ProbeResult,
    decode_results,
    format_result,
    supports_world_size,
)
from llama405b_tools.agent import describe, starting
from llama405b_tools.agent.messages import RELEASE
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, Stream, replies
from llama405b_tools.launch.request import LaunchRequest
from llama405b_tools.launch.start import check_and_plan, launch
from llama405b_tools.run.backends import stop_hosts
from llama405b_tools.run.follow import RunMonitor, watch_run
from llama405b_tools.run.hang import Pace
from llama405b_tools.run.judge import Failure, failure_words, unstopped_hosts
from llama405b_tools.run.query import STATUS_TIMEOUT_S, ask_hosts, run_progress
from llama405b_tools.run.screen import show

SLACK_S = 120.0  # to start, and for the probe that is running when the time is over
OnResult = Callable[[ProbeResult], object]


def run_probes(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    probes: Sequence[Probe],
    within_s: float,
    on_result: OnResult = lambda _: None,
    *,
    options: Sequence[str] = (),
) -> list[ProbeResult]:
    """Run probes on all ranks of these hosts; ``on_result`` gets each result as it comes. Nothing is left running.

    ``options``: more options of the program. If a result that so many ranks can give is missing, the last result is a failure.

    Raises:
        UserError: The launch was refused.
        RunError: A host is not fit or did not start, or something is left running.
    """
    device = "cpu" if request.on_cpu else "auto"
    arguments = ["--probes", ",".join(probes), "--time-limit", f"{within_s:.0f}", "--device", device, *options]
    program = ("-m", "llama405b.bench", *arguments)
    start_s, screen = time.monotonic(), sys.stdout
    trial = dataclasses.replace(request, config=None, flags=(), program=program, hides_gpus=request.on_cpu, restart=0)
    plan = launch(trial, hosts, fleet, on_line=lambda _: None)
    expected = [probe for probe in probes if supports_world_size(probe, plan.world_size)]
    results: list[ProbeResult] = []

    def collect_results(monitor: RunMonitor) -> bool:
        for result in decode_results(monitor.output_lines):
            if result.probe not in [previous.probe for previous in results]:
                results.append(result)
                with contextlib.redirect_stdout(screen):
                    on_result(result)
        return len(results) == len(expected) or time.monotonic() - start_s > within_s + SLACK_S

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # but for what ``say`` prints
            monitor = watch_run(fleet, plan, until=collect_results)
        collect_results(monitor)
    finally:
        stop_everywhere(plan, fleet)
    if len(results) < len(expected) and not any(result.fault for result in results):
        worst, elapsed_s = monitor.worst_failure(), time.monotonic() - start_s
        fault, failed_host = (failure_words(worst), worst.host) if worst else ("the run ended without a result", "")
        missing_probe = expected[len(results)]
        results.append(
            ProbeResult(
                missing_probe, plan.world_size, len(plan.nodes), seconds=elapsed_s, fault=fault, failed_on=failed_host
            )
        )
        on_result(results[-1])
    return results


def stop_everywhere(plan: Plan, fleet: Fleet, *, hard: bool = False, discard: bool = False) -> None:
    """Stop a trial run on every host, whatever its attempt; with ``hard``, as a crash would."""
    outcomes = stop_hosts(fleet, plan.run, [node.name for node in plan.nodes], hard=hard, discard=discard)
    for name, why in unstopped_hosts(outcomes).items():
        raise RunError(f"{name}: {why}; `{fleet.command_to_type('stop', plan.run)}` ends what is left")


LAYERS, SAVE_EVERY, STEPS = 2, 2, 3
MAX_STEPS = 30  # small models take some before they are killed; so does a host that cannot see that nobody watches
KEPT_CHECKPOINTS = 2  # checkpoints: the step after the newest may not have been taken before the kill
STEP_LIMIT_S, TESTS_S = 120.0, 60.0
TOLERANCE = 1e-3  # relative, of the repeated step's loss: GPUs may add in a different order


def rehearse(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet) -> int:
    """Rehearse the launch; returns the exit code.

    Raises:
        UserError: The request is wrong, or a host is not fit; nothing was started.
    """
    trial, start_s = rehearsal_request(request), time.monotonic()
    assert trial.config
    check_and_plan(trial, hosts, fleet, is_restart=False)  # the tests take a minute, and know nothing of the settings
    tests = dataclasses.replace(trial, run=f"{request.run}-tests{REHEARSAL}")
    results = run_probes(tests, hosts, fleet, REHEARSAL_PROBES, TESTS_S, lambda result: show(format_result(result)))
    if failed_tests := [result for result in results if result.fault]:
        print(
            f"rehearsal: FAILED after {time.monotonic() - start_s:.0f} s at its first tests: {format_result(failed_tests[0])}"
        )
        return EXIT_FAILED
    saves, load_s = trial.config.checkpoint.cadence.is_enabled, trial.config.timeouts.load
    plan = launch(trial, hosts, fleet)
    fault, leases = "", Leases(plan, fleet)
    try:
        leases.acquire()
        losses = wait_for_losses(STEPS, fleet, plan, load_s)
        stop_everywhere(plan, fleet, hard=True)
        print(f"rehearsal: {STEPS} steps{', saved' if saves else ''}, killed", flush=True)
        if saves:
            # The save after that step may have removed the checkpoint that an earlier one began from.
            losses |= last_loss(fleet, plan)
            step = step_to_repeat(saved_steps(fleet, plan.run), losses)
            plan = launch(dataclasses.replace(trial, resume=str(step - 1)), hosts, fleet)
            repeated_loss, first_loss = wait_for_losses(step, fleet, plan, load_s)[step], losses[step]
            if abs(repeated_loss - first_loss) > TOLERANCE * abs(first_loss):
                fault = f"after the resume, step {step} has loss {repeated_loss:.6f}, but {first_loss:.6f} before the kill; "
                fault += "checkpoints from these hosts cannot be trusted"
    except RunError as error:
        fault = str(error)
    finally:
        stop_everywhere(plan, fleet, hard=False, discard=True)
        leases.release()
    elapsed = f"{time.monotonic() - start_s:.0f} s"
    if fault:
        print(
            f"rehearsal: FAILED after {elapsed}: {fault}; `{fleet.command_to_type('logs', plan.run)}` shows every rank"
        )
        return EXIT_FAILED
    resume_words = (
        f", resumed to the same loss ({first_loss:.4f})" if saves else "; nothing was saved: checkpoint.every is 0"
    )
    print(f"rehearsal: passed, {elapsed}: loaded, {STEPS} steps{resume_words}; nothing is left running")
    return EXIT_OK


def rehearsal_request(request: LaunchRequest) -> LaunchRequest:
    """Return the launch, cut down to a rehearsal."""
    assert request.config
    config, run = request.config, f"{request.run}{REHEARSAL}"
    if config.parallel.strategy_spec.is_auto:
        raise UserError(
            f"--rehearse: with its few layers --parallel.strategy {config.parallel.strategy} would choose another mesh; name one "
            "(`plan HOSTS --search` finds it)"
        )
    layers = max(LAYERS, config.parallel.pp * config.parallel.virtual_stages)
    settings = {
        "model.layers": min(layers, config.model.layers or layers),
        "model.weights": "random",
        "adapter.path": "",  # which is of all layers
        "training.max_steps": MAX_STEPS,
        "checkpoint.every": SAVE_EVERY if config.checkpoint.cadence.is_enabled else 0,
        "checkpoint.keep": KEPT_CHECKPOINTS,
        "checkpoint.after_save": "",
        "checkpoint.delete_unsent": False,
        "evaluation.max_sequences": 1,
    }
    if config.checkpoint.dir:
        settings["checkpoint.dir"] = f"{config.checkpoint.dir.rstrip('/')}/{run}"
    flags = (*request.flags, *(f"--{key}={value}" for key, value in settings.items()))
    return dataclasses.replace(request, run=run, resume="no", config=command.parse(flags).config, flags=flags)


def wait_for_losses(step: int, fleet: Fleet, plan: Plan, load_s: float) -> dict[int, float]:
    """Wait for a step of the rehearsal; return the losses of all steps reported until then."""
    pace = Pace(load_s=load_s, min_hang_s=STEP_LIMIT_S)
    monitor = watch_run(fleet, plan, pace, lambda monitor: monitor.newest_step >= step)
    losses = {metrics.step: metrics.loss for metrics in monitor.metrics if metrics.attempt == plan.attempt}
    if step in losses:
        return losses
    if monitor.newest_step > step:
        why = f"step {step} was skipped: all of its targets are masked, so there is no loss to compare"
        raise RunError(f"{why}; remove documents whose prompts are longer than --data.seq_len, or raise it")
    worst = monitor.worst_failure()
    if worst is None:
        raise RunError(f"the run ended before step {step}")
    raise RunError(f"{worst.host}: {failure_words(worst)} ({_failure_phase(worst, monitor)})")


def last_loss(fleet: Fleet, plan: Plan) -> dict[int, float]:
    """Return the last step's loss by its step; {} if no host knows one."""
    _, latest = run_progress(ask_hosts(fleet, plan.run).host_runs.values())
    return {latest.step: latest.loss} if isinstance(latest, Metrics) and latest.attempt == plan.attempt else {}


def saved_steps(fleet: Fleet, run: str) -> list[int]:
    """Return the saved steps, newest first; a save that is due during another one is put off."""
    answers = replies(fleet.call_all(describe.parts, STATUS_TIMEOUT_S, run)).values()
    return sorted({part.step for reply in answers for part in reply.parts}, reverse=True)


def step_to_repeat(saved: Sequence[int], losses: Mapping[int, float]) -> int:
    """Return the newest step that followed a saved checkpoint and has a known loss."""
    if not saved:
        raise RunError("the run saved no checkpoint that can be resumed")
    for step in (saved_step + 1 for saved_step in saved):
        if step in losses:
            return step
    raise RunError(f"no step was reported after the saved step {saved[0]}, so there is no loss to compare")


class Leases:
    """Leases on the hosts: every host ends the rehearsal by itself once this process is gone."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self.plan, self.fleet = plan, fleet
        self.streams: list[Stream] = []

    def acquire(self) -> None:
        """Open a lease on every host."""
        for name, outcome in self.fleet.call_each(self._acquire, [node.name for node in self.plan.nodes]).items():
            if isinstance(outcome, HostError):
                raise RunError(f"{name}: {outcome}")

    def _acquire(self, name: str) -> None:
        self.streams.append(self.fleet.stream(name, starting.tether, self.plan.run, name))

    def release(self) -> None:
        """Close the leases: the rehearsal was ended from here."""
        for stream in self.streams:
            with contextlib.suppress(HostError):
                stream.send(RELEASE)
            stream.close()


def _failure_phase(worst: Failure, monitor: RunMonitor) -> str:
    """Return the phase of a failure: its cause's, else that of its host's latest heartbeats."""
    beats = monitor.heartbeats[worst.host].beats if worst.host in monitor.heartbeats else ()
    phases = [worst.cause.phase] if worst.cause.phase else sorted({str(beat.phase) for beat in beats})
    return fmt_if("in phase {}", "/".join(phases)) or "before its ranks started"


WARMUP_STEPS, MEASURED_STEPS = 3, 15  # steps before those that are timed, and all
RATES_S = 120.0


def calibrate(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, predicted_run: PredictedRun, gpu: Gpu, created: str
) -> Calibration:
    """Measure the run's steps with few of its layers, and the hosts' rates; nothing is left running. ``predicted_run``: the run as planned.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or it fails there.
    """
    min_layers, max_layers = layers_to_measure(predicted_run.llama.layers)
    small = measure_steps(request, hosts, fleet, min_layers)
    large = measure_steps(request, hosts, fleet, max_layers) if max_layers > min_layers else small
    micro_batch = predicted_run.micro_batch // 2 or 2
    try:
        other_batch = measure_steps(request, hosts, fleet, large.layers, micro_batch, micro_batch * predicted_run.world)
    except RunError:  # it may not fit
        other_batch = None
    rates = measure_standalone_rates(request, hosts, fleet, predicted_run)
    return Calibration(
        predicted_run, small, large, other_batch, rates, tuple(host.name for host in hosts), gpu.name, created
    )


def measure_steps(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    layers: int,
    micro_batch: int = 0,
    global_batch: int = 0,
) -> MeasuredStep:
    """Run steps with so many layers (0: all) and batch sizes (0: as planned); return their medians."""
    settings: dict[str, object] = {"model.layers": layers}
    if micro_batch:
        settings |= {"training.micro_batch_size": micro_batch, "training.global_batch_size": global_batch}
    trial = _calibration_request(
        request, f"{layers or 'all'}-{micro_batch}" if micro_batch else f"{layers or 'all'}", settings
    )
    assert trial.config
    plan = launch(trial, hosts, fleet, on_line=lambda _: None)
    pace = Pace(load_s=trial.config.timeouts.load, min_hang_s=STEP_LIMIT_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            monitor = watch_run(fleet, plan, pace, lambda monitor: monitor.newest_step >= MEASURED_STEPS)
    finally:
        stop_everywhere(plan, fleet)
    if monitor.newest_step < MEASURED_STEPS:
        worst = monitor.worst_failure()
        why = f"{worst.host}: {failure_words(worst)}" if worst else f"the run ended before step {MEASURED_STEPS}"
        raise RunError(
            f"with {layers or 'all'} layers, {why}; `{fleet.command_to_type('logs', plan.run)}` shows every rank"
        )
    training = with_global_batch(trial.config, plan.axes(trial.config.parallel)).training
    steps = [metrics for metrics in monitor.metrics if metrics.step > WARMUP_STEPS]
    return _median_step(layers, training.micro_batch_size, training.global_batch_size, steps)


def measure_standalone_rates(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, predicted_run: PredictedRun
) -> StandaloneRates:
    """Measure the rate of each part of a step, on all ranks at once."""
    assert request.config
    run = f"{request.run}-rates"
    checkpoints = request.config.checkpoint.dir or str(RunDir(Path("runs", run)).checkpoints)
    options = [
        "--load",
        reader.dumps(predicted_run),
        "--directory",
        checkpoints,
        "--bind",
        request.config.parallel.numa,
    ]
    trial = dataclasses.replace(request, run=run)
    [result] = run_probes(trial, hosts, fleet, [Probe.RATES], RATES_S, options=options)
    if not result.passed:
        raise RunError(
            f"measuring rates, {result.failure_reason}; `{fleet.command_to_type('logs', run)}` shows every rank"
        )
    return StandaloneRates(**{figure.name: figure.value for figure in result.figures})


def _calibration_request(request: LaunchRequest, name: str, settings: Mapping[str, object]) -> LaunchRequest:
    settings = {
        **settings,
        "model.weights": "random",
        "training.max_steps": MEASURED_STEPS,
        "checkpoint.every": 0,
        "checkpoint.dir": "",
        "checkpoint.keep_best": "false",
        "evaluation.every": "0",
        "evaluation.paths": "[]",
    }
    flags = (*request.flags, *(f"--{key}={value}" for key, value in settings.items()))
    run = f"{request.run}-{name}"
    return dataclasses.replace(
        request, run=run, config=command.parse(flags).config, flags=flags, force_fit=True, restart=0
    )


def _median_step(layers: int, micro_batch: int, global_batch: int, steps: Sequence[Metrics]) -> MeasuredStep:
    def median_of(name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in steps))

    exposed_s = statistics.median(
        max(0.0, (step.exposed_s or 0.0) - step.optimizer_s) for step in steps
    )  # beside the norm
    return MeasuredStep(
        layers, micro_batch, global_batch, median_of("data_s"), median_of("forward_s"), median_of("backward_s"), median_of("optimizer_s"),
        max(step.peak_bytes for step in steps), exposed_s,
    )  # fmt: skip
