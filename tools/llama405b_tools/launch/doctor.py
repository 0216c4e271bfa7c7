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

from llama405b.contract.errors import UserError, fmt_if, pluralize
from llama405b.predict import estimate, run_shape
from llama405b.predict.hardware import GIB
from llama405b.predict.search import can_predict, find_model_shape, resolve_auto
from llama405b.settings import config
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Checkpoint, Config
from llama405b.spec.adapters import bytes_per_parameter
from llama405b.spec.probes import DEEP_PROBES, Figure, Probe, ProbeResult
from llama405b_tools.hosts import transport
from llama405b_tools.hosts.fleet import Fleet, JsonSession
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError, failure_texts, replies
from llama405b_tools.launch.findings import BAD, NOTE, WARN, Finding
from llama405b_tools.launch.host_facts import HostFacts, PeersReply
from llama405b_tools.launch.host_rules import Peers, Requirements
from llama405b_tools.launch.probes import run_probes
from llama405b_tools.launch.request import parse_launch
from llama405b_tools.text.figures import DASH, format_columns
from llama405b_tools.text.words import clean, fold_names

FACTS_TIMEOUT_S, PEERS_TIMEOUT_S, HASH_TIMEOUT_S = 45.0, 20.0, 3600.0
DEFAULT_PORT = 29_400  # torchrun's default


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """Results of one survey of the hosts."""

    facts: dict[str, HostFacts]
    lost: dict[str, str]
    skew_s: dict[str, float]  # host's clock minus this one's
    latency_ms: dict[str, float]
    peers: Peers
    mute: dict[str, str]  # hosts that did not report which others they reach, and why


def estimate_requirements(settings: Config | None, preset: str, hosts: Sequence[Host]) -> Requirements:
    """Compute what a run needs on the host with the most ranks: its state, and on GPUs an estimate of its peak."""
    if settings is None:
        return Requirements()
    needs = Requirements(
        weights=settings.model.path if settings.model.path != config.DEMO_MODEL else "",
        uses_gpus=settings.parallel.device != "cpu",
        shared_directory=_shared_directory(settings.checkpoint),
        settings=settings,
    )
    llama = find_model_shape(settings, preset)
    if llama is None:
        return needs
    slots = [host.slots or 8 for host in hosts]
    max_slots, world = max(slots), sum(slots)
    settings = resolve_auto(settings, llama, world, max_slots)
    axes = Axes.from_parallel(settings.parallel, world, max_slots)
    needs = dataclasses.replace(needs, mesh=axes.label)
    n_elements = run_shape.rank_elements(llama, axes, 0, settings.parallel.virtual_stages)
    on_device, on_host = (
        int(bytes_per_element * n_elements) for bytes_per_element in bytes_per_parameter(llama, settings)
    )
    if not needs.uses_gpus:
        return dataclasses.replace(needs, ram_bytes=(on_device + on_host) * max_slots)
    needs = dataclasses.replace(needs, gpu_bytes=on_device, ram_bytes=on_host * max_slots)
    if not can_predict(settings):
        return needs
    predicted_run = run_shape.PredictedRun.from_config(llama, settings, world, axes=axes)
    predicted = estimate.estimate(predicted_run)
    at_peak = (
        predicted.host_bytes * predicted_run.hosts / world * max_slots
    )  # the estimate's hosts have eight ranks each
    return dataclasses.replace(
        needs,
        gpu_peak_bytes=int(predicted.gpu_bytes),
        gpu_reserved_bytes=int(predicted.gpu_reserved_bytes or 0),
        ram_peak_bytes=int(at_peak),
    )


def _shared_directory(checkpoint: Checkpoint) -> str:
    """Return the directory of checkpoints that all hosts must see; '' if each has its own, or nothing is saved."""
    return (checkpoint.dir or "runs") if checkpoint.cadence.is_enabled and checkpoint.storage == "shared" else ""


class _HostQueries:
    """Two queries to each host in one session; the second depends on all hosts' answers to the first."""

    def __init__(self, fleet: Fleet, port: int, needs: Requirements) -> None:
        self.fleet, self.head = fleet, next(iter(fleet.hosts))
        self.shared_directory = needs.shared_directory
        self.saves = needs.settings.checkpoint.dir if needs.settings else ""
        local = [name for name, host in fleet.hosts.items() if host.is_loopback]  # one machine: they share its ports
        self.ports = dict.fromkeys(fleet.hosts, port) | {name: port + i for i, name in enumerate(local)}
        self.needs = dict.fromkeys(fleet.hosts, Requirements()) | {self.head: needs}
        self.tokens = {name: f"llama405b {name} {secrets.token_hex(8)}" for name in fleet.hosts}
        self.dialogues: dict[str, JsonSession] = {}
        self.latency_ms: dict[str, float] = {}

    def ask_facts(self, name: str) -> HostFacts:
        """Ask a host for its facts."""
        connection = self.fleet.connection(name)
        needs = self.needs[name]
        workdir = self.fleet.workdir(name)
        saves = self.saves if self.saves.startswith(("/", "~")) else f"{workdir}/{self.saves}".rstrip("/")
        start_s = time.monotonic()
        alive = connection.run("command -v python3 || echo none", "", FACTS_TIMEOUT_S)
        self.latency_ms[name] = round((time.monotonic() - start_s) * 1000, 1)
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
            "mark": self.shared_directory if name == self.head else "",
        }
        stdin = transport.standalone_input("hostprobe", request)
        self.dialogues[name] = JsonSession(connection.stream(transport.standalone_command("hostprobe"), stdin))
        return self.dialogues[name].receive(HostFacts, timeout_s)

    def ask_peers(self, name: str, facts: Mapping[str, HostFacts], candidates: Mapping[str, list[str]]) -> PeersReply:
        """Ask a host how it reaches the others, and whether it sees what the head wrote."""
        peers = [
            {"name": other, "addresses": candidates[other], "ports": facts[other].ports, "token": self.tokens[other]}
            for other in candidates
            if other != name
        ]
        mark = self.shared_directory if self.head in facts and facts[self.head].marked else ""
        second = {"peers": peers, "mark": mark, "token": self.tokens[self.head]}
        self.dialogues[name].send(json.dumps(second) + "\n")
        return self.dialogues[name].receive(PeersReply, PEERS_TIMEOUT_S)

    def close(self) -> None:
        """End all sessions, then wait for each."""
        for dialogue in self.dialogues.values():
            dialogue.end_input()
        for dialogue in self.dialogues.values():
            dialogue.close()


def survey_hosts(fleet: Fleet, port: int, needs: Requirements) -> Survey:
    """Ask every host for its facts, then how it reaches every other."""
    queries = _HostQueries(fleet, port, needs)
    outcomes = fleet.call_each(queries.ask_facts)
    answered = {name: reply for name, reply in outcomes.items() if isinstance(reply, HostFacts)}
    facts = {name: dataclasses.replace(reply, slots=fleet.expected_gpus(name)) for name, reply in answered.items()}
    skew_s = {name: round(reply.now - queries.dialogues[name].replied_at, 2) for name, reply in facts.items()}
    candidates = {name: _candidate_addresses(fleet.hosts[name], reply) for name, reply in facts.items()}
    peer_outcomes = fleet.call_each(lambda name: queries.ask_peers(name, facts, candidates), facts)
    queries.close()
    peer_replies = replies(peer_outcomes)
    peers = Peers(
        reach={name: reply.peers for name, reply in peer_replies.items()},
        candidates=candidates,
        ports={name: reply.ports for name, reply in facts.items()},
        chosen={name: fleet.hosts[name].address for name in facts},
        unshared=[name for name, reply in peer_replies.items() if reply.sees is False],
    )
    return Survey(facts, failure_texts(outcomes), skew_s, queries.latency_ms, peers, failure_texts(peer_outcomes))


def _candidate_addresses(host: Host, facts: HostFacts) -> list[str]:
    """Return the addresses at which others may reach a host: the hosts file's, then its own."""
    own_addresses = [entry.address for entry in facts.addresses]
    if host.is_loopback:
        own_addresses = []
    return list(dict.fromkeys(filter(None, [host.address, *own_addresses])))


def port_findings(facts: Mapping[str, HostFacts], port: int) -> list[Finding]:
    """Report hosts on which the requested port is not available."""
    hosts = tuple(name for name, host_facts in facts.items() if host_facts.port_fault)
    return [Finding(BAD, f"port {port} is in use", "choose another --port", hosts)] if hosts else []


HEADINGS = ("host", "fit", "address", "ssh", "clock", "GPUs", "RDMA", "RAM", "workdir free", "write", "python", "torch")


def print_report(
    visit: Survey, findings: Sequence[Finding], names: Sequence[str], *, deep: bool, mesh: str = ""
) -> None:
    """Print problems first, then all hosts side by side, and the mesh that their ranks would make."""
    for finding in findings:
        host_names = "all hosts" if len(finding.hosts) == len(names) > 1 else fold_names(finding.hosts)
        print(clean(f"{finding.level.replace(BAD, BAD.upper())}  {host_names}: {finding.what}"))
        print(clean(f"     → {finding.remedy}"))
    if findings:
        print()
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        rows.setdefault(_row(name, visit, findings), []).append(name)
    print(format_columns(HEADINGS, [(fold_names(group), *row) for row, group in rows.items()]), flush=True)
    untested = "" if deep else "; links and GPUs were not tested under load: add --deep"
    split = fmt_if("; ranks as {}", mesh)
    print(f"\n{pluralize(len(names), 'host')}: {_verdict([finding.level for finding in findings])}{split}{untested}")


def _verdict(levels: Sequence[str]) -> str:
    if BAD in levels:
        return f"not fit: {pluralize(levels.count(BAD), 'problem')}"
    if WARN in levels:
        return f"fit, with {pluralize(levels.count(WARN), 'warning')}"
    return "fit"


def _row(name: str, visit: Survey, findings: Sequence[Finding]) -> tuple[str, ...]:
    if name in visit.lost:
        return ("NO", *[DASH] * 10)
    levels = {finding.level for finding in findings if name in finding.hosts}
    fit = next((word for level, word in ((BAD, "NO"), (WARN, "warn")) if level in levels), "yes")
    facts = visit.facts[name]
    return (
        fit,
        visit.peers.training_address(name) or DASH,
        f"{visit.latency_ms[name]:.0f} ms",
        f"{visit.skew_s[name]:+z.1f} s",
        _count_and_first([gpu.name.removeprefix("NVIDIA ") for gpu in facts.devices]),
        _count_and_first([f"x {port.gbit:g} Gb/s" for port in facts.rdma_ports if port.is_up]),
        *_memory_and_disk(facts),
        facts.packages.get("python", DASH),
        facts.packages.get("torch", DASH),
    )


def _memory_and_disk(facts: HostFacts) -> tuple[str, str, str]:
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


def _count_and_first(names: Sequence[str]) -> str:
    """Return the number of names, and the first one."""
    return f"{len(names)} {names[0]}" if names else "none"


DEVICE_TOLERANCE, CPU_TOLERANCE = 0.05, 0.5  # below the median; CPUs are shared
LINK_TOLERANCE, CPU_LINK_TOLERANCE = 0.3, 0.7
DEEP_LIMIT_S = 1800.0


def check_under_load(hosts: Sequence[Host], fleet: Fleet) -> list[Finding]:
    """Run the probes on all hosts, and judge the results."""
    run = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    request = parse_launch(["--run", run, "--", "true"], time.time())
    all_hosts = tuple(host.name for host in hosts)
    try:
        results = run_probes(
            request,
            hosts,
            fleet,
            DEEP_PROBES,
            DEEP_LIMIT_S,
            lambda result: print(f"{result.probe}: {result.seconds:.0f} s", file=sys.stderr, flush=True),
        )
    except UserError as error:
        return [Finding(BAD, f"the deep check did not start: {error}", "fix that first", all_hosts)]
    for result in results:
        if not result.passed:
            blamed_hosts = (result.failed_on,) if result.failed_on else all_hosts
            problem = f"the deep check failed: {result.probe}: {result.fault or result.failure_reason}"
            return [Finding(BAD, problem, f"{fleet.command_to_type('logs', run)} shows every rank", blamed_hosts)]
    return list(judge_results(results))


def judge_results(results: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield findings on the measurements: what is slower than the median, and the measured rates."""
    figures = {result.probe: result.figures for result in results}
    on_cpu = results[0].device == "cpu"
    devices, links = figures[Probe.PRODUCTS], figures.get(Probe.HOST_LINKS, ())
    yield from _slow_devices(devices, CPU_TOLERANCE if on_cpu else DEVICE_TOLERANCE)
    yield from _slow_links(links, CPU_LINK_TOLERANCE if on_cpu else LINK_TOLERANCE)
    flops = [device.value for device in devices]
    summary = f"measured: {min(flops):.3g} to {max(flops):.3g} TFLOP/s"
    if rates := [link.value for link in links]:
        summary += f", links {min(rates):.2f} to {max(rates):.2f} GB/s"
    if bandwidth := {figure.name: figure.value for figure in figures.get(Probe.COLLECTIVES, ())}:  # the largest size's
        summary += f", all-gather {bandwidth['all-gather']:.2f} GB/s, all-reduce {bandwidth['all-reduce']:.2f} GB/s"
        summary += " (bus bandwidth)"
    hosts = tuple(dict.fromkeys(host for device in devices for host in device.hosts))
    yield Finding(NOTE, summary, "compare with the hardware's specification", hosts)


def _slow_devices(devices: Sequence[Figure], tolerance: float) -> Iterator[Finding]:
    median_flops = statistics.median(device.value for device in devices)
    for device in devices:
        if device.value < (1 - tolerance) * median_flops:
            problem = f"{device.name}: {device.value:.3g} TFLOP/s where the median is {median_flops:.3g}"
            remedy = "check its clocks, power and temperature; every rank waits for the slowest"
            yield Finding(WARN, problem, remedy, device.hosts)


def _slow_links(links: Sequence[Figure], tolerance: float) -> Iterator[Finding]:
    """Blame each slow link on the end that has more slow links."""
    if not links:
        return
    median_rate = statistics.median(link.value for link in links)
    slow = [link for link in links if link.value < (1 - tolerance) * median_rate]
    counts = collections.Counter(end for link in slow for end in link.hosts)
    for link in slow:
        blamed_host = max(link.hosts, key=lambda end: counts[end])
        problem = f"{link.name}: {link.value:.2f} GB/s each way where the median is {median_rate:.2f}"
        yield Finding(WARN, problem, "check its cable, port and NCCL_IB_HCA", (blamed_host,))
