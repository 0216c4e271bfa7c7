"""A visit to every host: its facts, and its way to every other."""

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract import config, weights
from llama405b.contract.schema import BYTES_PER_PARAMETER, Config
from llama405b_tools.doctor.facts import HostFacts, PeersReply
from llama405b_tools.doctor.rules.findings import Finding, Peers
from llama405b_tools.doctor.rules.of_host import BAD, Needs
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import carried

FACTS_TIMEOUT_S, PEERS_TIMEOUT_S, HASH_TIMEOUT_S = 45.0, 20.0, 3600.0
DEFAULT_PORT = 29_400  # torchrun's own


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """What one visit to the hosts brought."""

    facts: dict[str, HostFacts]
    lost: dict[str, str]
    skew_s: dict[str, float]  # host's clock minus this one's
    latency_ms: dict[str, float]
    peers: Peers
    mute: dict[str, str]  # hosts that did not tell whom they reach, and why


def needs_of(asked: Config | None, preset: str, hosts: Sequence[Host]) -> Needs:
    """What a run takes on the fullest host: its state alone, without activations."""
    if asked is None:
        return Needs()
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))
    directory = Path(asked.model.path)
    if (directory / "config.json").is_file():
        parameters = weights.read_llama(directory).parameters
    elif preset in known:
        parameters = weights.parse_llama(known[preset], preset).parameters
    else:
        parameters = 0
    slots = [host.slots or 8 for host in hosts]
    each = parameters * BYTES_PER_PARAMETER[asked.parallel.numerics] // sum(slots)
    offload = asked.parallel.cpu_offload or asked.parallel.device == "cpu"
    path = "" if asked.model.path == config.DEMO_MODEL else asked.model.path
    return Needs(each * max(slots) if offload else 0, 0 if offload else each, path, asked.parallel.device != "cpu")


def look(fleet: Fleet, port: int, needs: Needs) -> Visit:
    """Ask every host for its facts, then for its way to every other."""
    dialogues: dict[str, Dialogue] = {}
    tokens = {name: f"llama405b {name} {secrets.token_hex(8)}" for name in fleet.hosts}
    latency_ms: dict[str, float] = {}

    def first(name: str) -> HostFacts:
        connection = fleet.connection(name)
        began = time.monotonic()
        alive = connection.run("command -v python3 || echo none", "", FACTS_TIMEOUT_S)
        latency_ms[name] = round((time.monotonic() - began) * 1000, 1)
        if "none" in alive.out:
            raise HostError("there is no python3; type there: apt-get install python3")
        stdin = carried.standard_input("hostprobe", _request(fleet, name, port, tokens[name], needs))
        dialogues[name] = Dialogue(connection.stream(carried.command("hostprobe"), stdin))
        return dialogues[name].answer(
            HostFacts, HASH_TIMEOUT_S if needs.hash_weights and name == head else FACTS_TIMEOUT_S
        )

    head = next(iter(fleet.hosts))
    outcomes = fleet.each(first)
    facts = {name: found for name, found in outcomes.items() if isinstance(found, HostFacts)}
    lost = {name: str(found) for name, found in outcomes.items() if isinstance(found, HostError)}
    skew_s = {name: round(found.now - dialogues[name].heard_at, 2) for name, found in facts.items()}
    candidates = {name: addresses_of(fleet.hosts[name], found) for name, found in facts.items()}
    ports = {name: found.ports for name, found in facts.items()}

    def second(name: str) -> PeersReply:
        peers = [
            {"name": other, "addresses": candidates[other], "ports": ports[other], "token": tokens[other]}
            for other in facts
            if other != name
        ]
        dialogues[name].say(json.dumps({"peers": peers}) + "\n")
        return dialogues[name].answer(PeersReply, PEERS_TIMEOUT_S)

    reached = fleet.each(second, facts)
    for dialogue in dialogues.values():
        dialogue.end_input()
    for dialogue in dialogues.values():
        dialogue.close()
    reach = {name: found.peers for name, found in reached.items() if isinstance(found, PeersReply)}
    chosen = {name: fleet.hosts[name].address for name in facts}
    mute = {name: str(found) for name, found in reached.items() if isinstance(found, HostError)}
    return Visit(facts, lost, skew_s, latency_ms, Peers(reach, candidates, ports, chosen), mute)


def addresses_of(host: Host, found: HostFacts) -> list[str]:
    """Addresses at which the others may reach a host: what the hosts file says, then its own."""
    own = [entry.address for entry in found.addresses]
    if host.loopback:
        own = ["127.0.0.1"]
    return list(dict.fromkeys([*([host.address] if host.address else []), *own]))


def _request(
    fleet: Fleet, name: str, port: int, token: str, needs: Needs
) -> dict[str, str | int | bool | float | list[str]]:
    head = next(iter(fleet.hosts))
    local = [other for other, host in fleet.hosts.items() if host.loopback]
    own_port = port + local.index(name) if name in local else port  # hosts that are one machine share its ports
    return {
        "port": own_port,
        "token": token,
        "workdir": fleet.workdir(name),
        "python": fleet.python(name),
        "paths": [fleet.workdir(name), *fleet.hosts[name].places.values()],
        "rates": True,
        "weights": needs.weights if name == head else "",
        "hash": needs.hash_weights,
        "within_s": HASH_TIMEOUT_S - 10 if needs.hash_weights and name == head else FACTS_TIMEOUT_S - 5,
    }


def port_findings(facts: Mapping[str, HostFacts], port: int) -> list[Finding]:
    """Hosts on which the port that was asked for is not to be had."""
    held = tuple(name for name, found in facts.items() if found.port_fault)
    return [Finding(BAD, held, f"port {port} is in use there", "take another --port")] if held else []
