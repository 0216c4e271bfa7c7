"""Before a launch: ask every host, refuse what cannot work, and put the answers together as a plan."""

import dataclasses
import getpass
import random
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence

from llama405b.contract import command, config
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.plan import Node, Plan
from llama405b_tools.hosts.fleet import Fleet, Outcome, Reply, ssh_address
from llama405b_tools.hosts.inventory import LOOPBACK, Host
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.hosts.typed import front_door, hosts_argument
from llama405b_tools.machine import fabric
from llama405b_tools.machine.addresses import is_private
from llama405b_tools.machine.sameness import disagreements
from llama405b_tools.run.plan import device_env, first_ranks
from llama405b_tools.run.request import LaunchRequest
from llama405b_tools.run.streams import Dialogue
from llama405b_tools.text.fold import fold_names

PROBE_TIMEOUT_S = 60.0
LEAST_FREE_BYTES = 64 << 20  # for logs
PORTS = range(20_000, 30_000)  # below the ephemeral ports, so that no outgoing connection sits on it
PORT_TRIES = 5
PLACES = {"cache": "HF_HOME", "scratch": "TMPDIR"}  # key of the hosts file -> variable of the ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Where the hosts meet: measured, never taken from the names that SSH uses."""

    head: str  # the head's address on the training network
    port: int  # of the rendezvous, free and reached by all
    address: Mapping[str, str]  # each host's own, on its way there
    interface: Mapping[str, str]  # that carries it


def probe(
    asked: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, *, again: bool = False
) -> tuple[dict[str, Reply], Way]:
    """Ask every host whether the run can start there, and find out where they meet.

    ``again``: a restart, at which whatever is wrong is a host's fault, and may pass.

    Raises:
        RunError: A host is not fit; names every host that is not.
        UserError: The run's name or the port is in use, or the checkpoint on the head cannot be used.
    """
    head, token = hosts[0], f"llama405b {secrets.token_hex(8)}"
    listening, first, port = _ask_head(asked, hosts, fleet, token)
    try:
        candidates = candidates_of(head, first)
        requests = {
            host.name: _request(asked, host, port, token) | {"is_head": False, "candidates": candidates}
            for host in hosts[1:]
        }
        outcomes: dict[str, Outcome] = {head.name: first, **fleet.ask_all("probe", requests, PROBE_TIMEOUT_S)}
    finally:
        if listening:
            listening.end_input()
            listening.close()
    answers = {name: found for name, found in outcomes.items() if isinstance(found, dict)}
    try:
        refuse_input(asked, answers, port)
    except UserError as error:
        if again:
            raise RunError(str(error)) from None
        raise
    faults = {name: str(found) for name, found in outcomes.items() if isinstance(found, HostError)}
    slots = {host.name: 0 if _on_cpu(asked) else host.slots for host in hosts}
    faults |= {name: fault for name, found in answers.items() if (fault := _host_fault(found, slots[name]))}
    way = meet(head, candidates, answers, port)
    faults = (way if isinstance(way, dict) else hidden_addresses(way, answers)) | faults
    if faults:
        raise RunError(fault_list(faults, len(hosts)))
    assert isinstance(way, Way)
    if clauses := disagreements({name: found["facts"] for name, found in answers.items()}):
        raise RunError(f"the hosts differ: {'; '.join(clauses)}; install the same everywhere. Nothing was started")
    return answers, way


def _ask_head(
    asked: LaunchRequest, hosts: Sequence[Host], fleet: Fleet, token: str
) -> tuple[Dialogue | None, Outcome, int]:
    """Probe the head, which then listens on the rendezvous port; tries several ports unless one is asked for."""
    head, port = hosts[0].name, asked.port
    for _ in range(1 if asked.port else PORT_TRIES):
        port = asked.port or random.choice(PORTS)
        request = _request(asked, hosts[0], port, token) | {"is_head": True, "candidates": []}
        if asked.config and asked.config.model.path != config.DEMO_MODEL:
            request["checkpoint"] = {
                "path": asked.config.model.path,
                "seq_len": asked.config.data.seq_len,
                "layers": asked.config.model.layers,
                "random": asked.config.model.weights == "random",
            }
        try:
            dialogue = Dialogue(fleet.stream(head, "probe", request))
            answer = dialogue.answer(PROBE_TIMEOUT_S)
        except HostError as error:
            return None, _why(fleet, head, asked.run, error), port
        if not answer["port_fault"] or asked.port:
            return dialogue, answer, port
        dialogue.end_input()
    return dialogue, answer, port


def _why(fleet: Fleet, head: str, run: str, error: HostError) -> HostError:
    """A better word for why a host's stream failed: from a question that hears its standard error."""
    try:
        fleet.ask(head, "status", {"host": head, "run": run}, PROBE_TIMEOUT_S)
    except HostError as better:
        return better
    return error


def candidates_of(head: Host, answer: Outcome) -> list[str]:
    """Addresses at which the others may find the head: ``address=`` alone, else its own, fast and private ones first."""
    if head.address or head.loopback:
        return [head.address or "127.0.0.1"]
    own = answer["own"] if isinstance(answer, dict) else []
    own = sorted(own, key=lambda entry: (not is_private(entry["address"]), -_mbit(entry["mbit"])))
    return list(dict.fromkeys([*(entry["address"] for entry in own), ssh_address(head)]))


def _mbit(text: str) -> int:
    return int(text) if text.lstrip("-").isdigit() else 0


def meet(head: Host, candidates: Sequence[str], answers: Mapping[str, Reply], port: int) -> Way | dict[str, str]:
    """The first candidate that every other host reaches; else, by host, why there is none."""
    others = {name: found["head"] for name, found in answers.items() if name != head.name}
    if head.name not in answers:
        return {}
    own = {entry["address"]: entry["interface"] for entry in answers[head.name]["own"]}
    for candidate in candidates:
        if all(found[candidate]["fault"] == "" for found in others.values()):
            loopback = LOOPBACK.fullmatch(candidate) is not None
            default = next(iter(own), "127.0.0.1")
            mine = "127.0.0.1" if loopback else candidate if candidate in own else default
            return Way(
                head="127.0.0.1" if loopback else candidate,
                port=port,
                address={head.name: mine, **{name: found[candidate]["mine"] for name, found in others.items()}},
                interface={
                    head.name: own.get(mine, "lo"),
                    **{name: found[candidate]["interface"] for name, found in others.items()},
                },
            )
    faults = {}
    for name, found in others.items():
        failed = {address: result["fault"] for address, result in found.items() if result["fault"]}
        if failed:
            tried = ", ".join(f"{address} ({fault})" for address, fault in failed.items())
            faults[name] = (
                f"cannot reach {head.name} on TCP port {port} at {tried}; open TCP ports 20000-65535 between the hosts, "
                f"or give {head.name} an address= that all of them reach"
            )
    return faults


def refuse_input(asked: LaunchRequest, answers: Mapping[str, Reply], port: int) -> None:
    """Refuse what is wrong with the request rather than with a host.

    Raises:
        UserError: As ``probe`` says.
    """
    for name, found in answers.items():
        if found["alive"]:
            owner = f", launched by {found['owner']}" if found["owner"] else ""
            stop = f"{front_door()} stop{hosts_argument(asked.hosts_file)} --run {asked.run}"
            raise UserError(f"--run: {asked.run!r} is running on {name}{owner}; `{stop}` ends it, or take another name")
        if found["run_exists"] and asked.resume == "no":
            raise UserError(f"--run: {asked.run!r} exists on {name}; take another name, or go on with --resume auto")
        if found["port_fault"]:
            why = "in use" if "in use" in found["port_fault"] else f"not to be had ({found['port_fault']})"
            raise UserError(f"--port: {port} is {why} on the head; leave --port out to get a free one")
        if not found["tmux"]:
            raise UserError(f"{name}: there is no tmux; install it there (apt-get install tmux). Nothing was started")
        if found["checkpoint"]:
            raise UserError(f"{name}: {found['checkpoint']}")


def make_plan(asked: LaunchRequest, hosts: Sequence[Host], answers: Mapping[str, Reply], way: Way, now: float) -> Plan:
    """Put the answers together.

    Raises:
        UserError: Hosts that are one machine ask for more GPUs than it has.
    """
    slots = [host.slots or answers[host.name]["gpus"] or 1 for host in hosts]
    machines = [answers[host.name]["machine"] for host in hosts]
    on_cpu = _on_cpu(asked)
    gpus = [0 if on_cpu else answers[host.name]["gpus"] for host in hosts]
    devices = device_env(list(zip(machines, slots, strict=True)), gpus)
    if on_cpu:
        devices = [{"CUDA_VISIBLE_DEVICES": ""} for _ in hosts]
    nccl = {} if on_cpu else {name: nccl_env(found, way.interface[name]) for name, found in answers.items()}
    attempt = 1 + max(answers[host.name]["attempt"] for host in hosts)
    nodes = []
    for i, host in enumerate(hosts):
        found = answers[host.name]
        on_machine = sum(s for s, machine in zip(slots, machines, strict=True) if machine == machines[i])
        threads = {"OMP_NUM_THREADS": str(max(1, found["cores"] // on_machine))}
        nodes.append(
            Node(
                host.name,
                slots[i],
                first_ranks(slots)[i],
                found["workdir"],
                host.python or sys.executable,
                way.address[host.name],
                way.interface[host.name],
                threads
                | devices[i]
                | nccl.get(host.name, {})
                | places_env({key: place["path"] for key, place in found["places"].items()})
                | dict(asked.env),
            )
        )
    return Plan(
        run=asked.run,
        attempt=attempt,
        created=now,
        rdzv_id=f"{asked.run}-{attempt}-{secrets.token_hex(4)}",
        endpoint=f"{way.head}:{way.port}",
        program=asked.training_program(),
        secrets=tuple(asked.secrets),
        nodes=tuple(nodes),
        checkpoint_dir=asked.config.checkpoint.dir if asked.config else "",
        owner=f"{getpass.getuser()}@{socket.gethostname()}",
        setup=asked.setup,
        refuse_sockets=bool(nccl) and all(nccl.values()) and not asked.allow_sockets,
    )


def places_env(places: Mapping[str, str]) -> dict[str, str]:
    """What ``cache=`` and ``scratch=`` of the hosts file mean to the ranks."""
    return {PLACES[key]: path for key, path in places.items()}


def check_training(asked: LaunchRequest, plan: Plan) -> None:
    """Give the planned command to the trainer's own parser, and check the batch against the ranks.

    Raises:
        UserError: The trainer would refuse it.
    """
    if asked.config:
        parsed = command.parse(plan.program[2:])
        if parsed.config != asked.config:
            raise UserError("the planned command does not say what was asked; please report this as a bug")
        config.check_world(parsed.config, plan.world)


def hidden_addresses(way: Way, answers: Mapping[str, Reply]) -> dict[str, str]:
    """Hosts whose interface has another address first: gloo is told interfaces, and takes the first address."""
    faults = {}
    for name, found in answers.items():
        address, interface = way.address[name], way.interface[name]
        first = next((entry["address"] for entry in found["own"] if entry["interface"] == interface), address)
        if first != address and interface != "lo":
            faults[name] = (
                f"its {interface} has {first} before {address}, which the hosts meet at, and gloo takes an interface's first "
                f"address; put {address} first, or on an interface of its own"
            )
    return faults


def nccl_env(found: Reply, interface: str) -> dict[str, str]:
    """What NCCL is told of a host's RDMA devices; {} where it has no GPU, or none of those."""
    ports = fabric.read(found["rdma"])
    if not found["gpus"] or not fabric.has_rdma(ports):
        return {}
    return {name: value for name, (value, _) in fabric.nccl_env(ports, interface).items()}


def nccl_reasons(asked: LaunchRequest, answers: Mapping[str, Reply], way: Way) -> list[str]:
    """One line for each setting of NCCL that launch makes: for which hosts, and why."""
    lines: dict[str, list[str]] = {}
    for host, found in answers.items():
        if nccl_env(found, way.interface[host]):
            for name, (value, why) in fabric.nccl_env(fabric.read(found["rdma"]), way.interface[host]).items():
                said = f"{name}={asked.env[name]} (--env)" if name in asked.env else f"{name}={value} ({why})"
                lines.setdefault(said, []).append(host)
    return [f"{fold_names(hosts)}: {line}" for line, hosts in lines.items()]


def _request(asked: LaunchRequest, host: Host, port: int, token: str) -> Reply:
    packages = ["torch", "transformers"] if asked.config else ["torch"]
    return {
        "run": asked.run,
        "host": host.name,
        "port": port,
        "token": token,
        "packages": packages,
        "places": host.places,
    }


def _on_cpu(asked: LaunchRequest) -> bool:
    return asked.config is not None and asked.config.parallel.device == "cpu"


def _host_fault(found: Reply, slots: int) -> str:
    if missing := [name for name, version in found["facts"].items() if version == "missing"]:
        return f"{', '.join(missing)} is not installed for its python; install it there"
    if not found["writable"]:
        return f"{found['workdir']}/runs is no directory that can be written; mend it, or set workdir="
    for key, place in found["places"].items():
        if not place["writable"]:
            return f"{key}={place['path']} cannot be made or written; name a directory of your own"
    if not found["ip"]:
        return "there is no `ip` program; install iproute2 there"
    if found["gpus"] and slots > found["gpus"]:
        return f"it has {found['gpus']} GPUs, but slots={slots}; look with nvidia-smi, or lower slots="
    if found["free_bytes"] < LEAST_FREE_BYTES:
        free = found["free_bytes"] / (1 << 20)
        return (
            f"its disk is full ({free:.0f} MiB free at {found['workdir']}); make room, or set workdir= on another disk"
        )
    if found["leftovers"]:
        return f"{len(found['leftovers'])} processes of an earlier attempt are left; run `llama405b stop` first"
    return ""


def fault_list(faults: Mapping[str, str], n_hosts: int, end: str = ". Nothing was started") -> str:
    """One sentence for all hosts that are not fit."""
    clauses = "; ".join(f"{name}: {why}" for name, why in faults.items())
    return f"{clauses}{end}" if len(faults) == 1 else f"{len(faults)} of {n_hosts} hosts are not fit: {clauses}{end}"
