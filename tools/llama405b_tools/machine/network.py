"""A host's addresses and RDMA devices; NCCL's settings for these, and the reasons. Pure.

By default NCCL uses every active device, even a slow management port, and on RoCE the first address type, which
may not be routed; if nothing works, it silently falls back to TCP sockets.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Sequence

from llama405b.contract.phrases import given

NCCL_DEBUG_LINES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKETS = "NET/Socket"


@dataclasses.dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device, as sysfs writes it."""

    device: str
    port: int
    state: str
    rate: str
    link_layer: str
    gids: tuple[tuple[int, str, str, str], ...]  # index, type, GID, network device
    netdevs: tuple[str, ...]

    @property
    def up(self) -> bool:
        """Whether the port is active."""
        return "ACTIVE" in self.state.upper()

    @property
    def gbit(self) -> float:
        """The rate in Gbit/s; 0 if unknown."""
        rate = re.match(r"([\d.]+)", self.rate)
        return float(rate[1]) if rate else 0.0

    @property
    def roce(self) -> bool:
        """Whether the link is Ethernet."""
        return self.link_layer == "Ethernet"

    @property
    def efa(self) -> bool:
        """Whether the device is an AWS EFA."""
        return self.device.startswith(("efa", "rdmap"))

    @property
    def gid_index(self) -> int | None:
        """The index of the RoCE v2 GID with an IPv4 address."""
        return next((index for index, kind, gid, _ in self.gids if kind == "RoCE v2" and ":ffff:" in gid), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Rdma:
    """The RDMA devices of a host."""

    ports: tuple[RdmaPort, ...] = ()
    peermem: bool = False


def training_ports(ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """Return the ports to train over: the fastest that are up; InfiniBand before RoCE."""
    up = [port for port in ports if port.up and not port.efa]
    kind = [port for port in up if not port.roce] or up
    fastest = max((port.gbit for port in kind), default=0.0)
    return [port for port in kind if port.gbit == fastest]


def nccl_env(ports: Sequence[RdmaPort], interface: str) -> dict[str, tuple[str, str]]:
    """Return NCCL's settings for one host, each with its reason; ``interface``: the one on the route to the head."""
    env = {"NCCL_SOCKET_IFNAME": (interface, "on the route to the first host")}
    if any(port.efa for port in ports):
        env["FI_PROVIDER"] = ("efa", "the host has EFA devices; NCCL needs the aws-ofi-nccl plugin for them")
    use = training_ports(ports)
    if use:
        env["NCCL_IB_HCA"] = ("=" + ",".join(f"{port.device}:{port.port}" for port in use), _why(use, ports))
    indices = {port.gid_index for port in use if port.roce}
    if len(indices) == 1 and None not in indices:
        env["NCCL_IB_GID_INDEX"] = (str(indices.pop()), "RoCE v2 with an IPv4 address, the same on all ports")
    return env


def _why(use: Sequence[RdmaPort], ports: Sequence[RdmaPort]) -> str:
    kind = "RoCE" if use[0].roce else "InfiniBand"
    slower = sorted({port.device for port in ports if port.up and port not in use})
    return f"{len(use)} {kind} ports of {use[0].gbit:g} Gb/s are up{given('; slower: {}', ', '.join(slower))}"


def has_rdma(ports: Sequence[RdmaPort]) -> bool:
    """Whether falling back to TCP sockets would lose performance."""
    return any(port.up for port in ports)


def socket_line(text: str) -> str:
    """Return the line in which NCCL reports that it uses TCP sockets; '' if there is none."""
    return next((line for line in text.splitlines() if SOCKETS in line and "NCCL INFO" in line and "Using" in line), "")


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
