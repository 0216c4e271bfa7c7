"""What to expect of a run on a cluster: whether it fits, how fast it goes, and which settings would be better. Pure.

The spreads are those of docs/plan.md: of step times of other programs, nine of ten are within ``TIME_SPREAD``. That of memory covers
what fragments, which nobody has measured of this trainer.
"""

import dataclasses
import enum
from collections.abc import Iterator

from llama405b.capacity.estimate import Cluster, Estimate, Load, estimate
from llama405b.capacity.setting import Shape

TIME_SPREAD, MEMORY_SPREAD = 0.15, 0.10
MICRO_BATCHES = (1, 2, 4, 8, 16)
WHOLE, HALVES = ("LlamaDecoderLayer", "Embedding"), ("LlamaAttention", "LlamaMLP", "Embedding")


class Fit(enum.IntEnum):
    """Whether something fits: by more than the spread, within it, or not."""

    NO = 0
    MAYBE = 1
    YES = 2

    @classmethod
    def of(cls, needs: float, has: float) -> "Fit":
        """Compare bytes."""
        if needs * (1 + MEMORY_SPREAD) <= has:
            return cls.YES
        return cls.MAYBE if needs * (1 - MEMORY_SPREAD) <= has else cls.NO


@dataclasses.dataclass(frozen=True, slots=True)
class Outlook:
    """What a run takes, beside what there is."""

    load: Load
    cluster: Cluster
    ram_bytes: float  # of a host; 0: unknown
    needs: Estimate

    @classmethod
    def of(cls, load: Load, cluster: Cluster, ram_bytes: float = 0.0) -> "Outlook":
        """Predict it."""
        return cls(load, cluster, ram_bytes, estimate(load, cluster))

    @property
    def gpu(self) -> Fit:
        """Whether a GPU's memory is enough."""
        return Fit.of(self.needs.gpu_bytes, self.cluster.gpu.memory_bytes)

    @property
    def ram(self) -> Fit:
        """Whether a host's memory is enough, as far as that is known."""
        return Fit.of(self.needs.host_bytes, self.ram_bytes) if self.ram_bytes else Fit.YES

    @property
    def fit(self) -> Fit:
        """Whether both are."""
        return min(self.gpu, self.ram)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step: a GPU has at least one micro-batch."""
        return max(self.load.global_batch, self.load.micro_batch * self.load.world) * self.load.seq_len

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs; None: unknown for these numerics."""
        return self.step_tokens / self.needs.step_s if self.needs.step_s else None

    @property
    def floor_s(self) -> float:
        """What the model's FLOPs alone take at the GPUs' peak: no step is faster."""
        flops = Shape.of(self.load.llama).model_flops(self.load.seq_len) * self.step_tokens
        return flops / self.load.world / self.cluster.gpu.flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (PaLM, appendix B, with causal attention)."""
        return self.floor_s / self.needs.step_s if self.needs.step_s else None


def variants(outlook: Outlook) -> Iterator[Outlook]:
    """Yield the settings that the trainer takes for the same steps: places of the states, units, micro-batches that divide the step."""
    load = outlook.load
    for offload in ("none", "states", "full"):
        if offload == "states" and load.numerics != "fp32-master":
            continue
        moments = load.moments if offload != "none" else "fp32"
        for wrap in (WHOLE, HALVES):
            for micro in MICRO_BATCHES:
                if load.global_batch % (micro * load.world) and micro != load.micro_batch:
                    continue
                other = dataclasses.replace(load, offload=offload, wrap=wrap, micro_batch=micro, moments=moments)
                yield Outlook.of(other, outlook.cluster, outlook.ram_bytes)


def best(outlook: Outlook) -> list[Outlook]:
    """Return the variants: those that fit first, the fastest first."""
    return sorted(variants(outlook), key=lambda each: (-each.fit, -(each.tokens_per_s or 0.0), each.needs.gpu_bytes))


def largest_micro_batch(outlook: Outlook) -> int:
    """Return the largest micro-batch that fits with these settings; 0: none."""
    fitting = 0
    for micro in range(1, 1025):
        load = dataclasses.replace(outlook.load, micro_batch=micro)
        if Outlook.of(load, outlook.cluster, outlook.ram_bytes).gpu is not Fit.YES:
            break
        fitting = micro
    return fitting
