"""The answers of all hosts to one question: who replied, who did not, and who differs from the others."""

import collections
from collections.abc import Mapping
from typing import TypeVar

from llama405b_tools.hosts.transport import HostError

T = TypeVar("T")
Outcomes = Mapping[str, T | HostError]  # by host


def replies(outcomes: Outcomes[T]) -> dict[str, T]:
    """Return the replies, by host."""
    return {name: found for name, found in outcomes.items() if not isinstance(found, HostError)}


def unanswered(outcomes: Outcomes[T]) -> dict[str, str]:
    """Return why the other hosts did not answer, by host."""
    return {name: str(found) for name, found in outcomes.items() if isinstance(found, HostError)}


def disagreements(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return which hosts differ from the majority: one clause per differing fact."""
    names = next(iter(facts.values()), {})
    found = [disagreement(name, {host: each.get(name, "missing") for host, each in facts.items()}) for name in names]
    return [clause for clause, odd in found if odd]


def disagreement(name: str, values: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return a clause on who differs from the majority in one fact, and those hosts; () if all agree."""
    counts = collections.Counter(values.values())
    majority = max(counts, key=lambda value: counts[value], default="")
    odd = {host: value for host, value in values.items() if value != majority}
    said = ", ".join(f"{host} has {value}" for host, value in odd.items())
    return f"{name} is {majority} on most hosts, but {said}", tuple(odd)


def one_machine(machines: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the names that are one machine, from each name's machine ID ("": unknown)."""
    names: dict[str, tuple[str, ...]] = {}
    for name, machine in machines.items():
        names[machine] = (*names.get(machine, ()), name)
    return [found for machine, found in names.items() if machine and len(found) > 1]
