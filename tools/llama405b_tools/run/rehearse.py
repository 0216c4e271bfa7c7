"""``launch --rehearse``: a complete run on the real hosts, with the real layer shapes but only two layers.

First the three rungs of ``bench gpu`` that need nothing: a collective, all collectives checked, copies. Then start, load
(random weights, which each rank makes), two steps, save, a third step, kill -9, resume, the third step again with the same
loss. A failure is reported with its phase and host. Its checkpoints are deleted.
"""

import dataclasses
import time
from collections.abc import Sequence

from llama405b.contract import command
from llama405b.contract.errors import FAILED, GOOD, RunError
from llama405b.contract.phrases import given
from llama405b.contract.plan import REHEARSAL, Plan
from llama405b.contract.rungs import LINKS, line_of
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run.endings import failure_words
from llama405b_tools.run.follow import SLACK_S, Limits, Watch, watch_run
from llama405b_tools.run.judge import Failure
from llama405b_tools.run.ladder import climb_on, end_everywhere
from llama405b_tools.run.launch import launch
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.run.screen import show

LAYERS, SAVE_AT, STEPS = 2, 2, 3
STEP_LIMIT_S, RUNGS_S = 120.0, 60.0
TOLERANCE = 1e-3  # relative, of the repeated step's loss: GPUs may add in a different order


def rehearse(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet) -> int:
    """Rehearse the launch; returns the exit code.

    Raises:
        UserError: The request is wrong, or a host is not fit; nothing was started.
    """
    trial, began = trial_of(request), time.monotonic()
    assert trial.config
    climbing = dataclasses.replace(trial, run=f"{request.run}-rungs{REHEARSAL}")
    rungs = climb_on(climbing, hosts, fleet, LINKS, RUNGS_S, lambda found: show(line_of(found)), on_cpu=request.on_cpu)
    if bad := [result for result in rungs if result.fault]:
        print(f"rehearsal: FAILED after {time.monotonic() - began:.0f} s at its first rungs: {line_of(bad[0])}")
        return FAILED
    saves, load_s = trial.config.checkpoint.cadence.saves, trial.config.timeouts.load
    plan = launch(trial, hosts, fleet)
    fault = ""
    try:
        first = loss_of(fleet, plan, load_s)
        end_everywhere(plan, fleet, hard=True)
        print(f"rehearsal: {STEPS} steps{', saved' if saves else ''}, killed", flush=True)
        if saves:
            plan = launch(dataclasses.replace(trial, resume=str(SAVE_AT)), hosts, fleet)
            second = loss_of(fleet, plan, load_s)
            if abs(second - first) > TOLERANCE * abs(first):
                fault = f"after the resume, step {STEPS} has loss {second:.6f}, but {first:.6f} before the kill; "
                fault += "checkpoints from these hosts cannot be trusted"
    except RunError as error:
        fault = str(error)
    finally:
        end_everywhere(plan, fleet, hard=False, discard=True)
    took = f"{time.monotonic() - began:.0f} s"
    if fault:
        print(f"rehearsal: FAILED after {took}: {fault}; `{fleet.typed('logs', plan.run)}` shows every rank")
        return FAILED
    resumed = f", resumed to the same loss ({first:.4f})" if saves else "; nothing was saved: checkpoint.every is 0"
    print(f"rehearsal: good, {took}: loaded, {STEPS} steps{resumed}; nothing is left running")
    return GOOD


def trial_of(request: LaunchRequest) -> LaunchRequest:
    """Return the launch, cut down to a rehearsal."""
    assert request.config
    config, run = request.config, f"{request.run}{REHEARSAL}"
    settings = {
        "model.layers": min(LAYERS, config.model.layers or LAYERS),
        "model.weights": "random",
        "training.max_steps": 1000,  # it is killed long before that
        "checkpoint.every": SAVE_AT if config.checkpoint.cadence.saves else 0,
        "checkpoint.keep": 1000,  # small models save the next ones before they are killed
    }
    if config.checkpoint.dir:
        settings["checkpoint.dir"] = f"{config.checkpoint.dir.rstrip('/')}/{run}"
    flags = (*request.flags, *(f"--{key}={value}" for key, value in settings.items()))
    return dataclasses.replace(request, run=run, resume="no", config=command.parse(flags).config, flags=flags)


def loss_of(fleet: Fleet, plan: Plan, load_s: float) -> float:
    """Wait for the last step of the rehearsal; returns its loss.

    Raises:
        RunError: The run fails or hangs before that; names phase and host. Or the step is skipped.
    """
    limits = Limits(STEP_LIMIT_S, load_s + SLACK_S)
    watch = watch_run(fleet, plan, limits, lambda watch: watch.newest_step >= STEPS)
    if (loss := watch.loss_of(STEPS)) is not None:
        return loss
    if watch.newest_step > STEPS:
        why = f"step {STEPS} was skipped: all of its targets are masked, so there is no loss to compare"
        raise RunError(f"{why}; remove documents whose prompts are longer than --data.seq_len, or raise it")
    worst = watch.worst()
    if worst is None:
        raise RunError(f"it ended before step {STEPS}")
    raise RunError(f"{worst.host}: {failure_words(worst)} ({_where(worst, watch)})")


def _where(worst: Failure, watch: Watch) -> str:
    """The phase of a failure: from its cause, else from the latest heartbeats of its host's ranks."""
    beats = watch.heard[worst.host].beats if worst.host in watch.heard else ()
    phases = [worst.cause.phase] if worst.cause.phase else sorted({str(beat.phase) for beat in beats})
    return given("in phase {}", "/".join(phases)) or "before its ranks started"
