"""Before a launch: query every host, refuse what cannot work, and build a plan from the answers."""

import dataclasses
import getpass
import random
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence

from llama405b.contract import command, config
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.known_bugs import known_bugs
from llama405b.contract.phrases import counted, given
from llama405b.contract.plan import Plan
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet, ssh_address
from llama405b_tools.hosts.inventory import LOCAL, Host
from llama405b_tools.hosts.outcomes import disagreements, replies, unanswered
from llama405b_tools.hosts.printed_commands import command_to_type
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.machine.network import is_private
from llama405b_tools.remote.messages.probe import InputCheck, LaunchFacts, PlaceFault, ProbeRequest, RunPlace
from llama405b_tools.run.plan import HostSpec, LaunchSpec, build_plan, nccl_reasons, used_parts
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.text.fold import fold_names

PROBE_TIMEOUT_S = 60.0
LEAST_FREE_BYTES, LEAST_FREE_FILES = 64 << 20, 1000  # for logs and heartbeats
PORTS = range(20_000, 30_000)  # below the ephemeral ports, so that no outgoing connection uses one
PORT_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the hosts meet: measured, never taken from the names that SSH uses."""

    head: str  # the head's address on the training network
    port: int  # of the rendezvous, free and reached by all
    address: Mapping[str, str]  # each host's own, on the route there
    interface: Mapping[str, str]  # of that address


Facts = Mapping[str, LaunchFacts]  # by host


def probe_hosts(request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet) -> tuple[Facts, Rendezvous]:
    """Ask every host whether the run can start there, and find out where they meet.

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
    refuse_input(request, answers, port)
    unfit = {host.name: _host_fault(request, host, answers[host.name]) for host in hosts if host.name in answers}
    faults = unanswered(outcomes) | user_faults(request, answers) | unshared(request, answers)
    faults |= {name: why for name, why in unfit.items() if why}
    way = find_rendezvous(head, candidates, answers, port)
    if not isinstance(way, Rendezvous):
        raise RunError(fault_list(way | faults, len(hosts)))
    if faults := hidden_addresses(way, answers) | faults:
        raise RunError(fault_list(faults, len(hosts)))
    if clauses := disagreements({name: found.versions for name, found in answers.items()}):
        raise RunError(f"the hosts differ: {'; '.join(clauses)}; install the same versions. Nothing was started")
    return answers, way


def _ask_head(
    request: LaunchRequest, head: Host, fleet: Fleet, token: str
) -> tuple[Dialogue | None, LaunchFacts | HostError, int]:
    """Probe the head, which then listens on the rendezvous port; tries several ports unless one is requested."""
    ports = [request.port] if request.port else random.sample(PORTS, PORT_TRIES)
    for port in ports:
        probe = dataclasses.replace(_probe_request(request, head, port, token), is_head=True, inputs=_inputs(request))
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
        whole=request.config.parallel.fsdp == "fsdp1",
        template=data.chat_template,
        resume=request.resume,
        checkpoints=request.checkpoints,
        fields=data.fields,
        skips=data.bad_records == "skip",
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


def find_rendezvous(head: Host, candidates: Sequence[str], answers: Facts, port: int) -> Rendezvous | dict[str, str]:
    """Return the way to the first candidate that every other host reaches; else, by host, why there is none."""
    others = {name: found.head for name, found in answers.items() if name != head.name}
    if head.name not in answers:
        return {}
    for candidate in candidates:
        if all(found[candidate].fault == "" for found in others.values()):
            return _way_at(candidate, head, answers, port)
    faults = {}
    for name, found in others.items():
        failed = {address: reach.fault for address, reach in found.items() if reach.fault}
        if failed:
            tried = ", ".join(f"{address} ({fault})" for address, fault in failed.items())
            remedy = (
                f"open TCP ports 20000-65535 between the hosts, or give {head.name} an address= that all of them reach"
            )
            if all(reach.unresolved for reach in found.values()):
                remedy = f"put the name into its /etc/hosts, or give {head.name} an IP address in address="
            faults[name] = f"cannot reach {head.name} on TCP port {port} at {tried}; {remedy}"
    return faults


def _way_at(candidate: str, head: Host, answers: Facts, port: int) -> Rendezvous:
    """Return the way to an address of the head that all hosts reach."""
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


def refuse_input(request: LaunchRequest, answers: Facts, port: int) -> None:
    """Refuse what is wrong with the request rather than with a host.

    Raises:
        UserError: See ``probe_hosts``.
    """
    if answers and not any(found.has_program for found in answers.values()):
        raise UserError(
            f"{_named(request.program)}: no host has it in its working directory; correct the name, or copy it there"
        )
    stopped_by = next((found.stopped_by for found in answers.values() if found.stopped_by), "")
    for name, found in answers.items():
        if found.alive and stopped_by:
            raise UserError(
                f"--run: {request.run!r} is being stopped by {stopped_by} and still runs on {name}; once it has ended, "
                "continue it with --resume auto"
            )
        if found.alive:
            owner = given(", launched by {}", found.owner)
            stop = command_to_type("stop", request.hosts_file, request.run)
            raise UserError(
                f"--run: {request.run!r} is running on {name}{owner}; `{stop}` ends it, or choose another name"
            )
        if found.run_exists and found.run_place.fault not in (None, PlaceFault.READ_ONLY):
            raise UserError(f"--run: {request.run!r} on {name}: {place_words(found.run_place)}; choose another name")
        if found.run_exists and (request.resume == "no" or request.evaluates):
            other = "choose another name" + ", or continue it with --resume auto" * (not request.evaluates)
            raise UserError(f"--run: {request.run!r} exists on {name}; {other}")
        if found.port_fault:
            why = "in use" if found.port_in_use else f"not available ({found.port_fault})"
            raise UserError(f"--port: {port} is {why} on the head; omit --port to get a free one")
        if found.input_fault:
            raise UserError(f"{name}: {found.input_fault}")


def plan_of(request: LaunchRequest, parts: Sequence[HostSpec], answers: Facts, way: Rendezvous, now: float) -> Plan:
    """Build the plan from the answers.

    Raises:
        UserError: Hosts that are one machine request more GPUs than it has.
    """
    launching = LaunchSpec(
        attempt=1 + max(found.attempt for found in answers.values()),
        created=now,
        token=secrets.token_hex(4),
        endpoint=f"{way.head}:{way.port}",
        owner=f"{getpass.getuser()}@{socket.gethostname()}",
    )
    return build_plan(request.spec(), parts, launching)


def host_spec(host: Host, answer: LaunchFacts, way: Rendezvous) -> HostSpec:
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
        address=way.address[host.name],
        interface=way.interface[host.name],
        places={key: answer.places[key].path for key in host.places},
    )


def check_training(request: LaunchRequest, plan: Plan, answers: Facts) -> None:
    """Parse the planned command with the trainer's own parser; check it against the ranks and what is resumed.

    Raises:
        UserError: The trainer would refuse it, or the hosts' versions are known to go wrong with it.
    """
    if request.config:
        parsed = command.parse(plan.program[2:])
        if parsed.config != request.config:
            raise UserError("the planned command does not match the request; please report this as a bug")
        settings = parsed.config if request.evaluates else config.on_ranks(parsed.config, plan.world)
        request.refuse_changes(next((each.resumable for each in answers.values() if each.resumable), None), settings)
        for what, bug in known_bugs(settings, next(iter(answers.values())).versions).items():
            if bug.level == "refuse":
                raise UserError(f"{what}; {bug.cure}. Nothing was started")


def hidden_addresses(way: Rendezvous, answers: Facts) -> dict[str, str]:
    """Return hosts whose interface has another address first: gloo is given interfaces, and uses their first address."""
    faults = {}
    for name, found in answers.items():
        address, interface = way.address[name], way.interface[name]
        first = next((entry.address for entry in found.own if entry.interface == interface), address)
        if first != address and interface != "lo":
            faults[name] = (
                f"its {interface} has {first} before {address}, where the hosts find_rendezvous, but gloo uses an interface's first "
                f"address; put {address} first, or on an interface of its own"
            )
    return faults


def nccl_lines(request: LaunchRequest, parts: Sequence[HostSpec]) -> list[str]:
    """Return one line for each NCCL setting that launch makes: for which hosts, and why."""
    lines: dict[str, list[str]] = {}
    own = {name: f"{name}={value} (--env)" for name, value in request.env.items()}
    for part in used_parts(request.spec(), parts):
        for name, (value, why) in nccl_reasons(part).items():
            lines.setdefault(own.get(name, f"{name}={value} ({why})"), []).append(part.name)
    return [f"{fold_names(names)}: {line}" for line, names in lines.items()]


def _probe_request(request: LaunchRequest, host: Host, port: int, token: str) -> ProbeRequest:
    packages = ("torch", "transformers") if request.config else ("torch",)
    is_known = not request.setup and "PYTHONPATH" not in request.env  # which may bring the program
    program = request.program if is_known else ()
    places = host.places
    if request.saves and request.settings.checkpoint.dir:
        places |= {"--checkpoint.dir": request.settings.checkpoint.dir}
    model = request.settings.model
    weights = model.path if request.config and model.weights == "files" else ""
    shared = _shared_directory(request)
    return ProbeRequest(
        request.run, host.name, port, token, packages, places, weights=weights, program=program, shared=shared
    )


def _shared_directory(request: LaunchRequest) -> str:
    """The directory of checkpoints, if all hosts must see the same one; '' if not."""
    if not request.saves or request.settings.checkpoint.storage == "local":
        return ""
    return request.settings.checkpoint.dir or f"runs/{request.run}/checkpoints"


def unshared(request: LaunchRequest, answers: Facts) -> dict[str, str]:
    """Return hosts that do not see what the head writes where the checkpoints go."""
    head = next(iter(answers), "")
    why = (
        f"it does not see what {head} writes in {_shared_directory(request)}, where the checkpoints go; name a directory that "
        "all hosts share in --checkpoint.dir, or use --checkpoint.storage local"
    )
    return {name: why for name, found in answers.items() if answers[head].shares and found.shares is False}


def user_faults(request: LaunchRequest, answers: Facts) -> dict[str, str]:
    """Return hosts where another user would have to use what the head's user writes: a run's files are private."""
    faults: dict[str, str] = {}
    for name, found in answers.items():
        head, first = next(iter(answers.items()))
        shared, remedy = f"{found.workdir}/runs", "give each a workdir= of its own"
        if found.runs != first.runs:
            if not (shared := _shared_directory(request)):
                continue
            remedy = "save nothing with --checkpoint.every 0"
        if found.uid != first.uid:
            faults[name] = (
                f"the run would be {found.user}'s there (uid {found.uid}), but {first.user}'s on {head} (uid {first.uid}), "
                f"and neither can read what the other writes in {shared}; log in as one user everywhere, or {remedy}"
            )
    return faults


def _host_fault(request: LaunchRequest, host: Host, found: LaunchFacts) -> str:
    """Why the run cannot start on a host; '' if it can."""
    if why := _lacks(request, found) or _disk_fault(found):
        return why
    if not request.on_cpu and 0 < found.gpus < host.slots:
        return f"it has {counted(found.gpus, 'GPU')}, but slots={host.slots}; check nvidia-smi, or lower slots="
    if found.leftovers:
        left = counted(len(found.leftovers), "process", "processes")
        return (
            f"{left} of an earlier attempt left; run `{command_to_type('stop', request.hosts_file, request.run)}` first"
        )
    return ""


def _lacks(request: LaunchRequest, found: LaunchFacts) -> str:
    """Which program a host lacks; '' if none."""
    if missing := [name for name, version in found.versions.items() if version == "missing"]:
        setup = command_to_type("setup", request.hosts_file)
        return f"{', '.join(missing)} is not installed for its python; run `{setup}`, or install it there"
    if not found.has_program:
        return f"{_named(request.program)} is not in {found.workdir}; copy it there"
    if not found.tmux:
        return "tmux is not installed; install it (apt-get update && apt-get install tmux)"
    if found.tmux_fault:
        return f"its tmux does not work (`tmux -V`: {found.tmux_fault}); repair it"
    if not found.ip:
        return "the `ip` program is not installed; install iproute2 there"
    return ""


def _disk_fault(found: LaunchFacts) -> str:
    """Why the run cannot write its files on a host; '' if it can."""
    if found.run_place.fault:
        return f"{found.run_place.path} cannot be written: {place_words(found.run_place)}; fix that, or set workdir="
    for key, place in found.places.items():
        if place.fault:
            why = place_words(place)
            return f"{key}={place.path} cannot be created or written: {why}; name a directory of your own"
    if found.free_bytes < LEAST_FREE_BYTES:
        free = found.free_bytes / (1 << 20)
        return f"its disk is full ({free:.0f} MiB free at {found.workdir}); make room, or set workdir= on another disk"
    if found.free_files is not None and found.free_files < LEAST_FREE_FILES:
        left = f"{counted(found.free_files, 'more file')} can be created at {found.workdir}"
        return f"its disk is out of inodes ({left}); delete files, or set workdir= on another disk"
    return ""


def _named(program: Sequence[str]) -> str:
    """A program without its own arguments: ``train.py``, ``-m mine``."""
    return " ".join(program[: 1 + program[0].startswith("-")])


def place_words(place: RunPlace) -> str:
    """Say what stands in the way of writing a directory."""
    match place.fault:
        case PlaceFault.DANGLING:
            return f"{place.at} is a link to nothing"
        case PlaceFault.DENIED:
            return f"{place.at} belongs to {place.owner}, and you cannot write it"
        case PlaceFault.READ_ONLY:
            return f"the filesystem of {place.at} is read-only (after an I/O error, dmesg says why)"
        case _:
            return f"{place.at} is not a directory"


def fault_list(faults: Mapping[str, str], n_hosts: int, end: str = ". Nothing was started") -> str:
    """Return one sentence about all hosts that are not fit."""
    alike: dict[str, list[str]] = {}
    for name, why in faults.items():
        alike.setdefault(why, []).append(name)
    clauses = "; ".join(f"{fold_names(names)}: {why}" for why, names in alike.items())
    return f"{clauses}{end}" if len(faults) == 1 else f"{len(faults)} of {n_hosts} hosts are not fit: {clauses}{end}"
