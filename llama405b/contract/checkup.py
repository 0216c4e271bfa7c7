"""What ``doctor --deep`` measures on the hosts: rank 0 prints lines of ``SIGN`` and a part of the result as JSON."""

import dataclasses

SIGN = "checkup "


@dataclasses.dataclass(frozen=True, slots=True)
class HostLink:
    """Rate between two hosts, in both directions at the same time."""

    a: str
    b: str
    gb_per_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class RankSpeed:
    """Speed of one rank's device."""

    rank: int
    host: str
    local_rank: int
    tflops: float


@dataclasses.dataclass(frozen=True, slots=True)
class Checkup:
    """The result, or a part of it: links add up over the parts, all else is in the last part."""

    links: tuple[HostLink, ...] = ()
    device: str = ""  # cpu | cuda; "": not the last part
    devices: tuple[RankSpeed, ...] = ()
    all_gather_gb_per_s: float = 0.0  # bus bandwidth
    all_reduce_gb_per_s: float = 0.0
