"""A planned run's own steps, measured on its hosts with few of its layers: what they tell of all of them. Pure.

What a layer takes is a difference of two measurements, so it holds whatever these hosts do: kernels, links, what hides what.
"""

import dataclasses
from collections.abc import Callable

from llama405b.capacity.estimate import Estimate, Load, estimate
from llama405b.capacity.step_time import StepTime

FEW, MORE = 1, 3  # layers
TIME_SPREAD, MEMORY_SPREAD = 0.10, 0.05  # of docs/measurements/plan.md on CPUs; no GPU was calibrated yet


def measured_layers(layers: int) -> tuple[int, int]:
    """Return with how many layers to measure a run that has so many: fewer, as far as there are."""
    return FEW, min(layers, max(FEW + 1, min(MORE, layers - 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """What steps with so many layers took, in the median."""

    layers: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: int  # of rank 0: its GPU, with what the allocator keeps, or its process

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """Two measurements, and of what; fewer layers than the run has, if it has three."""

    load: Load  # the planned run
    few: Point
    more: Point
    made: str = ""  # the day

    def fits(self, load: Load) -> bool:
        """Whether it was made for such a run: only how many checkpoints are kept may differ."""
        return dataclasses.replace(load, keep=self.load.keep, mtbf_s=self.load.mtbf_s) == self.load

    def applied(self, needs: Estimate) -> Estimate:
        """Return the run's estimate with what was measured in place of what is assumed."""
        layers = self.load.llama.layers
        time = StepTime(
            forward_s=self._at(layers, lambda point: point.forward_s),
            backward_s=self._at(layers, lambda point: point.backward_s),
            optimizer_s=self._at(layers, lambda point: point.optimizer_s),
            data_s=self._at(layers, lambda point: point.data_s),
        )
        runtime = self.more.peak_bytes - self._walked(self.more.layers)
        return dataclasses.replace(needs, time=time, runtime_bytes=max(0.0, runtime))

    def _at(self, layers: int, of: Callable[[Point], float]) -> float:
        """The line through both, which does not fall."""
        slope = max(0.0, (of(self.more) - of(self.few)) / max(1, self.more.layers - self.few.layers))
        return of(self.more) + slope * (layers - self.more.layers)

    def _walked(self, layers: int) -> float:
        """What the formulas count of that measurement."""
        return estimate(
            dataclasses.replace(self.load, llama=dataclasses.replace(self.load.llama, layers=layers))
        ).peak.total
