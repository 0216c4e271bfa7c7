"""Climb rungs (``llama405b.commands.ladder``) on hosts: launched like any run, with results as each rung ends."""

import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from llama405b.contract import reader
from llama405b.contract.errors import RunError
from llama405b.contract.plan import Plan
from llama405b.contract.rungs import MANY_RANKS_ONLY, ONE_RANK_ONLY, SIGN, Rung, RungResult
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.remote.messages.stop_request import ANSWER_S, StopReply, StopRequest
from llama405b_tools.run.follow import RunMonitor, watch_run
from llama405b_tools.run.judge import failure_words, not_stopped
from llama405b_tools.run.launch import launch
from llama405b_tools.run.request import LaunchRequest

SLACK_S = 120.0  # to start, and for the rung that is being climbed when the time is over
Say = Callable[[RungResult], object]


def climb_on(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    rungs: Sequence[Rung],
    within_s: float,
    say: Say,
    *,
    on_cpu: bool = False,
) -> list[RungResult]:
    """Climb rungs on all ranks of these hosts; ``say`` hears of each result as it comes. Nothing is left running.

    Raises:
        UserError: The launch was refused.
        RunError: A host is not fit or did not start, or something is left running.
    """
    options = ["--tests", ",".join(rungs), "--within", f"{within_s:.0f}", "--device", "cpu" if on_cpu else "auto"]
    program = ("-m", "llama405b.commands.ladder.program", *options)
    began, screen = time.monotonic(), sys.stdout
    climbing = dataclasses.replace(request, config=None, flags=(), program=program, hides_gpus=on_cpu)
    plan = launch(climbing, hosts, fleet, say=lambda _: None)
    expected = [rung for rung in rungs if rung not in (MANY_RANKS_ONLY if plan.world == 1 else ONE_RANK_ONLY)]
    found: list[RungResult] = []

    def tell(watch: RunMonitor) -> bool:
        for result in results_in(watch.said):
            if result.rung not in [known.rung for known in found]:
                found.append(result)
                with contextlib.redirect_stdout(screen):
                    say(result)
        return len(found) == len(expected) or time.monotonic() - began > within_s + SLACK_S

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # but for what ``say`` prints
            watch = watch_run(fleet, plan, until=tell)
        tell(watch)
    finally:
        stop_everywhere(plan, fleet)
    if len(found) < len(expected) and not any(result.fault for result in found):
        worst = watch.worst()
        fault = f"{worst.host}: {failure_words(worst)}" if worst else "it ended without a result"
        found.append(
            RungResult(expected[len(found)], plan.world, len(plan.nodes), seconds=time.monotonic() - began, fault=fault)
        )
        say(found[-1])
    return found


def results_in(lines: Iterable[str]) -> list[RungResult]:
    """Return the results among the lines that rank 0 printed."""
    return [
        reader.loads(RungResult, line.removeprefix(SIGN), "a test's result") for line in lines if line.startswith(SIGN)
    ]


def stop_everywhere(plan: Plan, fleet: Fleet, *, hard: bool = False, discard: bool = False) -> None:
    """End a trial run on every host, whatever attempt is there; with ``hard``, as a crash would.

    Raises:
        RunError: Something of it is left.
    """
    requests = {node.name: StopRequest(plan.run, node.name, hard=hard, discard=discard) for node in plan.nodes}
    for name, why in not_stopped(fleet.ask_all("stop", requests, StopReply, ANSWER_S)).items():
        raise RunError(f"{name}: {why}; `{fleet.command_to_type('stop', plan.run)}` ends what is left")
