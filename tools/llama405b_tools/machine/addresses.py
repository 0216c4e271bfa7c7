"""Properties of network addresses. Pure."""

import dataclasses
import ipaddress


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """One of a host's own IPv4 addresses."""

    interface: str
    address: str
    mbit: str  # as the kernel writes it; -1 or "" if unknown


def is_private(address: str) -> bool:
    """Whether an address is not publicly routable; a name counts as private, because somebody chose it."""
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return True
