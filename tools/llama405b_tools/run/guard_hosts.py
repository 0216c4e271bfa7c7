"""What the hosts of a run are told of its guard, and the guarding of a run whose guard died."""

import dataclasses
import time
from collections.abc import Iterable

from llama405b.contract.errors import UserError
from llama405b.contract.plan import Plan
from llama405b.contract.records import GuardState
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.outcomes import replies
from llama405b_tools.hosts.printed_commands import hosts_argument, program_name
from llama405b_tools.remote.messages.guard_notes import GuardNote, NoteReply
from llama405b_tools.remote.messages.host_run import HostRun
from llama405b_tools.run.guard_record import GuardStatus, asked_for, heard_by, of_hosts
from llama405b_tools.run.query import ask_hosts, known_of, planned
from llama405b_tools.run.request import LaunchRequest

NOTE_TIMEOUT_S = 60.0


def adopt(request: LaunchRequest, fleet: Fleet) -> Plan | None:
    """Return the plan of the requested run if its guard died, with the machine or the terminal, and it is still running or finishing.

    Only if it is the same run, by its hosts, program, settings and the names of its secrets. Its hosts are told then that
    a guard was asked for.

    Raises:
        UserError: Its guard lives.
        HostError: A host of it was lost meanwhile.
    """
    try:
        _, seen = ask_hosts(fleet, request.run)
    except UserError:
        return None  # it is new, or launch reports what is wrong
    known = known_of(seen)
    status = _refuse_guarded(request, known.values())
    alive = (
        known if status and status.finishes and status.gone else {name: run for name, run in known.items() if run.alive}
    )
    if not alive or any(run.stopped_by for run in known.values()):
        return None  # which launch reports
    plan = planned(fleet, next(iter(alive)), request.run)
    if not _is_same(request, fleet, plan) or {run.created for run in alive.values()} != {plan.created}:
        return None
    tell_hosts(fleet, plan, asked_for(request))
    return plan


def _refuse_guarded(request: LaunchRequest, runs: Iterable[HostRun]) -> GuardStatus | None:
    """Refuse a second guard; returns what is known of the first."""
    status = of_hosts(request.run, heard_by(runs), time.time())
    if status and status.guards:
        who = f"process {status.state.pid} on {status.state.machine.partition(' ')[0]}"
        stop = f"{program_name()} stop{hosts_argument(request.hosts_file)} --run {request.run}"
        raise UserError(
            f"--run: {request.run!r} already has a guard ({who}); `{stop}` ends both, or leave them running"
        )
    return status


def _is_same(request: LaunchRequest, fleet: Fleet, plan: Plan) -> bool:
    """Whether a plan is of this request, whatever either resumes."""
    resumed = dict(zip(plan.program, plan.program[1:], strict=False)).get("--resume", "")
    program = dataclasses.replace(request, resume=resumed).training_program()
    chooses = bool(request.settings.left_to_plan)  # then what was chosen follows
    same = program == (plan.program[: len(program)] if chooses else plan.program)
    names = [node.name for node in plan.nodes]
    on_its_hosts = names == list(fleet.hosts) or (request.shrink and set(names) < set(fleet.hosts))
    return bool(same and on_its_hosts and set(plan.secrets) == set(request.secrets))


def tell_hosts(fleet: Fleet, plan: Plan, state: GuardState) -> dict[str, NoteReply]:
    """Tell every host of a run what its guard does; one that cannot be reached hears it the next time. Returns the answers."""
    notes = {node.name: GuardNote(plan.run, node.name, plan.rdzv_id, state) for node in plan.nodes}
    return replies(fleet.ask_all("note", notes, NoteReply, NOTE_TIMEOUT_S))
