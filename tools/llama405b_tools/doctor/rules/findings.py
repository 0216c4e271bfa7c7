"""What doctor makes of the hosts' facts: what is wrong, what it means, what to do. Pure."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama405b_tools.doctor.rules import of_host
from llama405b_tools.doctor.rules.of_host import BAD, NOTE, WARN, Facts, Needs
from llama405b_tools.machine import fabric, gpus
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

    reach: Mapping[
        str, Mapping[str, Any]
    ]  # from -> to -> {"resolves": [address, s], "reached": {"address:port": {...}}}
    candidates: Mapping[str, Sequence[str]]  # host -> addresses that others tried
    ports: Mapping[str, Sequence[int]]  # host -> rendezvous port, ephemeral port
    chosen: Mapping[str, str]  # host -> address= in the hosts file, or ""


def diagnose(
    facts: Mapping[str, Facts], lost: Mapping[str, str], skew_s: Mapping[str, float], peers: Peers, needs: Needs
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


def _package(name: str) -> Callable[[Facts], Any]:
    return lambda facts: facts["environment"]["packages"][name]


SAME: dict[str, tuple[str, Callable[[Facts], Any]]] = {
    "python": (BAD, lambda facts: facts["environment"]["packages"]["python"].rpartition(".")[0]),  # not patch releases
    **{name: (BAD, _package(name)) for name in ("torch", "transformers", "flash-attn", "nccl", "cuda", "llama405b")},
    "the project's commit": (BAD, lambda facts: facts["environment"]["code"]),
    "the driver": (WARN, lambda facts: gpus.read(facts["gpus"])[0][0].driver),
    "GPU model": (WARN, lambda facts: gpus.read(facts["gpus"])[0][0].name),
    "number of GPUs": (BAD, lambda facts: len(gpus.read(facts["gpus"])[0])),
    "number of RDMA ports that are up": (WARN, lambda facts: sum(port.up for port in fabric.read(facts["rdma"]))),
    "kernel": (NOTE, lambda facts: facts["identity"]["kernel"]),
    "system": (NOTE, lambda facts: facts["identity"]["os"]),
}


def _sameness(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for name, (level, get) in SAME.items():
        values: dict[str, str] = {}
        for host, each in facts.items():
            with contextlib.suppress(KeyError, TypeError, AttributeError, IndexError):  # a host that cannot tell
                values[host] = str(get(each))
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
        slow = [
            name for name in others if (peers.reach[name].get(host, {}).get("resolves") or ["", 0])[1] > SLOW_NAME_S
        ]
        if slow:
            what = f"looking up {host} takes over {SLOW_NAME_S:.0f} s"
            yield Finding(WARN, tuple(slow), what, "mend its DNS server (/etc/resolv.conf): it delays every start")


def _who_cannot(host: str, others: Sequence[str], peers: Peers) -> tuple[list[str], str]:
    """The hosts that reach another at none of its addresses (or all, where each reaches a different one), and why."""
    lacking = [
        name
        for name in others
        if not any(_all_reach(host, address, [name], peers) for address in peers.candidates[host])
    ]
    for name in lacking or others:
        for place, found in peers.reach[name].get(host, {}).get("reached", {}).items():
            if found["fault"]:
                return lacking or list(others), f"{place}: {found['fault']}"
    return lacking or list(others), "it was not tried in time"


def _all_reach(host: str, address: str, others: Sequence[str], peers: Peers) -> bool:
    """Whether these hosts reach another at this address, on both ports."""
    for name in others:
        reached = peers.reach[name].get(host, {}).get("reached", {})
        if any(reached.get(f"{address}:{port}", {"fault": "?"})["fault"] for port in peers.ports[host]):
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
