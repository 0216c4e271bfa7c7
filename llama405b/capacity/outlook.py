"""What to expect of a run on a cluster: whether it fits, and how fast it goes. Pure.

How far off a time may be: ``evidence``. The spread of memory is for a host's, and for a GPU's where
only what is allocated is known. Where both are known no spread decides: beyond what is allocated there is only more or less time.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable

from llama405b.capacity import calibration, evidence
from llama405b.capacity.calibration import Calibration
from llama405b.capacity.estimate import Cluster, Estimate, estimate, setting_of
from llama405b.capacity.evidence import Evidence, Range
from llama405b.capacity.goodput import Goodput, goodput
from llama405b.capacity.run_shape import RunShape
from llama405b.capacity.setting import Shape
from llama405b.contract.adapters import flops_per_token
from llama405b.contract.cadence import Cadence
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config

MEMORY_SPREAD = 0.10
WHOLE, HALVES = ("LlamaDecoderLayer", "Embedding"), ("LlamaAttention", "LlamaMLP", "Embedding")
UNITS = tuple(
    frozenset(units) - {"Embedding"} for units in (WHOLE, HALVES)
)  # with the embedding or without, as predicted


class Fit(enum.IntEnum):
    """Whether something fits."""

    NO = 0
    MAYBE = 1  # it is within the spread
    RETRIES = 2  # what a GPU's memory must hold fits, but not what PyTorch keeps: it gives that back and asks again, in each step
    YES = 3

    @classmethod
    def of(cls, needs: float, has: float, spread: float = MEMORY_SPREAD) -> "Fit":
        """Compare bytes."""
        if needs * (1 + spread) <= has:
            return cls.YES
        return cls.MAYBE if needs * (1 - spread) <= has else cls.NO

    @classmethod
    def on_gpu(cls, allocated: float, has: float, reserved: Callable[[], float | None]) -> "Fit":
        """Compare bytes of a GPU; ``reserved`` is asked only where what is allocated fits, and may not be known."""
        if allocated > has:
            return cls.NO
        kept = reserved()
        if kept is None:
            kept = allocated * (1 + MEMORY_SPREAD)
        return cls.YES if kept <= has else cls.RETRIES


@dataclasses.dataclass(frozen=True, slots=True)
class Outlook:
    """What a run takes, beside what there is."""

    load: RunShape
    cluster: Cluster
    ram_bytes: float  # of a host; 0: unknown
    needs: Estimate
    calibration: Calibration | None = None  # that ``needs`` takes into account

    @classmethod
    def of(cls, load: RunShape, cluster: Cluster, ram_bytes: float = 0.0) -> "Outlook":
        """Predict it.

        Raises:
            UserError: The GPU has no FP8, and the run computes in it.
        """
        gpu = cluster.gpu
        if load.numerics == "fp8" and not (gpu.is_cpu or gpu.fp8_flops):
            raise UserError(
                f"--parallel.numerics: {gpu.name} has no FP8; use fp32-master, or GPUs that have it, such as h100-80"
            )
        return cls(load, cluster, ram_bytes, estimate(load, cluster, ram_bytes))

    def of_load(self, load: RunShape) -> "Outlook":
        """Predict something else in the same place; only what was measured of this very run is left out."""
        return Outlook.of(load, self.cluster, self.ram_bytes)

    def calibrated(self, found: Calibration) -> "Outlook":
        """Return it with what was measured there; unchanged if that was with other GPUs, or another model, sequence or numerics."""
        if not found.knows(self.load, self.cluster.gpu):
            return self
        cluster = found.measured(self.cluster)
        needs = estimate(self.load, cluster, self.ram_bytes)
        needs = found.applied(needs) if found.fits(self.load) else needs
        return Outlook(self.load, cluster, self.ram_bytes, needs, found)

    @property
    def evidence(self) -> Evidence:
        """What is known of times like these."""
        if self._measured:
            return Evidence.STEPS
        return Evidence.RATES if self.calibration else Evidence.of(setting_of(self.load, self.cluster))

    @property
    def time_range(self) -> Range | None:
        """Where times lie; None: the GPU was never measured."""
        if self.calibration:
            return evidence.STEPS if self._measured else evidence.RATES
        return evidence.range_of(setting_of(self.load, self.cluster))

    @property
    def memory_spread(self) -> float:
        """How far off the memory of a GPU may be, as a share."""
        return calibration.MEMORY_SPREAD if self._measured else MEMORY_SPREAD

    @property
    def _measured(self) -> bool:
        """Whether this very run was."""
        return self.calibration is not None and self.calibration.fits(self.load)

    @property
    def gpu(self) -> Fit:
        """Whether a GPU's memory is enough."""
        needs, has = self.needs, self.cluster.gpu.memory_bytes
        if self.cluster.gpu.is_cpu:
            return Fit.of(needs.gpu_bytes, has, self.memory_spread)
        return Fit.on_gpu(needs.gpu_bytes, has, lambda: needs.gpu_reserved_bytes)

    @property
    def ram(self) -> Fit:
        """Whether a host's memory is enough, as far as that is known."""
        return Fit.of(self.host_bytes, self.ram_bytes) if self.ram_bytes else Fit.YES

    @property
    def host_held_bytes(self) -> dict[str, float]:
        """Bytes in a host's memory, by what they are; copies of what is saved are among them unless they take what is free alone."""
        copies = self.needs.saving.staged_bytes if self.load.staging_bytes is not None else 0.0
        return {**self.needs.held_by_host, **({"copies while saving": copies} if copies else {})}

    @property
    def host_bytes(self) -> float:
        """All of them."""
        return sum(self.host_held_bytes.values())

    @property
    def room(self) -> float:
        """What is left of the memory that has least left, as a share; where a host's is unknown, that of a GPU."""
        left = [1 - (self.needs.gpu_reserved_bytes or self.needs.gpu_bytes) / self.cluster.gpu.memory_bytes]
        return min([*left, 1 - self.host_bytes / self.ram_bytes] if self.ram_bytes else left)

    @property
    def fit(self) -> Fit:
        """Whether both are."""
        return min(self.gpu, self.ram)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.load.global_batch * self.load.seq_len

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs; None: unknown for these numerics."""
        return self.step_tokens / self.needs.step_s if self.needs.step_s else None

    def gain(self, other: "Outlook") -> float:
        """How much faster a GPU of this trains than one of another, as a share."""
        return (self.tokens_per_s or 0) / self.load.world / (other.tokens_per_s or 1) * other.load.world - 1

    def goodput(self, tokens: float = 0.0) -> Goodput | None:
        """Return what saves and failures leave of the time that so many tokens take; None: unknown."""
        if not (self.needs.step_s and self.tokens_per_s):
            return None
        cadence, mtbf_s = Cadence.read(self.load.every), self.load.mtbf_s / self.load.world
        whole_s, start_s = tokens / self.tokens_per_s, self.needs.pinning_s
        if self.load.adapter.trains:  # no checkpoint has the weights
            start_s += self.needs.loading.rank0_s
        return goodput(self.needs.saving, cadence, self.needs.step_s, mtbf_s, whole_s, start_s)

    def hours(self, tokens: float) -> float | None:
        """Return how long so many tokens take, with saves and failures; None: unknown, or for ever."""
        share = self.goodput(tokens)
        if not (self.tokens_per_s and share and share.arrives):
            return None
        return tokens / self.tokens_per_s / share.share / 3600

    @property
    def floor_s(self) -> float:
        """What the model's FLOPs alone take at the GPUs' peak: no step is faster."""
        flops = flops_per_token(self.load.llama, self.load.adapter, self.load.seq_len) * self.step_tokens
        return flops / self.load.world / self.cluster.gpu.flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (PaLM, appendix B, with causal attention)."""
        return self.floor_s / self.needs.step_s if self.needs.step_s else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: with what is computed again."""
        shape, seq_len = Shape.of(self.load.llama), self.load.seq_len
        full = self.load.recompute.counts(self.load.stages or (shape.layers,)).get("full", 0)
        again = shape.recomputed_flops(seq_len, full) / flops_per_token(self.load.llama, self.load.adapter, seq_len)
        return self.mfu * (1 + again) if self.mfu else None


def predicts_units(wrap: Iterable[str]) -> bool:
    """Whether the memory of such FSDP units is predicted."""
    return {*wrap} - {"Embedding"} in UNITS


def is_predicted(config: Config) -> bool:
    """Whether memory and time of such a run are predicted."""
    return predicts_units(config.parallel.wrap) and not config.parallel.by_fsdp1
