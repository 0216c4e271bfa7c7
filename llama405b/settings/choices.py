"""Names that stand for several settings, and what each one sets: strategies for many ranks, and optimizers.

All strategies but fsdp1 use FSDP2. A step has several micro-batches if the global batch is larger than what all ranks compute at once.
ZeRO's stages: arXiv 1910.02054.

An elementwise optimizer treats each element by itself, so any mesh and any place of its state will do. A matrix optimizer needs the whole
matrix of a layer on one device; what is no such matrix is updated by another.
"""

import dataclasses
import math
from typing import Literal

FsdpUnit = Literal["layer", "sublayer"]
UNIT_CLASSES: dict[FsdpUnit, tuple[str, ...]] = {  # Llama's names of the classes that become FSDP units
    "layer": ("LlamaDecoderLayer",),
    "sublayer": ("LlamaAttention", "LlamaMLP"),
}
StrategyName = Literal["fsdp2", "fsdp1", "zero3", "zero2", "zero1", "ddp", "hsdp", "3d", "auto"]
Copies = Literal["one", "hosts", "ranks"]  # copies of the model, if dp_replicate is 0


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """What a strategy's name sets."""

    copies: Copies = "one"
    keeps_weights_gathered: bool = False  # from a step's first forward to its last backward; else gathered for each one
    reduces_every_microbatch: bool = True  # else gradients stay unreduced until the last micro-batch
    is_auto: bool = False  # ``predict.search`` chooses the mesh


STRATEGIES: dict[StrategyName, Strategy] = {
    "fsdp2": Strategy(),
    "fsdp1": Strategy(),
    "zero3": Strategy(),
    "zero2": Strategy(keeps_weights_gathered=True),
    "zero1": Strategy(keeps_weights_gathered=True, reduces_every_microbatch=False),
    "ddp": Strategy(copies="ranks", keeps_weights_gathered=True, reduces_every_microbatch=False),
    "hsdp": Strategy(copies="hosts"),
    "3d": Strategy(is_auto=True),
    "auto": Strategy(is_auto=True),
}


OptimizerName = Literal["adamw", "lion", "muon"]


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What is known of an optimizer without torch."""

    moments: tuple[str, ...]  # states as large as the parameter, by their names in checkpoints
    settings: tuple[str, ...]  # of ``Optimizer``, which it reads beside those of the schedule
    rms: float = 0.0  # root mean square of an update, in learning rates; 0: it follows from the first of betas
    rest: OptimizerName | None = None  # of a matrix optimizer: what updates all else

    def update_rms(self, beta1: float) -> float:
        """Return the root mean square of an update, in learning rates, where gradients are noise.

        AdamW's m / sqrt(v): m is a running average, whose variance is (1 - beta1) / (1 + beta1) of theirs (arXiv 1711.05101).
        """
        return self.rms or math.sqrt((1 - beta1) / (1 + beta1))


OPTIMIZERS: dict[OptimizerName, OptimizerSpec] = {
    "adamw": OptimizerSpec(("exp_avg", "exp_avg_sq"), ("betas", "eps")),
    "lion": OptimizerSpec(("exp_avg",), ("betas",), rms=1.0),
    "muon": OptimizerSpec(("momentum_buffer",), ("momentum", "betas", "eps"), rms=0.2, rest="adamw"),
}
ALL_SETTINGS = {name for spec in OPTIMIZERS.values() for name in spec.settings}


def is_layer_matrix(name: str, n_dimensions: int) -> bool:
    """Check whether a matrix optimizer updates a parameter: a matrix of a decoder layer, by its name in the checkpoint."""
    return n_dimensions == 2 and name.startswith("model.layers.")
