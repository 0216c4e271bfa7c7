"""What ``doctor --deep`` measures on the hosts: lines of rank 0, each ``SIGN`` and a part of the result as JSON."""

import dataclasses

SIGN = "checkup "


@dataclasses.dataclass(frozen=True, slots=True)
class HostLink:
    """Between two hosts, both directions at once."""

    a: str
    b: str
    gb_per_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class RankSpeed:
    """One rank's."""

    rank: int
    host: str
    local_rank: int
    tflops: float


@dataclasses.dataclass(frozen=True, slots=True)
class Checkup:
    """The result, or a part of it: the parts' links together, and the rest from the last."""

    links: tuple[HostLink, ...] = ()
    device: str = ""  # cpu | cuda; "": a part
    devices: tuple[RankSpeed, ...] = ()
    all_gather_gb_per_s: float = 0.0  # bus bandwidth
    all_reduce_gb_per_s: float = 0.0
