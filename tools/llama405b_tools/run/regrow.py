"""A run that goes on without hosts that are lost takes them back: finding them, and ending the attempt for that."""

import time

from llama405b.contract.causes import Cause, CauseKind
from llama405b.contract.plan import Plan
from llama405b.contract.records import Blame
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run.backends import backend_of_plan
from llama405b_tools.run.roster import Roster
from llama405b_tools.text.fold import fold_names

LOOK_S = 30.0  # between looks, and how long one may take
SAVE_S = 1800.0  # for the save


def found_again(fleet: Fleet, roster: Roster) -> str:
    """Look for the hosts that are left out; returns those that are back, if one has been for long enough."""
    found = fleet.each(lambda name: fleet.connection(name).run("true", "", LOOK_S), roster.left_out)
    roster.note_back([name for name, answer in found.items() if not isinstance(answer, HostError)], time.monotonic())
    return fold_names(sorted(roster.back_at)) if roster.grows(time.monotonic()) else ""


def end_to_grow(fleet: Fleet, plan: Plan, back: str) -> None:
    """Have an attempt save and end, as for a restart that is asked for: the next one has all hosts."""
    head = plan.nodes[0].name
    asked = Cause(CauseKind.STOPPED, head, by=f"its guard ({back} is back)")
    backend_of_plan(plan).stop_launch(fleet, plan, Blame(plan.attempt, head, asked), SAVE_S)
