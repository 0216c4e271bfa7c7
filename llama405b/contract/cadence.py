"""How often a run saves: ``100`` steps, ``10m``, or ``auto``. Pure: values in, values out."""

import contextlib
import dataclasses
import math

from llama405b.contract.errors import UserError
from llama405b.contract.units import seconds

FIRST_S = 600.0  # with auto: until the first save, whose cost is not known yet
LEAST_S = 60.0
MOST_EXPONENT = 700.0  # that a float holds


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """When to save: after so many steps, after so long, or as often as is best; all 0: never."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False

    @classmethod
    def read(cls, text: str) -> "Cadence":
        """Read ``100``, ``10m`` or ``auto``; ``0``: never.

        Raises:
            UserError: It is none of them.
        """
        if text == "auto":
            return cls(auto=True)
        if text.isdecimal() and len(text) < 10:
            return cls(steps=int(text))
        found = 0.0
        with contextlib.suppress(UserError):
            found = seconds(text, "")
        if not found or text[-1].isdecimal():
            raise UserError(
                f"checkpoint.every is {text!r}; write a number of steps, a time like 10m, or auto; 0: never"
            )
        return cls(seconds=found)

    @property
    def saves(self) -> bool:
        """Whether it saves at all."""
        return self != Cadence()

    def due(self, step: int, since_s: float, best_s: float) -> bool:
        """Return whether to save after this step, ``since_s`` after the last save; ``best_s``: see ``best_interval``."""
        if self.steps:
            return step % self.steps == 0
        return self.saves and since_s >= self.interval_s(0.0, best_s)

    def interval_s(self, step_s: float, best_s: float) -> float:
        """Return the seconds between saves, if a step takes ``step_s``; 0: unknown."""
        return self.steps * step_s or (best_s if self.auto else self.seconds)


def best_interval(cost_s: float | None, restart_s: float, mtbf_s: float) -> float:
    """Return the seconds between saves at which a run loses the least: to saving, and to steps that a failure undoes.

    ``sqrt(2 C (M + R)) - C`` for saves that block for C, restarts that take R, and a mean time M between failures: J. T. Daly, A higher
    order estimate of the optimum checkpoint interval for restart dumps (2006), in its first-order form; Young (1974) is without R.
    M is ``checkpoint.mtbf`` over the ranks; its default is that of Llama 3's training (arXiv 2407.21783: 419 unexpected interruptions
    of 16,384 GPUs in 54 days).
    """
    if cost_s is None:
        return FIRST_S
    return max(LEAST_S, math.sqrt(2 * cost_s * (mtbf_s + restart_s)) - cost_s)


def share_that_counts(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of the time in which a run makes steps that last: not saves, restarts, or steps that a failure undoes.

    ``t exp(-R / M) / (M (exp((t + C) / M) - 1))`` for t between saves: Daly's complete model (as for ``best_interval``, equation 20),
    where failures come at random, and during saves and restarts as well.
    """
    together = (interval_s + cost_s) / mtbf_s
    if together > MOST_EXPONENT:
        return 0.0
    return interval_s / mtbf_s * math.exp(-restart_s / mtbf_s) / math.expm1(together)
