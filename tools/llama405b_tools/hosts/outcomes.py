"""Outcomes of a call to all hosts: replies from those that answered, faults of the others."""

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
