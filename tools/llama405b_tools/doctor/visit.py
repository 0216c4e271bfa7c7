"""A visit to every host: its facts, and how it reaches every other."""

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping, Sequence

from llama405b.capacity import estimate, part, run_shape
from llama405b.capacity.choice import chosen
from llama405b.capacity.known import known_shape
from llama405b.capacity.outlook import is_predicted
from llama405b.contract import config
from llama405b.contract.adapters import held_bytes
from llama405b.contract.mesh import Axes
from llama405b.contract.schema import Checkpoint, Config
from llama405b_tools.doctor.host_facts import HostFacts, PeersReply
from llama405b_tools.doctor.rules.findings import Finding, Peers
from llama405b_tools.doctor.rules.of_host import BAD, Needs
from llama405b_tools.hosts.dialogue import Dialogue
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.outcomes import replies, unanswered
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.remote import standalone

FACTS_TIMEOUT_S, PEERS_TIMEOUT_S, HASH_TIMEOUT_S = 45.0, 20.0, 3600.0
DEFAULT_PORT = 29_400  # torchrun's default


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """Results of one visit to the hosts."""

    facts: dict[str, HostFacts]
    lost: dict[str, str]
    skew_s: dict[str, float]  # host's clock minus this one's
    latency_ms: dict[str, float]
    peers: Peers
    mute: dict[str, str]  # hosts that did not report which others they reach, and why


def needs_of(asked: Config | None, preset: str, hosts: Sequence[Host]) -> Needs:
    """Compute what a run needs on the host with the most ranks: its state, and on GPUs an estimate of its peak."""
    if asked is None:
        return Needs()
    needs = Needs(
        weights=asked.model.path if asked.model.path != config.DEMO_MODEL else "",
        cuda=asked.parallel.device != "cpu",
        shared=_shared_directory(asked.checkpoint),
        settings=asked,
    )
    llama = known_shape(asked, preset)
    if llama is None:
        return needs
    slots = [host.slots or 8 for host in hosts]
    most, world = max(slots), sum(slots)
    asked = chosen(asked, llama, world, most)
    axes = Axes.of(asked.parallel, world, most)
    needs = dataclasses.replace(needs, mesh=axes.told)
    held = part.held_elements(llama, axes, 0, asked.parallel.chunks)
    on_device, on_host = (int(each * held) for each in held_bytes(llama, asked.adapter, asked.parallel))
    if not needs.cuda:
        return dataclasses.replace(needs, ram_bytes=(on_device + on_host) * most)
    needs = dataclasses.replace(needs, gpu_bytes=on_device, ram_bytes=on_host * most)
    if not is_predicted(asked):
        return needs
    load = run_shape.RunShape.of(llama, asked, world, axes)
    predicted = estimate.estimate(load)
    at_peak = predicted.host_bytes * load.hosts / world * most  # the estimate's hosts have eight ranks each
    return dataclasses.replace(
        needs,
        gpu_peak_bytes=int(predicted.gpu_bytes),
        gpu_reserved_bytes=int(predicted.gpu_reserved_bytes or 0),
        ram_peak_bytes=int(at_peak),
    )


def _shared_directory(saving: Checkpoint) -> str:
    """Return the directory of checkpoints that all hosts must see; '' if each has its own, or nothing is saved."""
    return (saving.dir or "runs") if saving.cadence.saves and saving.storage == "shared" else ""


class _Questions:
    """Two questions to each host in one dialogue, the second made from all answers to the first."""

    def __init__(self, fleet: Fleet, port: int, needs: Needs) -> None:
        self.fleet, self.head = fleet, next(iter(fleet.hosts))
        self.shared = needs.shared
        local = [name for name, host in fleet.hosts.items() if host.loopback]  # one machine: they share its ports
        self.ports = dict.fromkeys(fleet.hosts, port) | {name: port + i for i, name in enumerate(local)}
        self.needs = dict.fromkeys(fleet.hosts, Needs()) | {self.head: needs}
        self.tokens = {name: f"llama405b {name} {secrets.token_hex(8)}" for name in fleet.hosts}
        self.dialogues: dict[str, Dialogue] = {}
        self.latency_ms: dict[str, float] = {}

    def facts(self, name: str) -> HostFacts:
        """Ask a host for its facts."""
        connection = self.fleet.connection(name)
        needs = self.needs[name]
        workdir = self.fleet.workdir(name)
        began = time.monotonic()
        alive = connection.run("command -v python3 || echo none", "", FACTS_TIMEOUT_S)
        self.latency_ms[name] = round((time.monotonic() - began) * 1000, 1)
        if "none" in alive.out:
            raise HostError("there is no python3; run there: apt-get update && apt-get install python3")
        timeout_s, spare_s = FACTS_TIMEOUT_S, 5
        if needs.hash_weights:
            timeout_s, spare_s = HASH_TIMEOUT_S, 10
        request = {
            "port": self.ports[name],
            "token": self.tokens[name],
            "workdir": workdir,
            "python": self.fleet.python(name),
            "paths": [workdir, *self.fleet.hosts[name].places.values()],
            "rates": True,
            "weights": needs.weights,
            "hash": needs.hash_weights,
            "within_s": timeout_s - spare_s,
            "mark": self.shared if name == self.head else "",
        }
        stdin = standalone.standard_input("hostprobe", request)
        self.dialogues[name] = Dialogue(connection.stream(standalone.command("hostprobe"), stdin))
        return self.dialogues[name].answer(HostFacts, timeout_s)

    def peers(self, name: str, facts: Mapping[str, HostFacts], candidates: Mapping[str, list[str]]) -> PeersReply:
        """Ask a host how it reaches the others, and whether it sees what the head wrote."""
        peers = [
            {"name": other, "addresses": candidates[other], "ports": facts[other].ports, "token": self.tokens[other]}
            for other in candidates
            if other != name
        ]
        mark = self.shared if self.head in facts and facts[self.head].marked else ""
        second = {"peers": peers, "mark": mark, "token": self.tokens[self.head]}
        self.dialogues[name].say(json.dumps(second) + "\n")
        return self.dialogues[name].answer(PeersReply, PEERS_TIMEOUT_S)

    def end(self) -> None:
        """Tell all to end, then wait for each."""
        for dialogue in self.dialogues.values():
            dialogue.end_input()
        for dialogue in self.dialogues.values():
            dialogue.close()


def look(fleet: Fleet, port: int, needs: Needs) -> Visit:
    """Ask every host for its facts, then how it reaches every other."""
    questions = _Questions(fleet, port, needs)
    outcomes = fleet.each(questions.facts)
    answered = {name: found for name, found in outcomes.items() if isinstance(found, HostFacts)}
    facts = {name: dataclasses.replace(found, slots=fleet.slots(name)) for name, found in answered.items()}
    skew_s = {name: round(found.now - questions.dialogues[name].heard_at, 2) for name, found in facts.items()}
    candidates = {name: _addresses_of(fleet.hosts[name], found) for name, found in facts.items()}
    reached = fleet.each(lambda name: questions.peers(name, facts, candidates), facts)
    questions.end()
    answers = replies(reached)
    peers = Peers(
        reach={name: found.peers for name, found in answers.items()},
        candidates=candidates,
        ports={name: found.ports for name, found in facts.items()},
        chosen={name: fleet.hosts[name].address for name in facts},
        unshared=[name for name, found in answers.items() if found.sees is False],
    )
    return Visit(facts, unanswered(outcomes), skew_s, questions.latency_ms, peers, unanswered(reached))


def _addresses_of(host: Host, found: HostFacts) -> list[str]:
    """Addresses at which the others may reach a host: the one in the hosts file, then its own."""
    own = [entry.address for entry in found.addresses]
    if host.loopback:
        own = []
    return list(dict.fromkeys(filter(None, [host.address, *own])))


def port_findings(facts: Mapping[str, HostFacts], port: int) -> list[Finding]:
    """Report hosts on which the requested port is not available."""
    held = tuple(name for name, found in facts.items() if found.port_fault)
    return [Finding(BAD, held, f"port {port} is in use", "choose another --port")] if held else []
