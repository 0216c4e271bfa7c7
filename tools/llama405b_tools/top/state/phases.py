"""How long a run's phases take, against what they usually take. Pure."""

import collections
import dataclasses
import statistics
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from llama405b.contract.records import Phase
from llama405b_tools.text.figures import span
from llama405b_tools.top.state.picture import RunPhase

KEPT = 9  # times of a phase
SHOWN = {
    Phase.FAILED: RunPhase.FAILED,
    Phase.START: RunPhase.STARTING,
    Phase.DATA: RunPhase.LOADING,
    Phase.LOAD: RunPhase.LOADING,
    Phase.PIN: RunPhase.LOADING,
    Phase.RESUME: RunPhase.LOADING,
    Phase.CHECKPOINT: RunPhase.SAVING,
    Phase.EVAL: RunPhase.EVALUATING,
    Phase.UPDATE: RunPhase.TRAINING,
    Phase.TRAIN: RunPhase.TRAINING,
    Phase.DONE: RunPhase.DONE,
}  # a rank's phase -> the run's, in the order in which other ranks wait for it
ACTS = {
    Phase.START: "starting",
    Phase.DATA: "reading the data",
    Phase.LOAD: "loading",
    Phase.PIN: "pinning memory",
    Phase.RESUME: "reading the checkpoint",
    Phase.CHECKPOINT: "saving",
    Phase.EVAL: "evaluating",
}  # phases that have a usual time


class Stay(NamedTuple):
    """A run in a phase other than training: for how long, and how long it usually takes."""

    phase: Phase
    lasts_s: float
    usual_s: float | None  # None: unknown

    @property
    def words(self) -> str:
        """How long it lasts: ``saving for 38m00s, usually 12s``."""
        usual = "" if self.usual_s is None else f", usually {span(self.usual_s)}"
        return f"{ACTS[self.phase]} for {span(self.lasts_s)}{usual}"


@dataclasses.dataclass(slots=True)
class PhaseTimes:
    """How long each phase took so far, as far as that was seen."""

    took: dict[Phase, collections.deque[float]] = dataclasses.field(default_factory=dict)
    current: tuple[Phase, float] | None = None  # and since when, by the clock of its rank

    def see(self, phase: Phase, since: float) -> None:
        """Take the phase of one rank, always of the same."""
        if self.current and self.current[1] < since:
            before, began = self.current
            self.took.setdefault(before, collections.deque(maxlen=KEPT)).append(since - began)
        self.current = phase, since

    def usual_s(self, phase: Phase, told: Mapping[str, float]) -> float | None:
        """Return the median time of a phase: as seen, else as the host tells; None if it is unknown."""
        if phase in self.took:
            return statistics.median(self.took[phase])
        return told.get(phase)


def waited_for(phases: Container[Phase]) -> Phase:
    """Return the phase of the rank that the others wait for."""
    return next((phase for phase in SHOWN if phase in phases), Phase.START)


def shown(phases: Iterable[Phase]) -> RunPhase:
    """Return one phase for all ranks: the one that the others wait for."""
    return SHOWN[waited_for({*phases})]
