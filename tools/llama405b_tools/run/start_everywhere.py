"""Start a planned run on every host, or on none.

There are two steps: every host starts its node runner and answers; only when all have, each is told to keep it. A host
that receives nothing more (the operator's terminal died, the link broke) ends what it started.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence

from llama405b.contract.causes import words
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Plan
from llama405b.contract.records import Blame, GuardState
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.printed_commands import program_name
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote.messages.start import (
    ANSWER_WITHIN_S,
    KEEP,
    NOT_OURS,
    Kept,
    Started,
    StartFault,
    StartRequest,
)
from llama405b_tools.remote.messages.stop_request import StopReply
from llama405b_tools.run.backends import backend_of_plan
from llama405b_tools.run.host_checks import fault_list
from llama405b_tools.run.judge import not_stopped
from llama405b_tools.run.screen import show
from llama405b_tools.text.figures import format_table

ROLL_BACK_S = 20.0
Faults = Mapping[str, Started | HostError]  # hosts that did not start, and why


class StartError(RunError):
    """A plan did not start everywhere; something of it may be left on a host that could not be queried."""

    def __init__(self, plan: Plan, words: str) -> None:
        super().__init__(words)
        self.plan = plan


def start_run(
    plan: Plan,
    secrets: Mapping[str, str],
    fleet: Fleet,
    stops: Mapping[str, float] | None = None,
    *,
    again: bool = False,
    guard: GuardState | None = None,
    hosts: str = "",
) -> None:
    """Start the node runner on every host; if one does not start, stop them all.

    ``stops``: when each host was told to stop an earlier launch, by its clock: any other stop is meant for this one.
    ``again``: a restart, refused if somebody has stopped the run meanwhile. ``guard``: the one that was asked for, to be
    recorded on the hosts. ``hosts``: the argument with which the printed commands find the hosts again.
    """
    requests = {
        node.name: StartRequest(
            node.name, plan, dict(secrets), tuple(node.ranks), again, guard, (stops or {}).get(node.name, 0.0)
        )
        for node in plan.nodes
    }
    starting: dict[str, Dialogue] = {}
    try:
        faults = _start_all(fleet, requests, starting)
    except BaseException:  # Ctrl-C as well: all or nothing
        show("ending what was started", error=True)
        _hang_up(starting)
        stop_launch(plan, fleet)
        raise
    _hang_up(starting)
    if faults:
        asked = [name for name in requests if name in starting or name in faults]
        why = _undo(plan, faults, asked, fleet, hosts)
        taken = {
            name for name, found in faults.items() if isinstance(found, Started) and found.fault is StartFault.TAKEN
        }
        if not again and taken == set(asked):  # another launch of that name came first
            raise UserError(why)
        raise StartError(plan, why)
    with contextlib.suppress(OSError):  # the hosts have theirs; this one is for the operator to read
        write_json(RunDir.here(plan.run).plan, plan)


def _start_all(fleet: Fleet, requests: Mapping[str, StartRequest], starting: dict[str, Dialogue]) -> Faults:
    """Take both steps on every host; returns what went wrong, by host."""

    def first(name: str) -> Started:
        starting[name] = fleet.dialogue(name, "start", requests[name])
        return starting[name].answer(Started, ANSWER_WITHIN_S)

    def second(name: str) -> Started:
        starting[name].say(KEEP)
        by = starting[name].answer(Kept, ANSWER_WITHIN_S).stopped_by
        return Started(StartFault.STOPPED_SINCE, by) if by else Started()

    head, *others = requests
    # the head first, and alone: of two simultaneous launches exactly one gets past it
    for step, group in ((first, [head]), (first, others), (second, [*requests])):
        outcomes = fleet.each(step, group)
        if faults := {name: found for name, found in outcomes.items() if isinstance(found, HostError) or found.fault}:
            return faults
    return {}


def fault_words(started: Started | HostError, run: str) -> str:
    """Why a host did not start, as a clause; '' if it did."""
    if isinstance(started, HostError):
        return str(started)
    match started.fault:
        case None:
            return ""
        case StartFault.TAKEN:
            return f"run {run} was just started by {started.by or 'somebody else'}"
        case StartFault.STOPPED | StartFault.STOPPED_SINCE:
            return f"run {run} was stopped by {started.by}"
        case StartFault.TMUX:
            return f"tmux could not start a session ({started.detail})"
        case StartFault.ENDED:
            return f"the node runner ended immediately: {words(started.cause)}"
        case StartFault.SLOW:
            return f"the node runner did not start torchrun within {started.detail} s"


def _hang_up(starting: Mapping[str, Dialogue]) -> None:
    opened = list(starting.values())  # after Ctrl-C others may still be added
    for dialogue in opened:
        dialogue.end_input()
    deadline = time.monotonic() + ROLL_BACK_S
    for dialogue in opened:
        dialogue.close(deadline - time.monotonic())


def _undo(plan: Plan, faults: Faults, asked: Sequence[str], fleet: Fleet, hosts: str) -> str:
    """End what was started on the hosts that were asked, print what happened on each, and return it as a sentence."""
    why = {name: fault_words(found, plan.run) for name, found in faults.items()}
    theirs = [name for name, found in faults.items() if isinstance(found, Started) and found.fault in NOT_OURS]
    if set(theirs) == set(asked):
        return fault_list(why, len(asked))
    ours = dataclasses.replace(plan, nodes=tuple(plan.node(name) for name in asked if name not in theirs))
    ends = stop_launch(ours, fleet)
    now = dict.fromkeys(ends, "nothing is left") | dict.fromkeys(theirs, "not touched")
    now |= {name: f"NOT VERIFIED: {remains}" for name, remains in not_stopped(ends).items()}
    rows = [(name, why.get(name, "started, then stopped"), now[name]) for name in asked]
    show(format_table(("host", "what happened", "now"), rows))
    tail = "; nothing is left running"
    if unverified := not_stopped(ends):
        tail = f"; run `{program_name()} stop{hosts} --run {plan.run}` once {', '.join(unverified)} can be reached"
    return f"{fault_list(why, len(asked), '')}{tail}"


def stop_launch(plan: Plan, fleet: Fleet, blame: Blame | None = None) -> dict[str, StopReply | HostError]:
    """End this launch's processes on every host; another launch of the same name is not touched.

    ``blame``: why it failed, to be recorded on every host.
    """
    return backend_of_plan(plan).stop_launch(fleet, plan, blame)
