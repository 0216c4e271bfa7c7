"""What an address tells. Pure."""

import dataclasses
import ipaddress


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """One of a host's own IPv4 addresses."""

    interface: str
    address: str
    mbit: str  # as the kernel writes it; -1 or "" where it does not know


def is_private(address: str) -> bool:
    """Whether an address is of no public network; a name is taken to be somebody's own choice."""
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return True
