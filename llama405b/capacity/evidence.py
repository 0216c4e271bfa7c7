"""How far off a predicted time may be, by what has been measured of such runs. Pure.

A range is where a run of one more program lies with nine chances in ten, after what other programs published and nobody fitted:
programs differ from each other by more than the runs of one do (Student's t over programs; ``scripts/fit_plan.py`` writes
``ranges.json``, docs/plan-accuracy.md tells how). Of fewer than three programs there is none: then it is wide by assumption.
"""

import dataclasses
import enum
import functools
import json
from pathlib import Path

from llama405b.capacity.setting import Setting

RANGES = Path(__file__).with_name("ranges.json")
SMALL = 10e9  # parameters; below, launches of kernels count, and programs differ by more
FEWEST = 3  # programs that make a range
MEASURED = frozenset({"h100-80", "h100-96-500w", "h200-141", "a100-80", "a100-40"})  # GPUs of which rates are known


class Evidence(enum.StrEnum):
    """What is known of times like these."""

    STEPS = "steps"  # the run's own steps, on its hosts
    RATES = "rates"  # the rates of its hosts
    LARGE = "large"  # other programs, on such GPUs
    SMALL = "small"  # the same, of small models or of one GPU
    MESH = "mesh"  # the same, that split more than the parameters: tp, cp or pp
    OFFLOAD = "offload"  # fewer than three programs
    FP8 = "fp8"  # likewise
    ADAPTERS = "adapters"  # no program
    NOTHING = "nothing"  # no one has timed this GPU

    @classmethod
    def of(cls, setting: Setting) -> "Evidence":
        """Return what is known of a setting that nobody measured on its own hosts."""
        if setting.gpu.name not in MEASURED:
            return cls.NOTHING
        if setting.frozen:
            return cls.ADAPTERS
        if setting.fp8:
            return cls.FP8
        if setting.updates_on_host:
            return cls.OFFLOAD
        return _alike(setting)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Where a time lies, as shares of what is predicted."""

    low: float
    high: float
    programs: int = 0  # it is after those of so many; 0: it is not after programs

    def of(self, value: float) -> tuple[float, float]:
        """Return the least and the most that a value may be."""
        return value * self.low, value * self.high


STEPS = Range(0.90, 1.10)  # of docs/measurements/plan.md, on CPUs; no GPU was calibrated yet
FP8 = Range(0.85, 1.13, 2)  # a factor of the others: five published rows, of two programs (docs/plan-accuracy.md)
ADAPTERS = Range(0.85, 1.18)  # a factor of the others, by assumption: no program's times with LoRA have been compared
RATES = Range(0.85, 1.15)  # the same, of settings that were not measured themselves


def range_of(setting: Setting) -> Range | None:
    """Return the range of a setting that nobody measured on its own hosts; None: its GPU was never measured."""
    known = Evidence.of(setting)
    if known is Evidence.NOTHING:
        return None
    alike = _ranges()[_alike(setting)]
    offload = setting.updates_on_host, _ranges()[Evidence.OFFLOAD]
    for applies, more in (offload, (setting.fp8, FP8), (setting.frozen, ADAPTERS)):
        if applies:
            alike = Range(alike.low * more.low, alike.high * more.high, more.programs)
    return alike


@functools.cache
def _ranges() -> dict[str, Range]:
    """The ranges of other programs, by what is known; that of ``OFFLOAD`` is a factor of the other's."""
    return {name: Range(**found) for name, found in json.loads(RANGES.read_text()).items()}


def _alike(setting: Setting) -> Evidence:
    """Return of which programs the runs were like it, but for where the states are."""
    if setting.tp * setting.cp * setting.pp > 1:
        return Evidence.MESH
    is_small = setting.gpus == 1 or setting.shape.parameters < SMALL
    return Evidence.SMALL if is_small else Evidence.LARGE
