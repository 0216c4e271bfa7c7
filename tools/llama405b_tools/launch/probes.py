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
from llama405b.contract.errors import FAILED, GOOD, RunError, UserError, given
from llama405b.contract.paths import RunDir
from llama405b.contract.records import Metrics
from llama405b.predict.calibration import Alone, Calibration, Point, measured_layers
from llama405b.predict.hardware import Gpu
from llama405b.predict.run_shape import RunShape
from llama405b.settings import command
from llama405b.settings.config import on_ranks
from llama405b.spec.plan import REHEARSAL, Plan
from llama405b.spec.probes import LINKS, Probe, ProbeResult, decode, line_of, suits
from llama405b_tools.agent.messages import ANSWER_S, CUT, PartsReply, PartsRequest, StopReply, StopRequest
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, Stream, replies
from llama405b_tools.launch.request import LaunchRequest
from llama405b_tools.launch.start import check_and_plan, launch
from llama405b_tools.run.follow import Limits, RunMonitor, watch_run
from llama405b_tools.run.judge import Failure, failure_words, first_step, not_stopped
from llama405b_tools.run.query import STATUS_TIMEOUT_S, ask_hosts, known_of, progress
from llama405b_tools.run.screen import show

SLACK_S = 120.0  # to start, and for the probe that is running when the time is over
Say = Callable[[ProbeResult], object]


def run_probes(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    probes: Sequence[Probe],
    within_s: float,
    say: Say = lambda _: None,
    *,
    options: Sequence[str] = (),
) -> list[ProbeResult]:
    """Run probes on all ranks of these hosts; ``say`` gets each result as it comes. Nothing is left running.

    ``options``: more options of the program. If a result that so many ranks can give is missing, the last result is a failure.

    Raises:
        UserError: The launch was refused.
        RunError: A host is not fit or did not start, or something is left running.
    """
    device = "cpu" if request.on_cpu else "auto"
    words = ["--probes", ",".join(probes), "--within", f"{within_s:.0f}", "--device", device, *options]
    program = ("-m", "llama405b.bench", *words)
    began, screen = time.monotonic(), sys.stdout
    trial = dataclasses.replace(request, config=None, flags=(), program=program, hides_gpus=request.on_cpu, restart=0)
    plan = launch(trial, hosts, fleet, say=lambda _: None)
    expected = [probe for probe in probes if suits(probe, plan.world)]
    results: list[ProbeResult] = []

    def tell(watch: RunMonitor) -> bool:
        for result in decode(watch.said):
            if result.probe not in [known.probe for known in results]:
                results.append(result)
                with contextlib.redirect_stdout(screen):
                    say(result)
        return len(results) == len(expected) or time.monotonic() - began > within_s + SLACK_S

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # but for what ``say`` prints
            watch = watch_run(fleet, plan, until=tell)
        tell(watch)
    finally:
        stop_everywhere(plan, fleet)
    if len(results) < len(expected) and not any(result.fault for result in results):
        worst, took_s = watch.worst(), time.monotonic() - began
        fault, where = (failure_words(worst), worst.host) if worst else ("the run ended without a result", "")
        lost = expected[len(results)]
        results.append(ProbeResult(lost, plan.world, len(plan.nodes), seconds=took_s, fault=fault, failed_on=where))
        say(results[-1])
    return results


def stop_everywhere(plan: Plan, fleet: Fleet, *, hard: bool = False, discard: bool = False) -> None:
    """Stop a trial run on every host, whatever its attempt; with ``hard``, as a crash would."""
    requests = {node.name: StopRequest(plan.run, node.name, hard=hard, discard=discard) for node in plan.nodes}
    for name, why in not_stopped(fleet.ask_all("stop", requests, StopReply, ANSWER_S)).items():
        raise RunError(f"{name}: {why}; `{fleet.command_to_type('stop', plan.run)}` ends what is left")


LAYERS, SAVE_AT, STEPS = 2, 2, 3
MOST_STEPS = 30  # small models take some before they are killed; so does a host that cannot see that nobody watches
KEEP = 2  # checkpoints: the step after the newest may not have been taken before the kill
STEP_LIMIT_S, TESTS_S = 120.0, 60.0
TOLERANCE = 1e-3  # relative, of the repeated step's loss: GPUs may add in a different order


def rehearse(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet) -> int:
    """Rehearse the launch; returns the exit code.

    Raises:
        UserError: The request is wrong, or a host is not fit; nothing was started.
    """
    trial, began = trial_of(request), time.monotonic()
    assert trial.config
    check_and_plan(trial, hosts, fleet, again=False)  # the tests take a minute, and know nothing of the settings
    tests = dataclasses.replace(trial, run=f"{request.run}-tests{REHEARSAL}")
    results = run_probes(tests, hosts, fleet, LINKS, TESTS_S, lambda result: show(line_of(result)))
    if bad := [result for result in results if result.fault]:
        print(f"rehearsal: FAILED after {time.monotonic() - began:.0f} s at its first tests: {line_of(bad[0])}")
        return FAILED
    saves, load_s = trial.config.checkpoint.cadence.saves, trial.config.timeouts.load
    plan = launch(trial, hosts, fleet)
    fault, tethers = "", Tethers(plan, fleet)
    try:
        tethers.tie()
        losses = losses_at(STEPS, fleet, plan, load_s)
        stop_everywhere(plan, fleet, hard=True)
        print(f"rehearsal: {STEPS} steps{', saved' if saves else ''}, killed", flush=True)
        if saves:
            # The save after that step may have removed the checkpoint that an earlier one began from.
            losses |= last_loss(fleet, plan)
            step = step_to_repeat(saved_steps(fleet, plan.run), losses)
            plan = launch(dataclasses.replace(trial, resume=str(step - 1)), hosts, fleet)
            again, before = losses_at(step, fleet, plan, load_s)[step], losses[step]
            if abs(again - before) > TOLERANCE * abs(before):
                fault = f"after the resume, step {step} has loss {again:.6f}, but {before:.6f} before the kill; "
                fault += "checkpoints from these hosts cannot be trusted"
    except RunError as error:
        fault = str(error)
    finally:
        stop_everywhere(plan, fleet, hard=False, discard=True)
        tethers.cut()
    took = f"{time.monotonic() - began:.0f} s"
    if fault:
        print(f"rehearsal: FAILED after {took}: {fault}; `{fleet.command_to_type('logs', plan.run)}` shows every rank")
        return FAILED
    resumed = f", resumed to the same loss ({before:.4f})" if saves else "; nothing was saved: checkpoint.every is 0"
    print(f"rehearsal: passed, {took}: loaded, {STEPS} steps{resumed}; nothing is left running")
    return GOOD


def trial_of(request: LaunchRequest) -> LaunchRequest:
    """Return the launch, cut down to a rehearsal."""
    assert request.config
    config, run = request.config, f"{request.run}{REHEARSAL}"
    if config.parallel.of_strategy.chosen:
        raise UserError(
            f"--rehearse: with its few layers --parallel.strategy {config.parallel.strategy} would choose another mesh; name one "
            "(`plan HOSTS --search` finds it)"
        )
    layers = max(LAYERS, config.parallel.pp * config.parallel.chunks)
    settings = {
        "model.layers": min(layers, config.model.layers or layers),
        "model.weights": "random",
        "adapter.path": "",  # which is of all layers
        "training.max_steps": MOST_STEPS,
        "checkpoint.every": SAVE_AT if config.checkpoint.cadence.saves else 0,
        "checkpoint.keep": KEEP,
        "checkpoint.after_save": "",
        "checkpoint.delete_unsent": False,
        "evaluation.max_sequences": 1,
    }
    if config.checkpoint.dir:
        settings["checkpoint.dir"] = f"{config.checkpoint.dir.rstrip('/')}/{run}"
    flags = (*request.flags, *(f"--{key}={value}" for key, value in settings.items()))
    return dataclasses.replace(request, run=run, resume="no", config=command.parse(flags).config, flags=flags)


def losses_at(step: int, fleet: Fleet, plan: Plan, load_s: float) -> dict[int, float]:
    """Wait for a step of the rehearsal; return the losses of all steps reported until then."""
    limits = Limits(STEP_LIMIT_S, first_step(load_s).hang_s)
    watch = watch_run(fleet, plan, limits, lambda watch: watch.newest_step >= step)
    losses = {each.step: each.loss for each in watch.metrics if each.attempt == plan.attempt}
    if step in losses:
        return losses
    if watch.newest_step > step:
        why = f"step {step} was skipped: all of its targets are masked, so there is no loss to compare"
        raise RunError(f"{why}; remove documents whose prompts are longer than --data.seq_len, or raise it")
    worst = watch.worst()
    if worst is None:
        raise RunError(f"the run ended before step {step}")
    raise RunError(f"{worst.host}: {failure_words(worst)} ({_where(worst, watch)})")


def last_loss(fleet: Fleet, plan: Plan) -> dict[int, float]:
    """Return the last step's loss by its step; {} if no host knows one."""
    _, last = progress(known_of(ask_hosts(fleet, plan.run)[1]).values())
    return {last.step: last.loss} if isinstance(last, Metrics) and last.attempt == plan.attempt else {}


def saved_steps(fleet: Fleet, run: str) -> list[int]:
    """Return the saved steps, newest first; a save that is due during another one is put off."""
    request = dict.fromkeys(fleet.hosts, PartsRequest(run))
    told = replies(fleet.ask_all("parts", request, PartsReply, STATUS_TIMEOUT_S)).values()
    return sorted({part.step for reply in told for part in reply.parts}, reverse=True)


def step_to_repeat(saved: Sequence[int], losses: Mapping[int, float]) -> int:
    """Return the newest step that followed a saved checkpoint and has a known loss."""
    if not saved:
        raise RunError("the run saved no checkpoint that can be resumed")
    for step in (each + 1 for each in saved):
        if step in losses:
            return step
    raise RunError(f"no step was reported after the saved step {saved[0]}, so there is no loss to compare")


class Tethers:
    """Leases on the hosts: every host ends the rehearsal by itself once this process is gone."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self.plan, self.fleet = plan, fleet
        self.streams: list[Stream] = []

    def tie(self) -> None:
        """Open a lease on every host."""
        for name, found in self.fleet.each(self._tie, [node.name for node in self.plan.nodes]).items():
            if isinstance(found, HostError):
                raise RunError(f"{name}: {found}")

    def _tie(self, name: str) -> None:
        self.streams.append(self.fleet.stream(name, "tether", StopRequest(self.plan.run, name, discard=True)))

    def cut(self) -> None:
        """Close the leases: the rehearsal was ended from here."""
        for stream in self.streams:
            with contextlib.suppress(HostError):
                stream.send(CUT)
            stream.close()


def _where(worst: Failure, watch: RunMonitor) -> str:
    """Return the phase of a failure: its cause's, else that of its host's latest heartbeats."""
    beats = watch.heard[worst.host].beats if worst.host in watch.heard else ()
    phases = [worst.cause.phase] if worst.cause.phase else sorted({str(beat.phase) for beat in beats})
    return given("in phase {}", "/".join(phases)) or "before its ranks started"


WARM, MEASURED_STEPS = 3, 15  # steps before those that are timed, and all
RATES_S = 120.0


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
    """Run steps with so many layers (0: all) and batch sizes (0: as planned); return their medians."""
    settings: dict[str, object] = {"model.layers": layers}
    if micro_batch:
        settings |= {"training.micro_batch_size": micro_batch, "training.global_batch_size": global_batch}
    trial = _trial_of(request, f"{layers or 'all'}-{micro_batch}" if micro_batch else f"{layers or 'all'}", settings)
    assert trial.config
    plan = launch(trial, hosts, fleet, say=lambda _: None)
    limits = Limits(STEP_LIMIT_S, first_step(trial.config.timeouts.load).hang_s)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            watch = watch_run(fleet, plan, limits, lambda watch: watch.newest_step >= MEASURED_STEPS)
    finally:
        stop_everywhere(plan, fleet)
    if watch.newest_step < MEASURED_STEPS:
        worst = watch.worst()
        why = f"{worst.host}: {failure_words(worst)}" if worst else f"the run ended before step {MEASURED_STEPS}"
        raise RunError(
            f"with {layers or 'all'} layers, {why}; `{fleet.command_to_type('logs', plan.run)}` shows every rank"
        )
    training = on_ranks(trial.config, plan.axes(trial.config.parallel)).training
    steps = [each for each in watch.metrics if each.step > WARM]
    return _median(layers, training.micro_batch_size, training.global_batch_size, steps)


def alone(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, load: RunShape) -> Alone:
    """Measure the rate of each part of a step, on all ranks at once."""
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
