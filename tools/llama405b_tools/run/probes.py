"""Run probes (``llama405b.commands.probes``) on hosts: launched like any run, with results as each ends."""

import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Callable, Sequence

from llama405b.contract.errors import RunError
from llama405b.contract.plan import Plan
from llama405b.contract.probes import Probe, ProbeResult, decode, suits
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.remote.messages.stop_request import ANSWER_S, StopReply, StopRequest
from llama405b_tools.run.follow import RunMonitor, watch_run
from llama405b_tools.run.judge import failure_words, not_stopped
from llama405b_tools.run.launch import launch
from llama405b_tools.run.request import LaunchRequest

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
    """Run probes on all ranks of these hosts; ``say`` hears of each result as it comes. Nothing is left running.

    ``options``: more of the program's. The last result is a failure, if not all that can be had on so many ranks came.

    Raises:
        UserError: The launch was refused.
        RunError: A host is not fit or did not start, or something is left running.
    """
    device = "cpu" if request.on_cpu else "auto"
    words = ["--probes", ",".join(probes), "--within", f"{within_s:.0f}", "--device", device, *options]
    program = ("-m", "llama405b.commands.probes", *words)
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
        fault, where = (failure_words(worst), worst.host) if worst else ("it ended without a result", "")
        lost = expected[len(results)]
        results.append(ProbeResult(lost, plan.world, len(plan.nodes), seconds=took_s, fault=fault, failed_on=where))
        say(results[-1])
    return results


def stop_everywhere(plan: Plan, fleet: Fleet, *, hard: bool = False, discard: bool = False) -> None:
    """End a trial run on every host, whatever attempt is there; with ``hard``, as a crash would."""
    requests = {node.name: StopRequest(plan.run, node.name, hard=hard, discard=discard) for node in plan.nodes}
    for name, why in not_stopped(fleet.ask_all("stop", requests, StopReply, ANSWER_S)).items():
        raise RunError(f"{name}: {why}; `{fleet.command_to_type('stop', plan.run)}` ends what is left")
