"""What came of asking all hosts: replies of those that could be asked, faults of the others."""

from collections.abc import Mapping
from typing import TypeVar

from llama405b_tools.hosts.transport import HostError

T = TypeVar("T")
Outcomes = Mapping[str, T | HostError]  # by host


def replies(outcomes: Outcomes[T]) -> dict[str, T]:
    """What the hosts said that could be asked."""
    return {name: found for name, found in outcomes.items() if not isinstance(found, HostError)}


def unanswered(outcomes: Outcomes[T]) -> dict[str, str]:
    """Why the others could not."""
    return {name: str(found) for name, found in outcomes.items() if isinstance(found, HostError)}
