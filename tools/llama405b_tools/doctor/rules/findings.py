"""What doctor makes of the hosts' facts: what is wrong, what it means, what to do. Pure."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from llama405b_tools.doctor.facts import HostFacts, PeerReach, Reached
from llama405b_tools.doctor.rules import of_host
from llama405b_tools.doctor.rules.of_host import BAD, NOTE, WARN, Needs
from llama405b_tools.machine import fabric
from llama405b_tools.machine.addresses import is_private
from llama405b_tools.machine.sameness import disagreements
from llama405b_tools.text.fold import fold_names

MAX_SKEW_S = 2.0
SLOW_NAME_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about some hosts."""

    level: str  # bad: a run would fail or lose; warning: it may; note
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


def diagnose(
    facts: Mapping[str, HostFacts], lost: Mapping[str, str], skew_s: Mapping[str, float], peers: Peers, needs: Needs
) -> list[Finding]:
    """Everything worth saying, problems first; equal findings of several hosts are one."""
    found = [Finding(BAD, (host,), "cannot be reached", why) for host, why in lost.items()]
    for i, (host, each) in enumerate(facts.items()):
        for level, what, remedy in of_host.of_host(each, needs, is_head=i == 0):
            found.append(Finding(level, (host,), what, remedy))
        if abs(skew_s.get(host, 0.0)) > MAX_SKEW_S:
            what = f"its clock is {abs(skew_s[host]):.0f} s {'ahead' if skew_s[host] > 0 else 'behind'}"
            found.append(Finding(WARN, (host,), what, "start chrony or systemd-timesyncd there"))
    found += list(_sameness(facts))
    found += list(_reach(peers))
    order = (BAD, WARN, NOTE)
    merged: dict[tuple[str, str, str], list[str]] = {}
    for finding in found:
        merged.setdefault((finding.level, finding.what, finding.remedy), []).extend(finding.hosts)
    return sorted(
        (Finding(level, tuple(dict.fromkeys(hosts)), what, remedy) for (level, what, remedy), hosts in merged.items()),
        key=lambda finding: order.index(finding.level),
    )


Fact = Callable[[HostFacts], str | int | None]  # None: the host cannot tell


def _package(name: str) -> Fact:
    return lambda facts: facts.packages.get(name)


def _python(facts: HostFacts) -> str | None:
    """Without its patch release, in which hosts may differ."""
    return facts.packages.get("python", "").rpartition(".")[0] or None


def _driver(facts: HostFacts) -> str | None:
    return next((gpu.driver for gpu in facts.devices), None)


def _gpu_model(facts: HostFacts) -> str | None:
    return next((gpu.name for gpu in facts.devices), None)


def _n_gpus(facts: HostFacts) -> int | None:
    return len(facts.devices) if facts.gpus else None


def _n_ports_up(facts: HostFacts) -> int | None:
    return sum(port.up for port in fabric.read(facts.rdma)) if facts.rdma else None


SAME: dict[str, tuple[str, Fact]] = {
    "python": (BAD, _python),
    **{name: (BAD, _package(name)) for name in ("torch", "transformers", "flash-attn", "nccl", "cuda", "llama405b")},
    "the project's commit": (BAD, lambda facts: facts.environment.code if facts.environment else None),
    "the driver": (WARN, _driver),
    "GPU model": (WARN, _gpu_model),
    "number of GPUs": (BAD, _n_gpus),
    "number of RDMA ports that are up": (WARN, _n_ports_up),
    "kernel": (NOTE, lambda facts: facts.identity.kernel if facts.identity else None),
    "system": (NOTE, lambda facts: facts.identity.os if facts.identity else None),
}


def _sameness(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    for name, (level, get) in SAME.items():
        values: dict[str, str] = {}
        for host, each in facts.items():
            if (value := get(each)) is not None:
                values[host] = str(value)
        for clause in disagreements({host: {name: value} for host, value in values.items()}):
            majority = max(list(values.values()), key=list(values.values()).count)
            odd = tuple(host for host, value in values.items() if value != majority)
            yield Finding(level, odd, clause, "make them equal: llama405b setup" if level == BAD else "make them equal")


def _reach(peers: Peers) -> Iterator[Finding]:
    for host, candidates in peers.candidates.items():
        others = [name for name in peers.reach if name != host]
        address = training_address(host, peers)
        if not others:
            continue
        if not address:
            lacking, fault = _who_cannot(host, others, peers)
            what = f"{fold_names(lacking)} cannot reach it on the training network ({fault})"
            yield Finding(
                BAD,
                (host,),
                what,
                "open TCP ports 20000-65535 between the hosts, or set address= to one they all reach",
            )
        elif peers.chosen[host] and address != peers.chosen[host]:
            yield Finding(BAD, (host,), f"address={peers.chosen[host]} is not reached by all", f"set address={address}")
        elif not peers.chosen[host] and not _all_reach(host, _in_order(candidates)[0], others, peers):
            what = f"the others reach it at {address}, not at {_in_order(candidates)[0]}"
            yield Finding(WARN, (host,), what, f"set address={address} in the hosts file")
        slow = [name for name in others if _resolve_s(peers, name, host) > SLOW_NAME_S]
        if slow:
            what = f"looking up {host} takes over {SLOW_NAME_S:.0f} s"
            yield Finding(WARN, tuple(slow), what, "mend its DNS server (/etc/resolv.conf): it delays every start")


def _resolve_s(peers: Peers, name: str, host: str) -> float:
    """How long a host took to look up the name of another, in seconds; 0 where that is not known."""
    reach = peers.reach[name].get(host)
    return reach.resolves[1] if reach and reach.resolves else 0.0


def _reached(peers: Peers, name: str, host: str) -> Mapping[str, Reached]:
    reach = peers.reach[name].get(host)
    return reach.reached if reach else {}


def _who_cannot(host: str, others: Sequence[str], peers: Peers) -> tuple[list[str], str]:
    """The hosts that reach another at none of its addresses (or all, where each reaches a different one), and why."""
    lacking = [
        name
        for name in others
        if not any(_all_reach(host, address, [name], peers) for address in peers.candidates[host])
    ]
    for name in lacking or others:
        for place, found in _reached(peers, name, host).items():
            if found.fault:
                return lacking or list(others), f"{place}: {found.fault}"
    return lacking or list(others), "it was not tried in time"


def _all_reach(host: str, address: str, others: Sequence[str], peers: Peers) -> bool:
    """Whether these hosts reach another at this address, on both ports."""
    for name in others:
        reached = [_reached(peers, name, host).get(f"{address}:{port}") for port in peers.ports[host]]
        if any(way is None or way.fault for way in reached):
            return False
    return True


def _in_order(candidates: Sequence[str]) -> list[str]:
    return sorted(candidates, key=lambda address: not is_private(address))


def training_address(host: str, peers: Peers) -> str:
    """The first candidate that every other host reaches on both ports, private ones before public; '' where none is."""
    others = [name for name in peers.reach if name != host]
    wanted = [peers.chosen[host]] if peers.chosen[host] else []
    for address in [*wanted, *_in_order(peers.candidates.get(host, ()))]:
        if _all_reach(host, address, others, peers):
            return address
    return ""
