"""Start a planned run on every host, or on none.

In two steps: every host starts its node runner and answers; only when all have, each is told to keep it. A host that
hears nothing more (the operator's terminal died, the link broke) ends what it started by itself.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from llama405b.contract.errors import RunError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.fleet import Fleet, Outcome, Reply
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.hosts.typed import front_door
from llama405b_tools.remote.messages import KEEP
from llama405b_tools.run import jobs
from llama405b_tools.run.preflight import fault_list
from llama405b_tools.run.streams import Dialogue
from llama405b_tools.text.tables import table

START_TIMEOUT_S, STOP_TIMEOUT_S, ROLL_BACK_S = 45.0, 60.0, 20.0


class StartError(RunError):
    """A plan that did not start everywhere; of it something may be left where a host could not be asked."""

    def __init__(self, plan: Plan, words: str) -> None:
        super().__init__(words)
        self.plan = plan


def start(plan: Plan, secrets: Mapping[str, str], fleet: Fleet, *, again: bool = False) -> None:
    """Start the node runner on every host; if one does not start, stop them all.

    ``again``: a restart, which a stop that somebody asked for meanwhile forbids.

    Raises:
        RunError: Names the hosts that did not start, and any on which something may be left.
    """
    record = dataclasses.asdict(plan)
    requests: dict[str, Reply] = {
        node.name: {
            "host": node.name,
            "plan": record,
            "secrets": dict(secrets),
            "ranks": list(range(node.first_rank, node.first_rank + node.slots)),
            "again": again,
        }
        for node in plan.nodes
    }
    starting: dict[str, Dialogue] = {}
    try:
        # the head first, and alone: of two launches at once exactly one gets past it
        head, *others = requests
        outcomes = fleet.each(lambda name: _first_step(fleet, name, requests[name], starting), [head])
        if not faults_of(outcomes):
            outcomes |= fleet.each(lambda name: _first_step(fleet, name, requests[name], starting), others)
        if not faults_of(outcomes):
            outcomes = fleet.each(lambda name: _second_step(starting[name]), requests)
    except BaseException:  # Ctrl-C as well: all or nothing
        print("ending what was started", file=sys.stderr)
        _hang_up(starting)
        stop_this(plan, fleet)
        raise
    _hang_up(starting)
    if faults := faults_of(outcomes):
        raise StartError(plan, _undo(plan, faults, fleet))
    with contextlib.suppress(OSError):  # the hosts have theirs; this one is for the operator to read
        write_json(RunDir.here(plan.run).plan, plan)


def _first_step(fleet: Fleet, name: str, request: Reply, starting: dict[str, Dialogue]) -> Reply:
    starting[name] = Dialogue(fleet.stream(name, "start", request))
    return starting[name].answer(START_TIMEOUT_S)


def _second_step(starting: Dialogue) -> Reply:
    starting.say(KEEP)
    return starting.answer(START_TIMEOUT_S)


def _hang_up(starting: Mapping[str, Dialogue]) -> None:
    opened = list(starting.values())  # after Ctrl-C others may still be added
    for dialogue in opened:
        dialogue.end_input()
    deadline = time.monotonic() + ROLL_BACK_S
    for dialogue in opened:
        dialogue.close(deadline - time.monotonic())


def faults_of(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """What went wrong, by host."""
    return {
        name: str(found) if isinstance(found, HostError) else str(found["error"])
        for name, found in outcomes.items()
        if isinstance(found, HostError) or "error" in found
    }


def _undo(plan: Plan, faults: Mapping[str, str], fleet: Fleet) -> str:
    """End what was started, print what happened on each host, and return the sentence that says it."""
    ends = stop_this(plan, fleet)
    rows, unverified = [], []
    for name, end in ends.items():
        clean = isinstance(end, dict) and not end["left"]
        left = end if isinstance(end, HostError) else end["left"]
        rows.append(
            (name, faults.get(name, "started, then stopped"), "nothing is left" if clean else f"NOT VERIFIED: {left}")
        )
        unverified += [] if clean else [name]
    print(table(("host", "what happened", "now"), rows), flush=True)
    tail = "; nothing is left running"
    if unverified:
        tail = f"; run `{front_door()} stop --run {plan.run}` once {', '.join(unverified)} can be reached"
    return f"{fault_list(faults, len(ends), '')}{tail}"


def slurm_end(*, gone: bool) -> Reply:
    """What became of a node whose job was stopped, as the agent would say it."""
    return {"known": True, "was_alive": True, "swept": 0, "left": [] if gone else ["the job"], "status": None}


def stop_this(plan: Plan, fleet: Fleet) -> dict[str, Outcome]:
    """End this launch's processes everywhere; another launch's of the same name are not touched."""
    if plan.slurm_job:
        gone = jobs.stop(RunDir(Path.cwd() / "runs" / plan.run), plan.slurm_job, fleet.hosts, "", 0.0)
        return {name: slurm_end(gone=gone) for name in fleet.hosts}
    requests = {node.name: {"run": plan.run, "host": node.name, "only": plan.rdzv_id} for node in plan.nodes}
    return fleet.ask_all("stop", requests, STOP_TIMEOUT_S)
