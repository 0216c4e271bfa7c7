"""In which facts machines differ. Pure."""

from collections.abc import Mapping


def disagreements(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Which hosts differ from the majority: one clause for each differing fact."""
    clauses = []
    for key in next(iter(facts.values()), {}):
        values = {host: found.get(key, "missing") for host, found in facts.items()}
        if len(set(values.values())) > 1:
            counts = list(values.values())
            majority = max(counts, key=counts.count)
            odd = ", ".join(f"{host} has {value}" for host, value in values.items() if value != majority)
            clauses.append(f"{key} is {majority} on most hosts, but {odd}")
    return clauses
