"""Round numbers for the axes of a graph. Pure."""

import math

TIMES_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)


def ticks(low: float, high: float, n: int) -> list[float]:
    """Return about ``n`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / n
    unit = 10.0 ** math.floor(math.log10(rough))
    return _multiples(low, high, next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= 0.999 * rough))


def time_ticks(length_s: float, n: int) -> list[float]:
    """Return at most about ``n`` round durations up to ``length_s``."""
    step = next((step for step in TIMES_S if step * n >= length_s), TIMES_S[-1] * math.ceil(length_s / TIMES_S[-1] / n))
    return _multiples(0.0, length_s, step)


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
