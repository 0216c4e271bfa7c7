"""Check every host, plan, and start torchrun on all of them or on none."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from llama405b.capacity.outlook import Outlook
from llama405b.contract.adapters import describe
from llama405b.contract.code_version import code_version
from llama405b.contract.dealing import waste_note
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.known_bugs import known_bugs
from llama405b.contract.mesh import DP, NAMES
from llama405b.contract.phrases import counted
from llama405b.contract.plan import Plan
from llama405b.contract.rounding import rounding_note
from llama405b.contract.schema import Config
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.outcomes import one_machine
from llama405b_tools.hosts.printed_commands import command_to_type, hosts_argument
from llama405b_tools.run.forecast import (
    expected,
    loading_note,
    read_calibration,
    refuse_misfit,
    room_faults,
    with_split,
)
from llama405b_tools.run.guard_record import asked_for
from llama405b_tools.run.host_checks import Facts, fault_list
from llama405b_tools.run.plan import HostSpec
from llama405b_tools.run.preflight import check_training, host_spec, nccl_lines, plan_of, probe_hosts
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.run.screen import show
from llama405b_tools.run.start_everywhere import start_run
from llama405b_tools.text.fold import fold_names
from llama405b_tools.text.predictions import expectation

UNPROVED = "note: NCCL between GPUs is marked 'never run' in docs/proof.md; --rehearse tries it on these hosts first"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedLaunch:
    """A launch whose hosts are fit for it."""

    request: LaunchRequest  # with the mesh, if that was left to the plan
    answers: Facts
    parts: Sequence[HostSpec]
    plan: Plan
    outlook: Outlook | None  # what to expect of it, if that can be predicted


def launch(
    request: LaunchRequest,
    hosts: Sequence[Host],
    fleet: Fleet,
    *,
    again: bool = False,
    fewer: bool = False,
    say: Callable[[str], object] = show,
) -> Plan:
    """Check, plan and start; ``say`` gets the lines that tell what is running now.

    ``again``: a restart, when whatever is wrong is a host's fault and may pass. ``fewer``: on fewer hosts than before, on which it may
    not fit.

    Raises:
        UserError: The request is wrong; nothing was started.
        RunError: A host is not fit, or did not start; nothing is left running, or the message says where something may be.
    """
    began = time.monotonic()
    checked = check_and_plan(request, hosts, fleet, again=again, fewer=fewer)
    guard = asked_for(request) if request.restart and not again else None
    stops = {name: facts.stopped_at for name, facts in checked.answers.items()}
    where = hosts_argument(request.hosts_file)
    start_run(checked.plan, request.secrets, fleet, stops, again=again, guard=guard, hosts=where)
    for line in launched_lines(checked.request, hosts, checked, time.monotonic() - began):
        say(line)
    return checked.plan


def check_and_plan(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, *, again: bool, fewer: bool = False
) -> CheckedLaunch:
    """Ask every host, refuse what cannot work, and plan the rest.

    Raises:
        UserError: The request is wrong.
        RunError: A host is not fit.
    """
    try:
        answers, meeting = probe_hosts(request, hosts, fleet, again=again)
        request = with_split(request, hosts, answers, meeting.interface)
        parts = [host_spec(host, answers[host.name], meeting) for host in hosts]
        plan = plan_of(request, parts, answers, meeting, time.time())
    except UserError as error:
        if again:
            raise RunError(str(error)) from None
        raise
    if request.config:
        plan = dataclasses.replace(plan, mesh=plan.axes(request.config.parallel))
    check_training(request, plan, answers)
    if faults := room_faults(request, plan, answers):
        raise RunError(fault_list(faults, len(hosts)))
    outlook = expected(request, plan, answers, read_calibration(request.hosts_file, hosts))
    if outlook:
        plan = dataclasses.replace(plan, expected_step_s=outlook.needs.step_s or 0.0)
        if not request.allow_misfit and (fewer or not again):
            refuse_misfit(outlook)
    return CheckedLaunch(request, answers, parts, plan, outlook)


def launched_lines(
    request: LaunchRequest, hosts: Sequence[Host], checked: CheckedLaunch, took_s: float
) -> Iterator[str]:
    """Tell what is running now, and what to know about it."""
    answers, plan = checked.answers, checked.plan
    yield from sharing_notes(hosts, answers)
    hosts_and_ranks = f"{counted(len(plan.nodes), 'host')}, {counted(plan.world, 'rank')}"
    yield f"{plan.run}: {hosts_and_ranks}, rendezvous at {plan.endpoint}, up in {took_s:.1f} s"
    theirs, mine = next(iter(answers.values())).versions.get("llama405b"), code_version()
    if theirs not in (None, mine):
        setup = command_to_type("setup", request.hosts_file)
        yield f"note: the hosts run llama405b {theirs}, and this machine {mine}; `{setup}` gives them this one"
    for line in nccl_lines(request, checked.parts):
        yield f"  {line}"
    yield from training_notes(request, plan, answers)
    if checked.outlook:
        yield expectation(checked.outlook)
    if request.config and not request.on_cpu and any(facts.gpus for facts in answers.values()):
        yield UNPROVED


def sharing_notes(hosts: Sequence[Host], answers: Facts) -> Iterator[str]:
    """Say which hosts are one machine, and which other runs are on them."""
    for same in one_machine({host.name: answers[host.name].machine for host in hosts if not host.loopback}):
        yield f"note: {fold_names(same)} are one machine, whose GPUs and memory they share; delete all but one of them"
    for name in sorted({other for facts in answers.values() for other in facts.others}):
        where = fold_names([host for host, facts in answers.items() if name in facts.others])
        yield f"note: run {name} is also alive on {where}; both share its GPUs and memory"


def mesh_notes(config: Config, plan: Plan) -> Iterator[str]:
    """Yield what no GPU has run yet of these settings, and where the batch is not split evenly."""
    axes = plan.axes(config.parallel)
    if axes.told:
        inner = next(name for name in reversed(NAMES) if axes.size([name]) > 1)
        shares = all(node.slots % axes.size([inner]) == 0 for node in plan.nodes)
        where = "on one host" if shares else "on several hosts"
        yield f"mesh: {axes}, ranks along {inner} are {where}; no GPU has run that yet (docs/parallel.md)"
    for name in ("prefetch", "reshard_after_forward"):
        if value := getattr(config.parallel, name):
            yield f"{name} {value}: no GPU has run that yet (docs/parallel.md)"
    if config.adapter.trains:
        yield f"adapter: {describe(config.adapter)}; no GPU has run that yet (docs/training.md)"
    if note := waste_note(config.training, axes.size(DP)):
        yield f"note: {note}"


def training_notes(request: LaunchRequest, plan: Plan, answers: Facts) -> Iterator[str]:
    """Say what the settings of a training run entail on these hosts."""
    if request.config is None:
        return
    for what, bug in known_bugs(request.config, next(iter(answers.values())).versions).items():
        yield f"note: {what}; {bug.cure}"
    if not request.evaluates:
        yield from mesh_notes(request.config, plan)
    if note := loading_note(request, plan, answers):
        yield note
    if not request.evaluates and (note := rounding_note(request.config.parallel, request.config.optimizer)):
        yield f"note: {note}"


def resumed(request: LaunchRequest, hosts: Sequence[Host], plan: Plan) -> tuple[LaunchRequest, list[Host]]:
    """Return the same launch with the same ranks on each host, resuming from the newest checkpoint that verifies."""
    known = {node.name: node.slots for node in plan.nodes}
    same = [dataclasses.replace(host, slots=known.get(host.name, host.slots)) for host in hosts]
    return dataclasses.replace(request, resume="auto"), same
