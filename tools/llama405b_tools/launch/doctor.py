"""Doctor: collect the facts of every host and how it reaches every other, and print the findings.

Problems are printed first, then all hosts side by side; hosts that are alike share a line. ``doctor --deep`` also loads every GPU and
link by probes, and names the outliers.
"""

import collections
import dataclasses
import json
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from llama405b.contract.errors import UserError, counted, given
from llama405b.predict import estimate, run_shape
from llama405b.predict.search import chosen, is_predicted, known_shape
from llama405b.settings import config
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Checkpoint, Config
from llama405b.spec.models import adapter_bytes
from llama405b.spec.probes import DEEP, Figure, Probe, ProbeResult
from llama405b_tools.hosts import transport
from llama405b_tools.hosts.fleet import Dialogue, Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, replies, unanswered
from llama405b_tools.launch.host_facts import HostFacts, PeersReply
from llama405b_tools.launch.host_rules import BAD, GIB, NOTE, WARN, Finding, Needs, Peers
from llama405b_tools.launch.probes import run_probes
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.text.figures import DASH, format_table
from llama405b_tools.text.words import clean, fold_names

FACTS_TIMEOUT_S, PEERS_TIMEOUT_S, HASH_TIMEOUT_S = 45.0, 20.0, 3600.0
DEFAULT_PORT = 29_400  # torchrun's default


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """Results of one survey of the hosts."""

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
    held = run_shape.held_elements(llama, axes, 0, asked.parallel.chunks)
    on_device, on_host = (int(each * held) for each in adapter_bytes(llama, asked.adapter, asked.parallel))
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
    """Two queries to each host in one session; the second depends on all hosts' answers to the first."""

    def __init__(self, fleet: Fleet, port: int, needs: Needs) -> None:
        self.fleet, self.head = fleet, next(iter(fleet.hosts))
        self.shared = needs.shared
        self.saves = needs.settings.checkpoint.dir if needs.settings else ""
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
        saves = self.saves if self.saves.startswith(("/", "~")) else f"{workdir}/{self.saves}".rstrip("/")
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
            "paths": list(dict.fromkeys([workdir, *self.fleet.hosts[name].places.values(), saves])),
            "saves": saves,
            "rates": True,
            "weights": needs.weights,
            "hash": needs.hash_weights,
            "within_s": timeout_s - spare_s,
            "mark": self.shared if name == self.head else "",
        }
        stdin = transport.standalone_input("hostprobe", request)
        self.dialogues[name] = Dialogue(connection.stream(transport.standalone_command("hostprobe"), stdin))
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
        """End all sessions, then wait for each."""
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
    """Return the addresses at which others may reach a host: the hosts file's, then its own."""
    own = [entry.address for entry in found.addresses]
    if host.loopback:
        own = []
    return list(dict.fromkeys(filter(None, [host.address, *own])))


def port_findings(facts: Mapping[str, HostFacts], port: int) -> list[Finding]:
    """Report hosts on which the requested port is not available."""
    held = tuple(name for name, found in facts.items() if found.port_fault)
    return [Finding(BAD, held, f"port {port} is in use", "choose another --port")] if held else []


HEADINGS = ("host", "fit", "address", "ssh", "clock", "GPUs", "RDMA", "RAM", "workdir free", "write", "python", "torch")


def print_report(visit: Visit, found: Sequence[Finding], names: Sequence[str], *, deep: bool, mesh: str = "") -> None:
    """Print problems first, then all hosts side by side, and the mesh that their ranks would make."""
    for finding in found:
        where = "all hosts" if len(finding.hosts) == len(names) > 1 else fold_names(finding.hosts)
        print(clean(f"{finding.level.replace(BAD, BAD.upper())}  {where}: {finding.what}"))
        print(clean(f"     → {finding.remedy}"))
    if found:
        print()
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        rows.setdefault(_row(name, visit, found), []).append(name)
    print(format_table(HEADINGS, [(fold_names(alike), *row) for row, alike in rows.items()]), flush=True)
    never = "" if deep else "; links and GPUs were not tested under load: add --deep"
    split = given("; ranks as {}", mesh)
    print(f"\n{counted(len(names), 'host')}: {_verdict([finding.level for finding in found])}{split}{never}")


def _verdict(levels: Sequence[str]) -> str:
    if BAD in levels:
        return f"not fit: {counted(levels.count(BAD), 'problem')}"
    if WARN in levels:
        return f"fit, with {counted(levels.count(WARN), 'warning')}"
    return "fit"


def _row(name: str, visit: Visit, found: Sequence[Finding]) -> tuple[str, ...]:
    if name in visit.lost:
        return ("NO", *[DASH] * 10)
    levels = {finding.level for finding in found if name in finding.hosts}
    fit = next((word for level, word in ((BAD, "NO"), (WARN, "warn")) if level in levels), "yes")
    facts = visit.facts[name]
    return (
        fit,
        visit.peers.training_address(name) or DASH,
        f"{visit.latency_ms[name]:.0f} ms",
        f"{visit.skew_s[name]:+z.1f} s",
        _counted([gpu.name.removeprefix("NVIDIA ") for gpu in facts.devices]),
        _counted([f"x {port.gbit:g} Gb/s" for port in facts.rdma_ports if port.up]),
        *_room(facts),
        facts.packages.get("python", DASH),
        facts.packages.get("torch", DASH),
    )


def _room(facts: HostFacts) -> tuple[str, str, str]:
    """Return RAM, and the free space and write rate of the working directory's disk."""
    memory, work = facts.memory, facts.working_disk
    ram = free = rate = DASH
    if memory:
        ram = f"{memory.total / GIB:.0f} GiB"
    if work:
        free = DASH if work.free is None else f"{work.free / 1e9:,.0f} GB"
    if work and work.write_per_s:
        rate = f"{work.write_per_s / 1e9:.1f} GB/s"
    return ram, free, rate


def _counted(names: Sequence[str]) -> str:
    """Return the number of names, and the first one."""
    return f"{len(names)} {names[0]}" if names else "none"


DEVICE_TOLERANCE, CPU_TOLERANCE = 0.05, 0.5  # below the median; CPUs are shared
LINK_TOLERANCE, CPU_LINK_TOLERANCE = 0.3, 0.7
WITHIN_S = 1800.0


def check(hosts: Sequence[Host], fleet: Fleet) -> list[Finding]:
    """Run the probes on all hosts, and judge the results."""
    run = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    request = parse_launch(["--run", run, "--", "true"], time.time())
    everyone = tuple(host.name for host in hosts)
    try:
        results = run_probes(
            request,
            hosts,
            fleet,
            DEEP,
            WITHIN_S,
            lambda result: print(f"{result.probe}: {result.seconds:.0f} s", file=sys.stderr, flush=True),
        )
    except UserError as error:
        return [Finding(BAD, everyone, f"the deep check did not start: {error}", "fix that first")]
    for result in results:
        if not result.good:
            where = (result.failed_on,) if result.failed_on else everyone
            what = f"the deep check failed: {result.probe}: {result.fault or result.why}"
            return [Finding(BAD, where, what, f"{fleet.command_to_type('logs', run)} shows every rank")]
    return list(judge(results))


def judge(results: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield findings on the measurements: what is slower than the median, and the measured rates."""
    figures = {result.probe: result.figures for result in results}
    on_cpu = results[0].device == "cpu"
    devices, links = figures[Probe.PRODUCTS], figures.get(Probe.HOST_LINKS, ())
    yield from _slow_devices(devices, CPU_TOLERANCE if on_cpu else DEVICE_TOLERANCE)
    yield from _slow_links(links, CPU_LINK_TOLERANCE if on_cpu else LINK_TOLERANCE)
    flops = [device.value for device in devices]
    said = f"measured: {min(flops):.3g} to {max(flops):.3g} TFLOP/s"
    if rates := [link.value for link in links]:
        said += f", links {min(rates):.2f} to {max(rates):.2f} GB/s"
    if bandwidth := {figure.name: figure.value for figure in figures.get(Probe.COLLECTIVES, ())}:  # the largest size's
        said += f", all-gather {bandwidth['all-gather']:.2f} GB/s, all-reduce {bandwidth['all-reduce']:.2f} GB/s"
        said += " (bus bandwidth)"
    hosts = tuple(dict.fromkeys(host for device in devices for host in device.hosts))
    yield Finding(NOTE, hosts, said, "compare with the hardware's specification")


def _slow_devices(devices: Sequence[Figure], tolerated: float) -> Iterator[Finding]:
    middle = statistics.median(device.value for device in devices)
    for device in devices:
        if device.value < (1 - tolerated) * middle:
            what = f"{device.name}: {device.value:.3g} TFLOP/s where the median is {middle:.3g}"
            remedy = "check its clocks, power and temperature; every rank waits for the slowest"
            yield Finding(WARN, device.hosts, what, remedy)


def _slow_links(links: Sequence[Figure], tolerated: float) -> Iterator[Finding]:
    """Blame each slow link on the end that has more slow links."""
    if not links:
        return
    usual = statistics.median(link.value for link in links)
    slow = [link for link in links if link.value < (1 - tolerated) * usual]
    counts = collections.Counter(end for link in slow for end in link.hosts)
    for link in slow:
        odd = max(link.hosts, key=lambda end: counts[end])
        what = f"{link.name}: {link.value:.2f} GB/s each way where the median is {usual:.2f}"
        yield Finding(WARN, (odd,), what, "check its cable, port and NCCL_IB_HCA")
