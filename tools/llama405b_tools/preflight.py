"""Before a launch: ask every host, refuse what cannot work, and put the answers together as a plan."""

import getpass
import random
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b import command, config
from llama405b.errors import RunError, UserError
from llama405b_tools import commands
from llama405b_tools.asked import Asked
from llama405b_tools.commands import Node, Plan
from llama405b_tools.fleet import Fleet, Outcome, Reply, is_local
from llama405b_tools.hosts import Host
from llama405b_tools.transport import HostError

PROBE_TIMEOUT_S = 60.0
PORTS = range(20_000, 30_000)  # below the ephemeral ports, so that no outgoing connection sits on it
PORT_TRIES = 5


def probe(asked: Asked, hosts: Sequence[Host], fleet: Fleet) -> tuple[dict[str, Reply], int]:
    """Ask every host whether the run can start there; returns the answers and the rendezvous port.

    Raises:
        RunError: A host is not fit; names every host that is not.
        UserError: The run's name or the port is in use, or the checkpoint on the head cannot be used.
    """
    outcomes: dict[str, Outcome] = {}
    port = asked.port
    for _ in range(1 if asked.port else PORT_TRIES):
        port = asked.port or random.choice(PORTS)
        outcomes = fleet.ask_all("probe", _probe_requests(asked, hosts, port), PROBE_TIMEOUT_S)
        if not any(isinstance(found, dict) and found["head"] == "in use" for found in outcomes.values()):
            break
    faults = {name: str(found) for name, found in outcomes.items() if isinstance(found, HostError)}
    answers = {name: found for name, found in outcomes.items() if isinstance(found, dict)}
    refuse_input(asked, answers, port)
    for name, found in answers.items():
        if fault := _host_fault(found):
            faults[name] = fault
    if faults:
        raise RunError(fault_list(faults, len(hosts)))
    if clauses := commands.disagreements({name: found["facts"] for name, found in answers.items()}):
        raise RunError(f"the hosts differ: {'; '.join(clauses)}; install the same everywhere. Nothing was started")
    return answers, port


def refuse_input(asked: Asked, answers: Mapping[str, Reply], port: int) -> None:
    """Refuse what is wrong with the request rather than with a host.

    Raises:
        UserError: As ``probe`` says.
    """
    for name, found in answers.items():
        if found["alive"]:
            owner = f", launched by {found['owner']}" if found["owner"] else ""
            raise UserError(
                f"--run: {asked.run!r} is running on {name}{owner}; `llama405b stop --run {asked.run}` ends it, or take another name"
            )
        if found["run_exists"] and asked.resume == "no":
            raise UserError(f"--run: {asked.run!r} exists on {name}; take another name, or go on with --resume auto")
        if found["head"] == "in use":
            raise UserError(f"--port: {port} is in use on the head; leave --port out to get a free one")
        if not found["tmux"]:
            raise UserError(f"{name}: there is no tmux; install it there (apt-get install tmux). Nothing was started")
        if found["checkpoint"]:
            raise UserError(f"{name}: {found['checkpoint']}")


def make_plan(asked: Asked, hosts: Sequence[Host], answers: Mapping[str, Reply], port: int, now: float) -> Plan:
    """Put the answers together.

    Raises:
        UserError: Hosts that are one machine ask for more GPUs than it has.
    """
    slots = [host.slots or answers[host.name]["gpus"] or 1 for host in hosts]
    machines = [answers[host.name]["machine"] for host in hosts]
    on_cpu = asked.config is not None and asked.config.parallel.device == "cpu"
    gpus = [0 if on_cpu else answers[host.name]["gpus"] for host in hosts]
    devices = commands.device_env(list(zip(machines, slots, strict=True)), gpus)
    if on_cpu:
        devices = [{"CUDA_VISIBLE_DEVICES": ""} for _ in hosts]
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
                commands.first_ranks(slots)[i],
                found["workdir"],
                host.python or sys.executable,
                found["address"],
                found["interface"],
                threads | devices[i] | dict(asked.env),
            )
        )
    return Plan(
        run=asked.run,
        attempt=attempt,
        created=now,
        rdzv_id=f"{asked.run}-{attempt}-{secrets.token_hex(4)}",
        endpoint=f"{head_address(hosts)}:{port}",
        program=asked.training_program(),
        secrets=tuple(asked.secrets),
        nodes=tuple(nodes),
        checkpoint_dir=asked.config.checkpoint.dir if asked.config else "",
        owner=f"{getpass.getuser()}@{socket.gethostname()}",
        setup=asked.setup,
    )


def check_training(asked: Asked, plan: Plan) -> None:
    """Give the planned command to the trainer's own parser, and check the batch against the ranks.

    Raises:
        UserError: The trainer would refuse it.
    """
    if asked.config:
        parsed = command.parse(plan.program[2:])
        if parsed.config != asked.config:
            raise UserError("the planned command does not say what was asked; please report this as a bug")
        config.check_world(parsed.config, plan.world)


def head_address(hosts: Sequence[Host]) -> str:
    """Where the other hosts find the head."""
    head = hosts[0]
    if head.address or head.loopback or is_local(head):
        return commands.default_address(head, head.name)
    from llama405b_tools.ssh import read_config

    return commands.default_address(head, read_config().lookup(head.name).get("hostname", head.name))


def _probe_requests(asked: Asked, hosts: Sequence[Host], port: int) -> dict[str, Any]:
    head = head_address(hosts)
    packages = ["torch", "transformers"] if asked.config else ["torch"]
    requests: dict[str, Any] = {}
    for i, host in enumerate(hosts):
        requests[host.name] = {
            "run": asked.run,
            "host": host.name,
            "head_address": head,
            "is_head": i == 0,
            "port": port,
            "packages": packages,
        }
        if i == 0 and asked.config and asked.config.model.path != config.DEMO_MODEL:
            requests[host.name]["checkpoint"] = {
                "path": asked.config.model.path,
                "seq_len": asked.config.data.seq_len,
                "layers": asked.config.model.layers,
                "random": asked.config.model.weights == "random",
            }
    return requests


def _host_fault(found: Reply) -> str:
    if missing := [name for name, version in found["facts"].items() if version == "missing"]:
        return f"{', '.join(missing)} is not installed for its python; install it there"
    if found["head"]:
        return f"{found['head']}; give the head an address= that all hosts reach"
    if not found["writable"]:
        return f"{found['workdir']}/runs is no directory that can be written; mend it, or set workdir="
    if not found["ip"]:
        return "there is no `ip` program; install iproute2 there"
    if not found["address"] or not found["interface"]:
        return "no route to the head's address; check address= in the hosts file"
    if found["leftovers"]:
        return f"{len(found['leftovers'])} processes of an earlier attempt are left; run `llama405b stop` first"
    return ""


def fault_list(faults: Mapping[str, str], n_hosts: int, end: str = ". Nothing was started") -> str:
    """One sentence for all hosts that are not fit."""
    clauses = "; ".join(f"{name}: {why}" for name, why in faults.items())
    return f"{clauses}{end}" if len(faults) == 1 else f"{len(faults)} of {n_hosts} hosts are not fit: {clauses}{end}"
