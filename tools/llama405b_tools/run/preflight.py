"""Before a launch: query every host, refuse what cannot work, and build a plan from the answers."""

import dataclasses
import random
import secrets
import sys
from collections.abc import Mapping, Sequence

from llama405b.contract import command, config
from llama405b.contract.adapters import factors
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.groups import check_groups
from llama405b.contract.known_bugs import known_bugs
from llama405b.contract.mesh_rules import check_mesh
from llama405b.contract.plan import Plan
from llama405b.contract.schema import Config
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet, ssh_address
from llama405b_tools.hosts.inventory import LOCAL, Host
from llama405b_tools.hosts.outcomes import disagreements, replies, unanswered
from llama405b_tools.hosts.printed_commands import command_to_type
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.machine.network import is_private
from llama405b_tools.remote.messages.probe import InputCheck, LaunchFacts, ProbeRequest
from llama405b_tools.run.host_checks import Facts, check_request, fault_list, shared_directory, unfit_hosts
from llama405b_tools.run.plan import HostSpec, LaunchSpec, build_plan, nccl_reasons, used_parts
from llama405b_tools.run.query import operator
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.text.fold import fold_names

PROBE_TIMEOUT_S = 60.0
PORTS = range(20_000, 30_000)  # below the ephemeral ports, so that no outgoing connection uses one
PORT_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the hosts meet: measured, never taken from the names that SSH uses."""

    head: str  # the head's address on the training network
    port: int  # of the rendezvous, free and reached by all
    address: Mapping[str, str]  # each host's own, on the route there
    interface: Mapping[str, str]  # of that address


def probe_hosts(
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, *, again: bool = False
) -> tuple[Facts, Rendezvous]:
    """Ask every host whether the run can start there, ``again`` perhaps, and find out where they meet.

    Raises:
        RunError: A host is not fit; names every host that is not.
        UserError: The run's name or the port is in use, or the checkpoint or the data on the head cannot be used.
    """
    head, token = hosts[0], f"llama405b {secrets.token_hex(8)}"
    listening, first, port = _ask_head(request, head, fleet, token)
    try:
        candidates = candidates_of(head, first)
        requests = {
            host.name: dataclasses.replace(_probe_request(request, host, port, token), candidates=tuple(candidates))
            for host in hosts[1:]
        }
        outcomes: dict[str, LaunchFacts | HostError] = {head.name: first}
        outcomes |= fleet.ask_all("probe", requests, LaunchFacts, PROBE_TIMEOUT_S)
    finally:
        if listening:
            listening.end_input()
            listening.close()
    answers = replies(outcomes)
    check_request(request, answers, port, again=again)
    faults = unanswered(outcomes) | unfit_hosts(request, hosts, answers)
    meeting = find_rendezvous(head, candidates, answers, port)
    if meeting is None:
        raise RunError(fault_list(cut_off(head, answers, port) | faults, len(hosts)))
    if faults := hidden_addresses(meeting, answers) | faults:
        raise RunError(fault_list(faults, len(hosts)))
    if clauses := disagreements({name: facts.versions for name, facts in answers.items()}):
        setup = command_to_type("setup", request.hosts_file)
        raise RunError(
            f"the hosts differ: {'; '.join(clauses)}; install the same versions, or run `{setup}`. Nothing was started"
        )
    return answers, meeting


def _ask_head(
    request: LaunchRequest, head: Host, fleet: Fleet, token: str
) -> tuple[Dialogue | None, LaunchFacts | HostError, int]:
    """Probe the head, which then listens on the rendezvous port; tries several ports unless one is requested."""
    ports = [request.port] if request.port else random.sample(PORTS, PORT_TRIES)
    for port in ports:
        probe = _probe_request(request, head, port, token, is_head=True)
        probe = dataclasses.replace(probe, is_head=True, inputs=_inputs(request))
        try:
            dialogue = fleet.dialogue(head.name, "probe", probe)
            answer = dialogue.answer(LaunchFacts, PROBE_TIMEOUT_S)
        except HostError as error:
            return None, error, port
        if not answer.port_fault or port == ports[-1]:
            break
        dialogue.end_input()
    return dialogue, answer, port


def _inputs(request: LaunchRequest) -> InputCheck | None:
    """Return what the head must check; None for a program of the user's own."""
    if request.config is None:
        return None
    model, data = request.config.model, request.config.data
    return InputCheck(
        model.path,
        data.seq_len,
        model.layers,
        model.weights == "random",
        request.data_paths,
        request.new_checkpoints,
        whole=request.config.parallel.by_fsdp1,
        template=data.chat_template,
        resume=request.resume,
        checkpoints=request.checkpoints,
        fields=data.fields,
        skips=data.bad_records == "skip",
        extension=request.config.training.extend,
        adapter=request.config.adapter if request.config.adapter.path and request.resume == "no" else None,
    )


def candidates_of(head: Host, answer: LaunchFacts | HostError) -> list[str]:
    """Return addresses where the others may reach the head: ``address=`` only, else its own, private and fast first."""
    if head.address:
        return [head.address]
    own = answer.own if isinstance(answer, LaunchFacts) else ()
    ordered = sorted(own, key=lambda entry: (not is_private(entry.address), -_mbit(entry.mbit)))
    return list(dict.fromkeys([*(entry.address for entry in ordered), ssh_address(head)]))


def _mbit(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else 0


def find_rendezvous(head: Host, candidates: Sequence[str], answers: Facts, port: int) -> Rendezvous | None:
    """Return the first candidate that every other host reaches; None if there is none."""
    if head.name not in answers:
        return None
    others = [facts.head for name, facts in answers.items() if name != head.name]
    for candidate in candidates:
        if all(reached[candidate].fault == "" for reached in others):
            return _rendezvous_at(candidate, head, answers, port)
    return None


def cut_off(head: Host, answers: Facts, port: int) -> dict[str, str]:
    """Return the hosts that do not reach the head at every address, and what to do."""
    faults: dict[str, str] = {}
    if head.name not in answers:
        return faults
    for name, reached in [(name, facts.head) for name, facts in answers.items() if name != head.name]:
        failed = {address: reach.fault for address, reach in reached.items() if reach.fault}
        if not failed:
            continue
        tried = ", ".join(f"{address} ({fault})" for address, fault in failed.items())
        remedy = f"open TCP ports 20000-65535 between the hosts, or give {head.name} an address= that all of them reach"
        if all(reach.unresolved for reach in reached.values()):
            remedy = f"put the name into its /etc/hosts, or give {head.name} an IP address in address="
        faults[name] = f"cannot reach {head.name} on TCP port {port} at {tried}; {remedy}"
    return faults


def _rendezvous_at(candidate: str, head: Host, answers: Facts, port: int) -> Rendezvous:
    """Return how the hosts meet at an address of the head that all of them reach."""
    own = {entry.address: entry.interface for entry in answers[head.name].own}
    mine = candidate
    if candidate not in own and candidate != LOCAL:
        mine = next(iter(own), LOCAL)
    others = {name: found.head[candidate] for name, found in answers.items() if candidate in found.head}
    return Rendezvous(
        head=candidate,
        port=port,
        address={head.name: mine, **{name: reach.mine for name, reach in others.items()}},
        interface={head.name: own.get(mine, "lo"), **{name: reach.interface for name, reach in others.items()}},
    )


def plan_of(request: LaunchRequest, parts: Sequence[HostSpec], answers: Facts, meeting: Rendezvous, now: float) -> Plan:
    """Build the plan from the answers."""
    launching = LaunchSpec(
        attempt=1 + max(found.attempt for found in answers.values()),
        created=now,
        token=secrets.token_hex(4),
        endpoint=f"{meeting.head}:{meeting.port}",
        owner=operator(),
    )
    return build_plan(request.spec(), parts, launching)


def host_spec(host: Host, answer: LaunchFacts, meeting: Rendezvous) -> HostSpec:
    """Return what a plan needs to know about a host."""
    return HostSpec(
        name=host.name,
        slots=host.slots,
        machine=answer.machine,
        gpus=answer.gpus,
        cores=answer.cores,
        rdma=answer.rdma,
        workdir=answer.workdir,
        python=host.python or sys.executable,
        address=meeting.address[host.name],
        interface=meeting.interface[host.name],
        places={key: answer.places[key].path for key in host.places},
    )


def check_training(request: LaunchRequest, plan: Plan, answers: Facts) -> None:
    """Parse the planned command with the trainer's own parser; check it against the ranks and what is resumed."""
    if request.config:
        parsed = command.parse(plan.program[2:])
        if parsed.config != request.config:
            raise UserError("the planned command does not match the request; please report this as a bug")
        axes = plan.axes(parsed.config.parallel)
        settings = parsed.config if request.evaluates else config.on_ranks(parsed.config, axes)
        request.refuse_changes(next((each.resumable for each in answers.values() if each.resumable), None), settings)
        llama, parallel = answers[plan.nodes[0].name].llama, settings.parallel
        if llama:
            check_groups(settings.optimizer.groups, factors(llama, settings.adapter) or llama.tensors(), parallel)
        check_mesh(axes, parallel, llama, settings.data.seq_len, max(node.slots for node in plan.nodes))
        for what, bug in known_bugs(settings, next(iter(answers.values())).versions).items():
            if bug.level == "refuse":
                raise UserError(f"{what}; {bug.cure}. Nothing was started")


def nccl_lines(request: LaunchRequest, parts: Sequence[HostSpec]) -> list[str]:
    """Return one line for each NCCL setting that launch makes: for which hosts, and why."""
    lines: dict[str, list[str]] = {}
    own = {name: f"{name}={value} (--env)" for name, value in request.env.items()}
    for part in used_parts(request.spec(), parts):
        for name, (value, why) in nccl_reasons(part).items():
            lines.setdefault(own.get(name, f"{name}={value} ({why})"), []).append(part.name)
    return [f"{fold_names(names)}: {line}" for line, names in lines.items()]


def _probe_request(request: LaunchRequest, host: Host, port: int, token: str, *, is_head: bool = False) -> ProbeRequest:
    packages = ("torch", "transformers") if request.config else ("torch",)
    is_known = not request.setup and "PYTHONPATH" not in request.env  # which may bring the program
    program = request.program if is_known else ()
    places = host.places
    if request.saves and request.settings.checkpoint.dir:
        places |= {"--checkpoint.dir": request.settings.checkpoint.dir}
    model = request.settings.model
    weights = model.path if request.config and model.weights == "files" else ""
    shared = shared_directory(request)
    extras = _extras(request.config, is_head=is_head) if request.config and is_known else ()
    return ProbeRequest(
        request.run,
        host.name,
        port,
        token,
        packages,
        places,
        weights=weights,
        program=program,
        shared=shared,
        extras=extras,
        extension=request.settings.training.extend,
    )


def _extras(settings: Config, *, is_head: bool) -> tuple[str, ...]:
    """Return packages that settings need on a host: FP8's on all, and trackers' where rank 0 is."""
    of_all = ("torchao",) if settings.parallel.numerics == "fp8" else ()
    return (*of_all, *settings.tracking.to) if is_head else of_all


def hidden_addresses(meeting: Rendezvous, answers: Facts) -> dict[str, str]:
    """Return hosts whose interface has another address first: gloo is given interfaces, and uses their first address."""
    faults = {}
    for name, found in answers.items():
        address, interface = meeting.address[name], meeting.interface[name]
        first = next((entry.address for entry in found.own if entry.interface == interface), address)
        if first != address and interface != "lo":
            faults[name] = (
                f"its {interface} has {first} before {address}, where the hosts find_rendezvous, but gloo uses an interface's first "
                f"address; put {address} first, or on an interface of its own"
            )
    return faults
