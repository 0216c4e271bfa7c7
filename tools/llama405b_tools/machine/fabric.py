"""What NCCL is told of a host's RDMA devices, and why. Pure.

Left to itself NCCL takes every active device, a slow management port too, and on RoCE the first address type, which
may not be routed; where it finds nothing that works it falls back to TCP sockets in silence.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True, slots=True)
class Rdma:
    """The RDMA devices of a host."""

    ports: tuple[RdmaPort, ...] = ()
    peermem: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device."""

    device: str
    port: int
    up: bool
    gbit: float
    roce: bool
    efa: bool
    gid_index: int | None  # of RoCE v2 with an IPv4 address
    netdevs: tuple[str, ...]


def ports_of(rdma: Rdma) -> list[Port]:
    """The ports, as far as they matter to NCCL."""
    return [_port(record) for record in rdma.ports]


def _port(record: RdmaPort) -> Port:
    rate = re.match(r"([\d.]+)", record.rate)
    v2 = (index for index, kind, gid, _ in record.gids if kind == "RoCE v2" and ":ffff:" in gid)
    return Port(
        device=record.device,
        port=record.port,
        up="ACTIVE" in record.state.upper(),
        gbit=float(rate[1]) if rate else 0.0,
        roce=record.link_layer == "Ethernet",
        efa=record.device.startswith(("efa", "rdmap")),
        gid_index=next(v2, None),
        netdevs=record.netdevs,
    )


def training_ports(ports: Sequence[Port]) -> list[Port]:
    """The ports to train over: those that are up, of the fastest rate; InfiniBand before RoCE."""
    up = [port for port in ports if port.up and not port.efa]
    kind = [port for port in up if not port.roce] or up
    fastest = max((port.gbit for port in kind), default=0.0)
    return [port for port in kind if port.gbit == fastest]


def nccl_env(ports: Sequence[Port], interface: str) -> dict[str, tuple[str, str]]:
    """NCCL's settings for one host, each with its reason; ``interface``: on the route to the head."""
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


def _why(use: Sequence[Port], ports: Sequence[Port]) -> str:
    kind = "RoCE" if use[0].roce else "InfiniBand"
    slower = sorted({port.device for port in ports if port.up and port not in use})
    return f"{len(use)} {kind} ports of {use[0].gbit:g} Gb/s are up{given('; slower: {}', ', '.join(slower))}"


def has_rdma(ports: Sequence[Port]) -> bool:
    """Whether a fall-back to TCP sockets would lose something."""
    return any(port.up for port in ports)


def socket_line(text: str) -> str:
    """The line by which NCCL says that it uses TCP sockets; '' where none does."""
    return next((line for line in text.splitlines() if SOCKETS in line and "NCCL INFO" in line and "Using" in line), "")
