"""What an address tells. Pure."""

import ipaddress


def is_private(address: str) -> bool:
    """Whether an address is of no public network; a name is taken to be somebody's own choice."""
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return True
