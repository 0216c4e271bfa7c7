"""What follows a run that ended well: the export that was asked for, verified; then the user's command. And what idle machines cost."""

import os
import subprocess
from collections.abc import Callable

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.phrases import given
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.run.call_on import call_on
from llama405b_tools.run.follow import Ending, EndKind
from llama405b_tools.run.request import LaunchRequest

NOT_WELL, LEFT = "as the run did not end well", "as nobody follows the run now"


def after_end(
    request: LaunchRequest, ending: Ending, plan: Plan, fleet: Fleet, say: Callable[[str], object]
) -> tuple[str, str]:
    """Do what is to follow a good end; returns why it failed, and what is to be said of what was not done, each or ''."""
    if ending.kind is EndKind.LEFT:
        return "", _left_out(request, LEFT)
    if ending.kind is not EndKind.WELL:
        return "", not_well_words(request, plan)
    fault = _follow_up(request, plan, fleet, say)
    return fault, "" if fault or request.when_done else _cost(request, plan)


def not_well_words(request: LaunchRequest, plan: Plan) -> str:
    """Say what does not follow a run that did not end well, and what its machines cost."""
    return "; ".join(filter(None, [_left_out(request, NOT_WELL), _cost(request, plan)]))


def _follow_up(request: LaunchRequest, plan: Plan, fleet: Fleet, say: Callable[[str], object]) -> str:
    """Export the last checkpoint on the host of rank 0, and verify it; then run the command. Returns why one failed, or ''."""
    head = plan.nodes[0].name
    if request.export:
        say(f"exporting the last checkpoint to {request.export}")
        try:
            call_on(fleet, head, ["export", plan.run, request.export, "--verify"], say, plan.setup)
        except (RunError, UserError) as error:
            not_run = "--when-done did not run" if request.when_done else ""
            return "; ".join(filter(None, [f"--export failed: {error}", not_run, _cost(request, plan)]))
        if request.settings.tracking.log_model:
            try:
                call_on(fleet, head, ["track", plan.run, "--model", request.export], say, plan.setup)
            except (RunError, UserError) as error:  # the model is there
                again = f"llama405b track {plan.run} --model {request.export}"
                say(f"the model was not sent to W&B ({error}); once {head} has a key, type there: {again}")
    if request.when_done:
        say(f"running {request.when_done}")
        env = os.environ | {"LLAMA405B_RUN": plan.run}
        done = subprocess.run(["/bin/sh", "-c", request.when_done], env=env, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            return f"--when-done failed (exit code {done.returncode}){given('; {}', _cost(request, plan))}"
    return ""


def _left_out(request: LaunchRequest, why: str) -> str:
    """Say what was not done, and why; "" if nothing was asked for."""
    asked = [flag for flag, value in (("--export", request.export), ("--when-done", request.when_done)) if value]
    return given("{} did not run, " + why, " and ".join(asked))


def _cost(request: LaunchRequest, plan: Plan) -> str:
    """Say what the machines of a run cost that has ended; "" without a price."""
    if not request.price:
        return ""
    return f"its machines cost {request.price * plan.world:,.2f} an hour until they are given back ({plan.world} x {request.price:g})"
