"""What a cell of heat may show of a GPU or its rank. Pure."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from llama405b_tools.text.figures import share
from llama405b_tools.top.state.picture import HostRow, RankRow


class Quantity(NamedTuple):
    """Something that every GPU (else rank) has."""

    name: str
    unit: str
    of: Callable[[HostRow, int], float | None]
    worst: Callable[[Iterable[float]], float]  # of several
    worst_name: str
    between: tuple[float, float] | None  # the coldest and the hottest value; None: 0 and the highest there is
    around: bool = False  # whether the median is in the middle of the scale
    least: float = 0.0  # the hottest value is at least this: noise is no heat

    def scale(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the coldest and the hottest value, given all values."""
        if self.between or not values:
            return self.between or (0.0, 1.0)
        if self.around:
            median = statistics.median(values)
            return 0.45 * median, 1.45 * median
        return 0.0, max(self.least, *values)


def rank_at(row: HostRow, i: int) -> RankRow | None:
    """Return the rank on a host's GPU; without GPUs, its i-th rank."""
    if i < len(row.gpus):
        return next((rank for rank in row.ranks if rank.rank == row.gpus[i].rank), None)
    return row.ranks[i] if i < len(row.ranks) else None


def n_units(row: HostRow) -> int:
    """Return how many GPUs a host has; without them, how many ranks."""
    return len(row.gpus) or len(row.ranks)


def network(row: HostRow) -> float | None:
    """Return a host's Gb/s: RDMA, without it the busiest interface; both directions."""
    rate = row.net_bytes_per_s if row.ib_bytes_per_s is None else row.ib_bytes_per_s
    return None if rate is None else rate * 8e-9


def _gpu(field: str) -> Callable[[HostRow, int], float | None]:
    return lambda row, i: getattr(row.gpus[i], field) if i < len(row.gpus) else None


def _memory(row: HostRow, i: int) -> float | None:
    return share(row.gpus[i].used_mib, row.gpus[i].memory_mib) if i < len(row.gpus) else None


def _busy(row: HostRow, i: int) -> float | None:
    rank = rank_at(row, i)
    return rank.busy_s if rank else None


LEAST_GBIT = 0.01  # what an idle host's own services send and receive is less
LOWEST, HIGHEST = (min, "lowest"), (max, "highest")
QUANTITIES = (
    Quantity("power", "% of limit", _gpu("power_pct"), *LOWEST, (0.0, 100.0)),
    Quantity("utilization", "%", _gpu("utilization"), *LOWEST, (0.0, 100.0)),
    Quantity("memory", "%", _memory, *HIGHEST, (0.0, 100.0)),
    Quantity("temperature", "°C", _gpu("temperature_c"), *HIGHEST, (25.0, 95.0)),
    Quantity("clock", "MHz", _gpu("clock_mhz"), *LOWEST, None),
    Quantity("net", "Gb/s of its host", lambda row, _: network(row), *LOWEST, None, least=LEAST_GBIT),
    Quantity("busy", "s in a step", _busy, *HIGHEST, None, around=True),
)
POWER, UTILIZATION, MEMORY, TEMPERATURE, CLOCK, NETWORK, BUSY = range(len(QUANTITIES))


def available(rows: Sequence[HostRow]) -> list[int]:
    """Return which quantities some host tells."""
    return [
        i
        for i, each in enumerate(QUANTITIES)
        if any(each.of(row, k) is not None for row in rows for k in range(n_units(row)))
    ]
