"""What to expect of a run on a cluster: whether it fits, how fast it goes, and which settings would be better. Pure.

The spreads are those of docs/plan.md: of step times of other programs, nine of ten are within ``TIME_SPREAD``. That of memory covers
what fragments, which nobody has measured of this trainer.
"""

import bisect
import dataclasses
import enum
import functools
from collections.abc import Iterator

from llama405b.capacity import calibration
from llama405b.capacity.calibration import Calibration
from llama405b.capacity.estimate import Cluster, Estimate, Load, estimate
from llama405b.capacity.setting import Shape

TIME_SPREAD, MEMORY_SPREAD = 0.15, 0.10
LEAST_GAIN = 0.01
MICRO_BATCHES = (1, 2, 4, 8, 16)
WHOLE, HALVES = ("LlamaDecoderLayer", "Embedding"), ("LlamaAttention", "LlamaMLP", "Embedding")


class Fit(enum.IntEnum):
    """Whether something fits: by more than the spread, within it, or not."""

    NO = 0
    MAYBE = 1
    YES = 2

    @classmethod
    def of(cls, needs: float, has: float, spread: float = MEMORY_SPREAD) -> "Fit":
        """Compare bytes."""
        if needs * (1 + spread) <= has:
            return cls.YES
        return cls.MAYBE if needs * (1 - spread) <= has else cls.NO


@dataclasses.dataclass(frozen=True, slots=True)
class Outlook:
    """What a run takes, beside what there is."""

    load: Load
    cluster: Cluster
    ram_bytes: float  # of a host; 0: unknown
    needs: Estimate
    calibration: Calibration | None = None  # that ``needs`` takes into account

    @classmethod
    def of(cls, load: Load, cluster: Cluster, ram_bytes: float = 0.0) -> "Outlook":
        """Predict it."""
        return cls(load, cluster, ram_bytes, estimate(load, cluster))

    def calibrated(self, found: Calibration) -> "Outlook":
        """Return it with what was measured there; unchanged if that was with other GPUs, or another model, sequence or numerics."""
        if not found.knows(self.load, self.cluster.gpu):
            return self
        cluster = found.measured(self.cluster)
        needs = estimate(self.load, cluster)
        needs = found.applied(needs) if found.fits(self.load) else needs
        return Outlook(self.load, cluster, self.ram_bytes, needs, found)

    @property
    def time_spread(self) -> float:
        """How far off times may be, as a share."""
        return calibration.TIME_SPREAD if self._measured else TIME_SPREAD

    @property
    def memory_spread(self) -> float:
        """The same of memory."""
        return calibration.MEMORY_SPREAD if self._measured else MEMORY_SPREAD

    @property
    def _measured(self) -> bool:
        """Whether this very run was."""
        return self.calibration is not None and self.calibration.fits(self.load)

    @property
    def gpu(self) -> Fit:
        """Whether a GPU's memory is enough."""
        return Fit.of(self.needs.gpu_bytes, self.cluster.gpu.memory_bytes, self.memory_spread)

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
        """Tokens of a step: whole micro-batches of every GPU, at least one."""
        together = self.load.micro_batch * self.load.world
        return max(1, self.load.global_batch // together) * together * self.load.seq_len

    @property
    def tokens_per_s(self) -> float | None:
        """Of all GPUs; None: unknown for these numerics."""
        return self.step_tokens / self.needs.step_s if self.needs.step_s else None

    def gain(self, other: "Outlook") -> float:
        """How much faster a GPU of this trains than one of another, as a share."""
        return (self.tokens_per_s or 0) / self.load.world / (other.tokens_per_s or 1) * other.load.world - 1

    @property
    def floor_s(self) -> float:
        """What the model's FLOPs alone take at the GPUs' peak: no step is faster."""
        flops = Shape.of(self.load.llama).model_flops(self.load.seq_len) * self.step_tokens
        return flops / self.load.world / self.cluster.gpu.flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (PaLM, appendix B, with causal attention)."""
        return self.floor_s / self.needs.step_s if self.needs.step_s else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: with what is computed again."""
        shape, seq_len = Shape.of(self.load.llama), self.load.seq_len
        again = shape.recomputed_flops(seq_len) / shape.model_flops(seq_len)
        return self.mfu * (1 + again) if self.mfu else None


def variants(outlook: Outlook) -> Iterator[Outlook]:
    """Yield the settings that the trainer takes for the same steps: places of the states, units, micro-batches that divide the step."""
    load = outlook.load
    for offload in ("none", "states", "full"):
        if offload == "states" and load.numerics != "fp32-master":
            continue
        if offload != "none" and outlook.cluster.gpu.is_cpu:
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

    def fits(micro: int) -> bool:
        load = dataclasses.replace(outlook.load, micro_batch=micro)
        return Outlook.of(load, outlook.cluster, outlook.ram_bytes).gpu is Fit.YES

    return bisect.bisect_left(range(1, 1025), x=True, key=lambda micro: not fits(micro))


def remedies(outlook: Outlook) -> list[tuple[str, Outlook]]:
    """Return single changes that help, the most helpful first: what they are, and what follows.

    While it does not surely fit, those that fit better help; then those that make it faster by more than 1 %.
    """
    load, cluster = outlook.load, outlook.cluster
    change = functools.partial(dataclasses.replace, load)
    loads = {
        f"smaller units (--parallel.wrap {','.join(HALVES)})": change(wrap=HALVES),
        f"larger units (--parallel.wrap {','.join(WHOLE)})": change(wrap=WHOLE),
        "--parallel.offload none": change(offload="none", moments="fp32"),
        "--parallel.offload states": change(offload="states"),
        "--parallel.offload full": change(offload="full"),
        "--parallel.moments bf16 (with optimizer.betas of at most 0.99)": change(moments="bf16"),
        "--parallel.numerics pure-bf16 (loses small updates)": change(numerics="pure-bf16", moments="fp32"),
        f"--training.micro_batch_size {2 * load.micro_batch}": change(micro_batch=2 * load.micro_batch),
        "twice the hosts": change(world=2 * load.world, global_batch=max(load.global_batch, 2 * load.world)),
    }
    if cluster.rates:
        del loads["--parallel.numerics pure-bf16 (loses small updates)"]  # measured were others
    found = {
        words: Outlook.of(other, cluster, outlook.ram_bytes)
        for words, other in loads.items()
        if other != load and _runs(other, cluster)
    }
    faster = dataclasses.replace(cluster, nic_bytes_per_s=2 * cluster.nic_bytes_per_s)
    if load.hosts > 1:
        found["twice the network"] = Outlook.of(load, faster, outlook.ram_bytes)
    helps = [
        (words, other)
        for words, other in found.items()
        if other.fit > outlook.fit or (other.fit == outlook.fit == Fit.YES and other.gain(outlook) > LEAST_GAIN)
    ]
    return sorted(helps, key=lambda each: (-each[1].fit, -each[1].gain(outlook)))


def _runs(load: Load, cluster: Cluster) -> bool:
    """Whether the trainer takes these settings, and their time is known on what was measured, if that was."""
    if cluster.gpu.is_cpu and load.offload != "none":
        return False
    if load.offload == "states" and load.numerics != "fp32-master":
        return False
    if load.moments == "bf16" and (load.offload == "none" or load.numerics == "pure-bf16"):
        return False
    return load.global_batch % (load.micro_batch * load.world) == 0
