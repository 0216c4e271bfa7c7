"""Short runs on the real hosts: probes, ``launch --rehearse`` and ``plan HOSTS --calibrate``.

Probes (``llama405b.bench``) are launched like any run; each result is reported as it comes.

A rehearsal is a complete run on the real hosts, with the real layer shapes but only two layers. First the three tests of ``bench`` that
need nothing: a collective, all collectives checked, copies. Then start, load (random weights, made by each rank), two steps, save, a
third step, kill -9, resume, and the step after the checkpoint again, with the same loss. A failure is reported with its phase and host.
The checkpoints are deleted. Every host ends its part by itself once this process is gone.

Trials time steps of runs on the real hosts, with random weights and few of their layers: a calibration those of a planned run, ``tune``
those with other settings as well. Both measure rates before that, and hosts end them by themselves, too.
"""

import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.errors import EXIT_FAILED, EXIT_OK, RunError, UserError, fmt_if
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics
from llama405b.predict.calibration import Calibration, StandaloneRates, layers_to_measure
from llama405b.predict.hardware import Gpu
from llama405b.predict.run_shape import PredictedRun
from llama405b.predict.tuning import Candidate, Trial, Trials
from llama405b.settings import command
from llama405b.spec.plan import REHEARSAL, Plan
from llama405b.spec.probes import (
    MEMORY_IS_FULL,
    REHEARSAL_PROBES,
    Figure,
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
    slack_s: float = SLACK_S,
) -> list[ProbeResult]:
    """Run probes on all ranks of these hosts; ``on_result`` gets each result as it comes. Nothing is left running.

    ``options``: more options of the program; ``slack_s``: how much longer than ``within_s`` a probe may take. If a result that so many
    ranks can give is missing, the last result is a failure.

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

    def count_whole() -> int:
        return sum(not result.trial for result in results)

    def collect_results(monitor: RunMonitor) -> bool:
        for result in decode_results(monitor.output_lines):
            key = _key(result)
            if key not in map(_key, results):
                results.append(result)
                with contextlib.redirect_stdout(screen):
                    on_result(result)
        return count_whole() == len(expected) or time.monotonic() - start_s > within_s + slack_s

    leases = Leases(plan, fleet)
    with contextlib.ExitStack() as ending:
        ending.callback(leases.release)
        ending.callback(stop_everywhere, plan, fleet)
        if Probe.TRIALS in probes:  # all others end soon by themselves
            leases.acquire()
        with contextlib.redirect_stdout(io.StringIO()):  # but for what ``say`` prints
            monitor = watch_run(fleet, plan, until=collect_results)
        collect_results(monitor)
    if count_whole() < len(expected) and not any(result.fault for result in results):
        results.append(_missing_result(expected[count_whole()], plan, monitor, time.monotonic() - start_s))
        on_result(results[-1])
    return results


def _missing_result(probe: Probe, plan: Plan, monitor: RunMonitor, elapsed_s: float) -> ProbeResult:
    """Return why a result is missing, as a result."""
    worst = monitor.worst_failure()
    fault, host = (failure_words(worst), worst.host) if worst else ("the run ended without a result", "")
    return ProbeResult(probe, plan.world_size, len(plan.nodes), seconds=elapsed_s, fault=fault, failed_on=host)


def _key(result: ProbeResult) -> tuple[Probe, str, bool]:
    return result.probe, result.trial, bool(result.outcome or result.fault)


def stop_everywhere(plan: Plan, fleet: Fleet, *, hard: bool = False, discard: bool = False) -> None:
    """Stop a trial run on every host, whatever its attempt; with ``hard``, as a crash would."""
    outcomes = stop_hosts(fleet, plan.run, [node.name for node in plan.nodes], hard=hard, discard=discard)
    for name, why in unstopped_hosts(outcomes).items():
        raise RunError(f"{name}: {why}; `{fleet.command_to_type('stop', plan.run)}` ends what is left")


LAYERS, SAVE_EVERY, STEPS = 2, 2, 3
MAX_REHEARSAL_STEPS = (
    30  # small models take some before they are killed; so does a host that cannot see that nobody watches
)
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
        "training.max_steps": MAX_REHEARSAL_STEPS,
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
    """Leases on the hosts: every host ends the run by itself once this process is gone."""

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
        """Close the leases: the run was ended from here."""
        for stream in self.streams:
            with contextlib.suppress(HostError):
                stream.send(RELEASE)
            stream.close()


def _failure_phase(worst: Failure, monitor: RunMonitor) -> str:
    """Return the phase of a failure: its cause's, else that of its host's latest heartbeats."""
    beats = monitor.heartbeats[worst.host].beats if worst.host in monitor.heartbeats else ()
    phases = [worst.cause.phase] if worst.cause.phase else sorted({str(beat.phase) for beat in beats})
    return fmt_if("in phase {}", "/".join(phases)) or "before its ranks started"


CALIBRATION_S = 1800.0
TRIAL_SLACK_S = 600.0  # a trial that has begun ends, also if its layers are compiled
AS_SET = "as set"  # the label of the settings as they were asked for


OnTrial = Callable[[str, Trial], object]


def calibrate(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, predicted_run: PredictedRun, gpu: Gpu, created: str
) -> Calibration:
    """Measure the run's steps with few of its layers, and the hosts' rates; nothing is left running. ``predicted_run``: the run as planned.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or it fails there.
    """
    layers = layers_to_measure(predicted_run.llama.layers)
    micro_batch = predicted_run.micro_batch // 2 or 2
    other_batch = (
        f"--training.micro_batch_size={micro_batch}",
        f"--training.global_batch_size={micro_batch * predicted_run.world}",
    )
    candidates = (
        Candidate(AS_SET, (), {}, 0.0, layers),
        Candidate("another micro-batch", other_batch, {}, 0.0, layers[1:]),
    )
    trials = Trials(trial_flags(request), candidates, predicted_run.llama.layers)
    rates, found = run_trials(request, hosts, fleet, trials, CALIBRATION_S, predicted_run)
    asked, other = (found.get(candidate.label, Trial(fault="not enough time")) for candidate in candidates)
    if asked.fault:
        raise RunError(f"with few layers, {asked.fault}")
    few, more = asked.points[0], asked.points[-1]
    other_point = other.points[0] if other.points else None  # it may not fit
    return Calibration(
        predicted_run, few, more, other_point, rates, tuple(host.name for host in hosts), gpu.name, created
    )


def run_trials(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, trials: Trials, within_s: float, rates_of: PredictedRun,
    on_trial: OnTrial = lambda *_: None,
) -> tuple[StandaloneRates, dict[str, Trial]]:  # fmt: skip
    """Measure the hosts' rates, and then steps with the settings of trials; return both, the trials by label.

    All are measured by the same processes while none fails, and while there is memory to pin. ``on_trial`` gets each
    trial and its label as it ends. ``rates_of``: the run whose layers and units the rates are of.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or no process starts there; nothing is left running.
    """
    asked = trials.candidates[0]
    flags = (*trials.flags, *asked.flags, f"--model.layers={min(asked.layers)}")
    first = command.parse(flags).config
    checked = dataclasses.replace(request, config=first, flags=flags, force_fit=True, restart=0)
    check_and_plan(checked, hosts, fleet, is_restart=False)  # the probes know nothing of the settings
    deadline, rounds = time.monotonic() + within_s, TrialRounds(request, hosts, fleet, rates_of, on_trial)
    while trials.next() and time.monotonic() < deadline and not rounds.is_over:
        rounds.run(trials, deadline - time.monotonic())
        steps = {
            label: trials.step_s(trial.points) if trial.points else 0.0 for label, trial in rounds.measured.items()
        }
        trials = dataclasses.replace(trials, seconds=steps)
    return StandaloneRates(**{figure.name: figure.value for figure in rounds.rates}), rounds.measured


class TrialRounds:
    """Starts of the program that runs trials, and what these gave."""

    def __init__(
        self, request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, rates_of: PredictedRun, on_trial: OnTrial
    ) -> None:
        self.request, self.hosts, self.fleet, self.rates_of, self.on_trial = request, hosts, fleet, rates_of, on_trial
        self.found: dict[str, Trial | None] = {}  # by label; None: it has begun
        self.rates: list[Figure] = []
        self.is_over = False

    @property
    def measured(self) -> dict[str, Trial]:
        """The trials that ended."""
        return {label: trial for label, trial in self.found.items() if trial}

    def run(self, trials: Trials, within_s: float) -> None:
        """Start the program once; a trial that fails ends it.

        Raises:
            RunError: Nothing was measured, and nothing can be.
        """
        run = f"{self.request.run}-{len(self.found) + 1}"
        logs, fault = f"`{self.fleet.command_to_type('logs', run)}` shows every rank", ""
        probes = [Probe.TRIALS] if self.rates else [Probe.RATES, Probe.TRIALS]
        try:
            results = run_probes(
                dataclasses.replace(self.request, run=run), self.hosts, self.fleet, probes, within_s, self._take,
                options=self._options(run, trials), slack_s=TRIAL_SLACK_S,
            )  # fmt: skip
            failed = next((each for each in results if not (each.trial or each.passed)), None)
            fault = failed.failure_reason if failed else ""
            is_full = any(figure.name == MEMORY_IS_FULL and figure.value for figure in results[-1].figures)
            self.is_over = not (failed or is_full)
            has_failed_trial = None in self.found.values() or any(each.trial and each.fault for each in results)
            if failed and not (self.rates and has_failed_trial):
                raise RunError(f"measuring {failed.probe}, {fault}; {logs}")
        except RunError as error:
            if not (self.rates and self.measured):
                raise
            show(f"no more trials: {error}")
            self.is_over = True
        for label in [label for label, trial in self.found.items() if trial is None]:
            self.found[label] = failed_trial = Trial(fault=f"{fault or 'its processes ended'}; {logs}")
            self.on_trial(label, failed_trial)

    def _options(self, run: str, trials: Trials) -> list[str]:
        """Return the options of the program."""
        run_dir, settings = RunDir(Path("runs", run)), self.request.settings
        options = {
            "--load": reader.dumps(self.rates_of),
            "--bind": settings.parallel.numa,
            "--directory": settings.checkpoint.dir or str(run_dir.checkpoints),
            "--trials": reader.dumps(trials),
            "--run-dir": str(run_dir.path),
        }
        return [word for option in options.items() for word in option]

    def _take(self, result: ProbeResult) -> None:
        """Take a result as it comes."""
        if result.trial:
            trial = reader.loads(Trial, result.outcome, "a trial") if result.outcome else None
            self.found[result.trial] = trial
            if trial:
                self.on_trial(result.trial, trial)
        elif result.probe is Probe.RATES:
            self.rates = list(result.figures)


def trial_flags(request: LaunchRequest) -> tuple[str, ...]:
    """Return the settings of a launch as flags, with random weights and nothing beside the steps."""
    settings = {
        "model.weights": "random",
        "adapter.path": "",  # which is of all layers
        "parallel.numa": "off",  # the probes bind each rank once, for all trials
        "checkpoint.every": 0,
        "checkpoint.dir": "",
        "checkpoint.keep_best": "false",
        "checkpoint.after_save": "",
        "checkpoint.delete_unsent": "false",
        "evaluation.every": "0",
        "evaluation.paths": "[]",
        "tracking.log_model": "false",
    }
    own = [flag for flag in request.flags if not flag.startswith("--evaluation.prompt")]  # which only add up
    return (*own, *(f"--{key}={value}" for key, value in settings.items()))
