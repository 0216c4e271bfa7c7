"""Before a launch: query every host, refuse what cannot work, and build a plan from the answers.

A fault of the request raises UserError; hosts that are not fit are named in a RunError. ``known_bugs.toml`` lists versions of packages
that go wrong, and with which settings.
"""

import dataclasses
import functools
import operator
import random
import re
import secrets
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llama405b.contract import reader
from llama405b.contract.errors import RunError, UserError, fmt_if, pluralize
from llama405b.settings import command, config
from llama405b.settings.rules import check_groups
from llama405b.settings.schema import Config
from llama405b.spec.adapters import lora_shapes
from llama405b.spec.plan import Plan
from llama405b.spec.rules import check_mesh
from llama405b_tools.agent import launch_facts
from llama405b_tools.agent.launch_facts import CHECKPOINTS, EXPORT, InputCheck, LaunchFacts, ProbeRequest
from llama405b_tools.agent.machine import DirectoryFault
from llama405b_tools.hosts.fleet import Fleet, JsonSession, command_to_type, ssh_address
from llama405b_tools.hosts.inventory import LOOPBACK_ADDRESS, Host
from llama405b_tools.hosts.transport import HostError, failure_texts, list_disagreements, replies
from llama405b_tools.launch.findings import (
    BAD,
    NO_IPV4,
    Finding,
    broken_tmux,
    full_disk,
    missing_gpus,
    missing_packages,
    missing_programs,
    not_sharing,
    place_words,
    reach_remedy,
    unwritable,
)
from llama405b_tools.launch.placement import HostSpec, LaunchSpec, build_plan, nccl_reasons, without_unused_gpus
from llama405b_tools.launch.request import LaunchRequest
from llama405b_tools.parsers import is_private
from llama405b_tools.run.query import operator_name
from llama405b_tools.text.words import fold_names

Facts = Mapping[str, LaunchFacts]  # by host


def check_request(request: LaunchRequest, answers: Facts, port: int, *, is_restart: bool = False) -> None:
    """Refuse what is wrong with the request rather than with a host; ``is_restart``: a restart, on some of its hosts perhaps."""
    if answers and not any(facts.has_program for facts in answers.values()):
        raise UserError(
            f"{_program_name(request.program)}: no host has it in its working directory; correct the name, or copy it there"
        )
    stopped_by = next((facts.stopped_by for facts in answers.values() if facts.stopped_by), "")
    for name, facts in answers.items():
        if facts.alive or (facts.alive_as and not is_restart):
            _refuse_live(request, name, facts, stopped_by)
        if facts.run_exists:
            _check_existing(request, name, facts)
        if facts.port_fault:
            why = "in use" if facts.port_in_use else f"not available ({facts.port_fault})"
            raise UserError(f"--port: {port} is {why} on the head; omit --port to get a free one")
        if facts.input_fault:
            raise UserError(f"{name}: {facts.input_fault}")


def _refuse_live(request: LaunchRequest, name: str, facts: LaunchFacts, stopped_by: str) -> None:
    if stopped_by:
        raise UserError(
            f"--run: {request.run!r} is being stopped by {stopped_by} and still runs on {name}; once it has ended, "
            "continue it with --resume auto"
        )
    owner = fmt_if(", launched by {}", facts.owner)
    stop = command_to_type("stop", request.hosts_file, request.run)
    if not facts.alive:
        owner, stop = f" as {fold_names(facts.alive_as)}{owner}", command_to_type("stop", None, request.run)
    raise UserError(f"--run: {request.run!r} is running on {name}{owner}; `{stop}` ends it, or choose another name")


def _check_existing(request: LaunchRequest, name: str, facts: LaunchFacts) -> None:
    if facts.run_place.fault not in (None, DirectoryFault.READ_ONLY):
        raise UserError(f"--run: {request.run!r} on {name}: {place_words(facts.run_place)}; choose another name")
    if request.resume == "no" or request.evaluates:
        raise UserError(f"--run: {request.run!r} exists on {name}; {name_remedy(request)}")


def name_remedy(request: LaunchRequest) -> str:
    """Say what to do when a run of that name exists."""
    return "choose another name" if request.evaluates else "choose another name, or continue it with --resume auto"


def unfit_hosts(request: LaunchRequest, hosts: Sequence[Host], answers: Facts) -> dict[str, str]:
    """Return the hosts that have answered, but cannot take part, each with the reason."""
    faults = user_faults(request, answers) | unshared_hosts(request, answers)
    for host in hosts:
        found = host_findings(request, host, answers[host.name]) if host.name in answers else ()
        if bad := next((finding for finding in found if finding.level == BAD), None):
            faults[host.name] = str(bad)
    return faults


def host_findings(request: LaunchRequest, host: Host, facts: LaunchFacts) -> Iterator[Finding]:
    """Yield what is wrong with a host for this run, in the order in which to mend it."""
    setup = f"`{command_to_type('setup', request.hosts_file)}`"
    yield from missing_packages(facts.versions, setup)
    if names := " ".join(facts.lacks):
        what = f"{names} is not installed for its python, and the settings need it"
        yield Finding(BAD, what, f"run `pip install {names}` there")
    if facts.extension_fault:
        yield Finding(BAD, f"{facts.extension_fault} (in {facts.workdir})", "")
    if not facts.has_program:
        yield Finding(BAD, f"{_program_name(request.program)} is not in {facts.workdir}", "copy it there")
    yield from missing_programs({"tmux": facts.tmux, "ip": facts.ip}, setup)
    if facts.tmux_fault:
        yield broken_tmux(f"`tmux -V`: {facts.tmux_fault}")
    yield from _check_places(request, facts)
    yield from full_disk(facts.workdir, facts.free_bytes, facts.free_files)
    fault = facts.gpu_fault if request.config else ""  # a program of the user's own may need no GPU
    if not request.on_cpu and (0 < facts.gpus < host.slots or (fault and not 0 < host.slots <= facts.gpus)):
        yield missing_gpus(facts.gpus, host.slots, fault)
    if facts.leftovers:
        leftovers = pluralize(len(facts.leftovers), "process", "processes")
        stop = command_to_type("stop", request.hosts_file, request.run)
        yield Finding(BAD, f"{leftovers} of an earlier attempt left", f"run `{stop}` first")


def _check_places(request: LaunchRequest, facts: LaunchFacts) -> Iterator[Finding]:
    is_refused = facts.run_place.fault is DirectoryFault.REFUSES
    checkpoints = is_refused and request.saves and not request.settings.checkpoint.dir
    other = " or, if it is only for saves, --checkpoint.dir" if checkpoints else ""
    yield from unwritable(facts.run_place, f"fix that, or set workdir={other}")
    for key, place in facts.places.items():
        other = "another directory" if place.fault is DirectoryFault.REFUSES else "a directory of your own"
        yield from unwritable(place, f"name {other}", key)


def shared_directory(request: LaunchRequest) -> str:
    """Return the checkpoint directory if all hosts must share it; '' otherwise."""
    if not request.saves or request.settings.checkpoint.storage == "local":
        return ""
    return request.settings.checkpoint.dir or f"runs/{request.run}/checkpoints"


def unshared_hosts(request: LaunchRequest, answers: Facts) -> dict[str, str]:
    """Return hosts that do not share the head's checkpoint directory, with the reason."""
    head = next(iter(answers), "")
    why = str(not_sharing(head, shared_directory(request)))
    return {name: why for name, facts in answers.items() if answers[head].shares and facts.shares is False}


def user_faults(request: LaunchRequest, answers: Facts) -> dict[str, str]:
    """Return hosts whose user could not use the head's files: a run's files are private to one user."""
    faults: dict[str, str] = {}
    for name, facts in answers.items():
        head, head_facts = next(iter(answers.items()))
        shared, remedy = f"{facts.workdir}/runs", "give each a workdir= of its own"
        if facts.runs != head_facts.runs:
            if not (shared := shared_directory(request)):
                continue
            remedy = "save nothing with --checkpoint.every 0"
        if facts.uid != head_facts.uid:
            faults[name] = (
                f"the run would be {facts.user}'s there (uid {facts.uid}), but {head_facts.user}'s on {head} (uid {head_facts.uid}), "
                f"and neither can read what the other writes in {shared}; log in as one user everywhere, or {remedy}"
            )
    return faults


def _program_name(program: Sequence[str]) -> str:
    """A program without its own arguments: ``train.py``, ``-m mine``."""
    return " ".join(program[: 1 + program[0].startswith("-")])


def fault_list(faults: Mapping[str, str], n_hosts: int, end: str = ". Nothing was started") -> str:
    """Return one sentence about all hosts that are not fit."""
    hosts_by_reason: dict[str, list[str]] = {}
    for name, why in faults.items():
        hosts_by_reason.setdefault(why, []).append(name)
    clauses = "; ".join(f"{fold_names(names)}: {why}" for why, names in hosts_by_reason.items())
    return f"{clauses}{end}" if len(faults) == 1 else f"{len(faults)} of {n_hosts} hosts are not fit: {clauses}{end}"


KNOWN_BUGS_FILE = Path(__file__).with_name("known_bugs.toml")


@dataclasses.dataclass(frozen=True, slots=True)
class KnownBug:
    """A fault of some versions of a package."""

    package: str
    since: str  # the first version that has it
    level: Literal["warn", "refuse"]
    what: str  # as a clause about that version
    remedy: str
    until: str = ""  # the first version without it; "": none yet
    link: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # with these values alone

    @property
    def cure(self) -> str:
        """What to do, and where to read about it."""
        return f"{self.remedy}{fmt_if(' ({})', self.link)}"

    def applies_to(self, config: Config | None, versions: Mapping[str, str]) -> bool:
        """Return whether these versions with these settings have the bug."""
        version, until = parse_version(versions.get(self.package, "")), parse_version(self.until)
        if not version or version < parse_version(self.since) or (until and version >= until):
            return False
        return all(config and operator.attrgetter(key)(config) == value for key, value in self.settings.items())


def known_bugs(config: Config | None, versions: Mapping[str, str]) -> dict[str, KnownBug]:
    """Return the known bugs of these versions with these settings (None: unknown), by what to say of each."""
    return {
        f"{bug.package} {versions[bug.package]} {bug.what}": bug
        for bug in load_known_bugs()
        if bug.applies_to(config, versions)
    }


def parse_version(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 13, 0) of ``2.13.0+cpu``; () if it begins with none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@functools.cache
def load_known_bugs() -> tuple[KnownBug, ...]:
    """Return all known bugs."""
    return reader.build_record(
        tuple[KnownBug, ...], tomllib.loads(KNOWN_BUGS_FILE.read_text(encoding="utf-8"))["bug"], KNOWN_BUGS_FILE.name
    )


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
    request: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, *, is_restart: bool = False
) -> tuple[Facts, Rendezvous]:
    """Check that the run can start on every host (restart: ``is_restart``), and find out where they meet."""
    head, token = hosts[0], f"llama405b {secrets.token_hex(8)}"
    dialogue, head_facts, port = _ask_head(request, head, fleet, token)
    try:
        candidates = head_candidates(head, head_facts)
        requests = {
            host.name: dataclasses.replace(_probe_request(request, host, port, token), candidates=tuple(candidates))
            for host in hosts[1:]
        }
        outcomes: dict[str, LaunchFacts | HostError] = {head.name: head_facts}
        outcomes |= fleet.call_each(
            lambda name: fleet.call(name, launch_facts.probe, PROBE_TIMEOUT_S, requests[name]), requests
        )
    finally:
        if dialogue:
            dialogue.end_input()
            dialogue.close()
    answers = replies(outcomes)
    check_request(request, answers, port, is_restart=is_restart)
    faults = failure_texts(outcomes) | unfit_hosts(request, hosts, answers)
    rendezvous = find_rendezvous(head, candidates, answers, port)
    if rendezvous is None:
        raise RunError(fault_list(hosts_cut_off(head, answers, port) | faults, len(hosts)))
    if faults := hidden_addresses(rendezvous, answers) | faults:
        raise RunError(fault_list(faults, len(hosts)))
    if clauses := list_disagreements({name: facts.versions for name, facts in answers.items()}):
        setup = command_to_type("setup", request.hosts_file)
        raise RunError(
            f"the hosts differ: {'; '.join(clauses)}; install the same versions, or run `{setup}`. Nothing was started"
        )
    return answers, rendezvous


def _ask_head(
    request: LaunchRequest, head: Host, fleet: Fleet, token: str
) -> tuple[JsonSession | None, LaunchFacts | HostError, int]:
    """Probe the head, which then listens on the rendezvous port; tries several ports unless one is requested."""
    ports = [request.port] if request.port else random.sample(PORTS, PORT_TRIES)
    for port in ports:
        probe = _probe_request(request, head, port, token, is_head=True)
        probe = dataclasses.replace(probe, inputs=_input_check(request))
        try:
            dialogue = fleet.open_session(head.name, launch_facts.probe_head, probe)
            answer = dialogue.receive(LaunchFacts, PROBE_TIMEOUT_S)
        except HostError as error:
            return None, error, port
        if not answer.port_fault or port == ports[-1]:
            break
        dialogue.end_input()
    return dialogue, answer, port


def _input_check(request: LaunchRequest) -> InputCheck | None:
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
        whole=request.config.parallel.is_fsdp1,
        template=data.chat_template,
        resume=request.resume,
        checkpoints=request.checkpoints,
        fields=data.fields,
        skips=data.bad_records == "skip",
        extension=request.config.training.extend,
        resize=model.resize_vocabulary,
        adapter=request.config.adapter if request.config.adapter.path and request.resume == "no" else None,
    )


def head_candidates(head: Host, answer: LaunchFacts | HostError) -> list[str]:
    """Return addresses where the others may reach the head: ``address=`` only, else its own, private and fast first."""
    if head.address:
        return [head.address]
    own_addresses = answer.own if isinstance(answer, LaunchFacts) else ()
    ordered = sorted(own_addresses, key=lambda entry: (not is_private(entry.address), -_parse_mbit(entry.mbit)))
    return list(dict.fromkeys([*(entry.address for entry in ordered), ssh_address(head)]))


def _parse_mbit(text: str) -> int:
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


def hosts_cut_off(head: Host, answers: Facts, port: int) -> dict[str, str]:
    """Return the hosts that do not reach the head at every address, and what to do."""
    faults: dict[str, str] = {}
    if head.name not in answers:
        return faults
    for name, reached in [(name, facts.head) for name, facts in answers.items() if name != head.name]:
        failed = {address: reach.fault for address, reach in reached.items() if reach.fault}
        if not failed:
            continue
        tried = ", ".join(f"{address} ({fault})" for address, fault in failed.items())
        unresolved = all(reach.unresolved for reach in reached.values())
        without = [host for host in (head.name, name) if not answers[host].own and not head.address]
        if without and not unresolved:
            faults |= dict.fromkeys(without, str(NO_IPV4))
            continue
        faults[name] = (
            f"cannot reach {head.name} on TCP port {port} at {tried}; {reach_remedy(head.name, unresolved=unresolved)}"
        )
    return faults


def _rendezvous_at(candidate: str, head: Host, answers: Facts, port: int) -> Rendezvous:
    """Return how the hosts meet at an address of the head that all of them reach."""
    interfaces = {entry.address: entry.interface for entry in answers[head.name].own}
    own_address = candidate
    if candidate not in interfaces and candidate != LOOPBACK_ADDRESS:
        own_address = next(iter(interfaces), LOOPBACK_ADDRESS)
    attempts = {name: facts.head[candidate] for name, facts in answers.items() if candidate in facts.head}
    return Rendezvous(
        head=candidate,
        port=port,
        address={head.name: own_address, **{name: reach.mine for name, reach in attempts.items()}},
        interface={
            head.name: interfaces.get(own_address, "lo"),
            **{name: reach.interface for name, reach in attempts.items()},
        },
    )


def build_launch_plan(
    request: LaunchRequest, host_specs: Sequence[HostSpec], answers: Facts, rendezvous: Rendezvous, now: float
) -> Plan:
    """Build the plan from the answers."""
    launching = LaunchSpec(
        attempt=1 + max(facts.attempt for facts in answers.values()),
        created=now,
        token=secrets.token_hex(4),
        endpoint=f"{rendezvous.head}:{rendezvous.port}",
        owner=operator_name(),
    )
    return build_plan(request.spec(), host_specs, launching)


def host_spec(host: Host, answer: LaunchFacts, rendezvous: Rendezvous) -> HostSpec:
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
        address=rendezvous.address[host.name],
        interface=rendezvous.interface[host.name],
        places={key: answer.places[key].path for key in host.places},
    )


def check_training(request: LaunchRequest, plan: Plan, answers: Facts) -> None:
    """Parse the planned command with the trainer's own parser; check it against the ranks and what is resumed."""
    if request.config:
        train_command = command.parse(plan.program[2:])
        if train_command.config != request.config:
            raise UserError("the planned command does not match the request; please report this as a bug")
        axes = plan.axes(train_command.config.parallel)
        settings = train_command.config if request.evaluates else config.with_global_batch(train_command.config, axes)
        request.refuse_changes(next((facts.resumable for facts in answers.values() if facts.resumable), None), settings)
        llama, parallel = answers[plan.nodes[0].name].llama, settings.parallel
        if llama:
            check_groups(settings.optimizer.groups, lora_shapes(llama, settings.adapter) or llama.tensors(), parallel)
        check_mesh(axes, parallel, llama, settings.data.seq_len, max(node.slots for node in plan.nodes))
        for symptom, bug in known_bugs(settings, next(iter(answers.values())).versions).items():
            if bug.level == "refuse":
                raise UserError(f"{symptom}; {bug.cure}. Nothing was started")


def nccl_lines(request: LaunchRequest, host_specs: Sequence[HostSpec]) -> list[str]:
    """Return one line for each NCCL setting that launch makes: for which hosts, and why."""
    lines: dict[str, list[str]] = {}
    user_lines = {name: f"{name}={value} (--env)" for name, value in request.env.items()}
    for host in without_unused_gpus(request.spec(), host_specs):
        for name, (value, why) in nccl_reasons(host).items():
            lines.setdefault(user_lines.get(name, f"{name}={value} ({why})"), []).append(host.name)
    return [f"{fold_names(names)}: {line}" for line, names in lines.items()]


def _probe_request(request: LaunchRequest, host: Host, port: int, token: str, *, is_head: bool = False) -> ProbeRequest:
    packages = ("torch", "transformers") if request.config else ("torch",)
    is_known = not request.setup and "PYTHONPATH" not in request.env  # which may bring the program
    program = request.program if is_known else ()
    places = host.places
    if request.saves and request.settings.checkpoint.dir:
        places |= {CHECKPOINTS: request.settings.checkpoint.dir}
    if is_head and request.export:
        places |= {EXPORT: request.export}
    model = request.settings.model
    weights = model.path if request.config and model.weights == "files" else ""
    shared = shared_directory(request)
    extras = _extra_packages(request.config, is_head=is_head) if request.config and is_known else ()
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
        saves=request.saves,
    )


def _extra_packages(settings: Config, *, is_head: bool) -> tuple[str, ...]:
    """Return the packages that settings need on a host: FP8's on all hosts, trackers' on rank 0's."""
    on_all_hosts = ("torchao",) if settings.parallel.numerics == "fp8" else ()
    return (*on_all_hosts, *settings.tracking.to) if is_head else on_all_hosts


def hidden_addresses(rendezvous: Rendezvous, answers: Facts) -> dict[str, str]:
    """Return hosts whose interface has another address first: gloo gets an interface and uses its first."""
    faults = {}
    for name, facts in answers.items():
        address, interface = rendezvous.address[name], rendezvous.interface[name]
        first_address = next((entry.address for entry in facts.own if entry.interface == interface), address)
        if first_address != address and interface != "lo":
            faults[name] = (
                f"its {interface} has {first_address} before {address}, which the hosts use to meet, but gloo uses an interface's first "
                f"address; put {address} first, or on an interface of its own"
            )
    return faults
