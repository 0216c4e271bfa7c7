"""Of a run's time, what makes steps that last: beside saves, restarts, and steps that a failure undoes. Pure."""

import dataclasses

from llama405b.capacity.disk import SavingCost
from llama405b.contract.cadence import Cadence, share_that_counts

RESTART_S = 60.0  # to notice a failure, end all ranks and start them anew, before anything is read; a prior
LEAST = 0.01  # below this share a run is said to get nowhere


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """What saves and failures leave of the time."""

    share: float  # that makes steps that last
    saves_share: float  # that goes to saves
    interval_s: float  # of training between saves
    mtbf_s: float  # between failures, of the run

    @property
    def arrives(self) -> bool:
        """Whether the run gets anywhere."""
        return self.share >= LEAST


def goodput(
    saving: SavingCost, cadence: Cadence, step_s: float, mtbf_s: float, whole_s: float, start_s: float = 0.0
) -> Goodput | None:
    """Predict it; ``mtbf_s``: between failures of the run; ``whole_s``: of its steps, which are all lost if it never saves; 0: unknown.

    ``start_s``: of a start, beside reading.

    A failure undoes what came after the last save that was whole, which is younger than the last that began by as long as one takes.
    A new start reads it at the rate of writing. A save waits for the one before.
    """
    every_s = saving.best_interval_s if cadence.auto else cadence.steps * step_s or cadence.seconds
    interval_s = max(step_s, every_s) if cadence.saves else whole_s
    if not interval_s:
        return None
    cost_s = max(saving.waits_s, saving.write_s - interval_s) if cadence.saves else 0.0
    restart_s = RESTART_S + start_s + 2 * saving.write_s * cadence.saves
    share = share_that_counts(interval_s, cost_s, restart_s, mtbf_s)
    return Goodput(share, cost_s / (interval_s + cost_s), interval_s, mtbf_s)
