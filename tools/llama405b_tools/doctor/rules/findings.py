"""Doctor's findings on the hosts' facts: what is wrong, what it means, and what to do. Pure."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from llama405b_tools.doctor.host_facts import ConnectAttempt, HostFacts, PeerReach
from llama405b_tools.doctor.rules import of_host
from llama405b_tools.doctor.rules.of_host import BAD, NOTE, WARN, Needs
from llama405b_tools.hosts.inventory import LOOPBACK
from llama405b_tools.hosts.outcomes import disagreement, one_machine
from llama405b_tools.machine.network import is_private
from llama405b_tools.text.fold import fold_names

LEVELS = (BAD, WARN, NOTE)
MAX_SKEW_S = 2.0
SLOW_NAME_S = 1.0
PACKAGES = ("torch", "transformers", "flash-attn", "nccl", "cuda", "llama405b")
SAME = dict.fromkeys(("python", *PACKAGES, "the project's commit"), BAD) | {
    "the driver": WARN,
    "GPU model": WARN,
    "number of GPUs": BAD,
    "number of RDMA ports that are up": WARN,
    "kernel": NOTE,
    "system": NOTE,
}
NO_WAY = PeerReach(None, {})


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about some hosts."""

    level: str  # bad: a run would fail or lose work; warning: it might; note
    hosts: tuple[str, ...]
    what: str
    remedy: str


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """How the hosts reach each other."""

    reach: Mapping[str, Mapping[str, PeerReach]]  # from -> to
    candidates: Mapping[str, Sequence[str]]  # host -> addresses that others tried
    ports: Mapping[str, Sequence[int]]  # host -> rendezvous port, ephemeral port
    chosen: Mapping[str, str]  # host -> address= in the hosts file, or ""
    unshared: Sequence[str] = ()  # hosts that do not see what the first one wrote where the checkpoints go

    def others(self, host: str) -> list[str]:
        """Return the other hosts that reported which hosts they reach."""
        return [name for name in self.reach if name != host]

    def way(self, name: str, host: str) -> PeerReach:
        """Return how one host reaches another, as far as known."""
        return self.reach[name].get(host, NO_WAY)

    def all_reach(self, host: str, address: str, others: Sequence[str]) -> bool:
        """Return whether these hosts reach another at this address, on both ports."""
        places = [f"{address}:{port}" for port in self.ports[host]]
        ways = [self.way(name, host).reached.get(place) for name in others for place in places]
        return all(way and not way.fault for way in ways)

    def in_order(self, host: str) -> list[str]:
        """Return a host's candidate addresses, private ones first."""
        return sorted(self.candidates.get(host, ()), key=lambda address: not is_private(address))

    def training_address(self, host: str) -> str:
        """Return the first candidate that every other host reaches on both ports; '' if there is none."""
        others = self.others(host)
        wanted = filter(None, [self.chosen[host], *self.in_order(host)])
        return next((address for address in wanted if self.all_reach(host, address, others)), "")


def diagnose(
    facts: Mapping[str, HostFacts], lost: Mapping[str, str], skew_s: Mapping[str, float], peers: Peers, needs: Needs
) -> list[Finding]:
    """Return all findings, problems first; equal findings of several hosts are merged."""
    found = [Finding(BAD, (host,), "cannot be reached", why) for host, why in _alike(lost).items()]
    for i, (host, each) in enumerate(facts.items()):
        remarks = of_host.of_host(each, needs, is_head=i == 0)
        found += [Finding(level, (host,), what, remedy) for level, what, remedy in remarks]
        found += _clock(host, skew_s.get(host, 0.0))
    found += _sameness(facts, needs)
    found += _one_machine(facts, peers)
    if peers.unshared:
        found.append(_sharing(facts, peers.unshared, needs))
    for host in peers.candidates:
        if others := peers.others(host):
            found += [*_address(host, others, peers), *_lookups(host, others, peers)]
    return sorted(_merged(found), key=lambda finding: LEVELS.index(finding.level))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return equal findings of several hosts as one."""
    hosts_of: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        hosts_of.setdefault((finding.level, finding.what, finding.remedy), []).extend(finding.hosts)
    return [Finding(level, tuple(dict.fromkeys(hosts)), what, how) for (level, what, how), hosts in hosts_of.items()]


def _alike(faults: Mapping[str, str]) -> dict[str, str]:
    """Have those be equal that differ in the host's own name or address alone."""
    own = {host: rf"(?<![\w.-])({re.escape(host)}|\d+(\.\d+){{3}})(?![\w-])" for host in faults}
    forms = {host: re.sub(own[host], "HOST", fault) for host, fault in faults.items()}
    counts = collections.Counter(forms.values())
    return {host: forms[host] if counts[forms[host]] > 1 else fault for host, fault in faults.items()}


def _clock(host: str, skew_s: float) -> Iterator[Finding]:
    if abs(skew_s) > MAX_SKEW_S:
        what = f"its clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
        yield Finding(WARN, (host,), what, "start chrony or systemd-timesyncd on it")


def _one_machine(facts: Mapping[str, HostFacts], peers: Peers) -> Iterator[Finding]:
    machines = {host: each.identity.machine for host, each in facts.items() if each.identity}
    networked = {host: machine for host, machine in machines.items() if not _only_loopback(host, peers)}
    for same in one_machine(networked):
        yield Finding(WARN, same, "are one machine under several names", "delete all but one of them")


def _sharing(facts: Mapping[str, HostFacts], unshared: Sequence[str], needs: Needs) -> Finding:
    """Report hosts on which the directory of checkpoints is not the first host's: bad if the run is to save there."""
    head, its = next(iter(facts.items()))
    what = f"cannot see what {head} writes in {its.marked}, where checkpoints go"
    remedy = "name a directory that all hosts share in --checkpoint.dir, or use --checkpoint.storage local"
    return Finding(BAD if needs.settings else NOTE, tuple(unshared), what, remedy)


def _only_loopback(host: str, peers: Peers) -> bool:
    """Whether a host is meant to be this machine: the demo's hosts are all that."""
    return all(LOOPBACK.fullmatch(address) for address in peers.candidates.get(host, ()))


def _told(facts: HostFacts) -> dict[str, str | int]:
    """What should be the same on all hosts, as far as this one reports it."""
    told: dict[str, str | int] = {name: facts.packages[name] for name in PACKAGES if name in facts.packages}
    if python := facts.packages.get("python", "").rpartition(".")[0]:  # hosts may differ in its patch release
        told["python"] = python
    if facts.environment:
        told["the project's commit"] = facts.environment.code
    if facts.gpus:
        told["number of GPUs"] = len(facts.devices)
    for gpu in facts.devices[:1]:
        told |= {"the driver": gpu.driver, "GPU model": gpu.name}
    if facts.rdma:
        told["number of RDMA ports that are up"] = sum(port.up for port in facts.rdma_ports)
    if facts.identity:
        told |= {"kernel": facts.identity.kernel, "system": facts.identity.os}
    return told


def _sameness(facts: Mapping[str, HostFacts], needs: Needs) -> Iterator[Finding]:
    told = {host: _told(each) for host, each in facts.items()}
    for name, level in SAME.items():
        clause, odd = disagreement(name, {host: str(each[name]) for host, each in told.items() if name in each})
        remedy = "make them equal"
        if level == BAD:
            remedy = f"make them equal: {needs.command_to_type('setup')}"
        if odd:
            yield Finding(level, odd, clause, remedy)


def _address(host: str, others: Sequence[str], peers: Peers) -> Iterator[Finding]:
    """Check that the others reach a host, at the address it claims."""
    address, wanted = peers.training_address(host), peers.chosen[host]
    if not address:
        lacking, place, found = _who_cannot(host, others, peers)
        what = f"{fold_names(lacking)} cannot reach it on the training network ({place}{found.fault})"
        remedy = "open TCP ports 20000-65535 between the hosts, or set address= to one they all reach"
        if found.unresolved:
            remedy = "put the name into /etc/hosts on all hosts, or set address= to an IP address"
        yield Finding(BAD, (host,), what, remedy)
    elif wanted and address != wanted:
        yield Finding(BAD, (host,), f"not all hosts reach it at address={wanted}", f"set address={address}")
    elif not wanted and address != peers.in_order(host)[0]:
        what = f"the others reach it at {address}, not at {peers.in_order(host)[0]}"
        yield Finding(WARN, (host,), what, f"set address={address} in the hosts file")


def _lookups(host: str, others: Sequence[str], peers: Peers) -> Iterator[Finding]:
    """Check that looking up a host's name is fast enough."""
    took_s = {name: (peers.way(name, host).resolves or ("", 0.0))[1] for name in others}
    slow = tuple(name for name in others if took_s[name] > SLOW_NAME_S)
    if slow:
        what = f"looking up {host} takes over {SLOW_NAME_S:.0f} s"
        yield Finding(WARN, slow, what, "fix its DNS server (/etc/resolv.conf): it delays every start")


def _who_cannot(host: str, others: Sequence[str], peers: Peers) -> tuple[Sequence[str], str, ConnectAttempt]:
    """The hosts that reach another at none of its addresses (all, if each reaches a different one), where, and why."""
    addresses = peers.candidates[host]
    lacking = [name for name in others if not any(peers.all_reach(host, each, [name]) for each in addresses)] or others
    for name in lacking:
        for place, found in peers.way(name, host).reached.items():
            if found.fault:
                return lacking, f"{place}: ", found
    return lacking, "", ConnectAttempt("it was not tried in time")
