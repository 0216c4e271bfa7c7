"""The usual names of strategies for many ranks, and what each one sets. All but fsdp1 use FSDP2.

A step has several micro-batches if the global batch is larger than what all ranks compute at once. ZeRO's stages: arXiv 1910.02054.
"""

import dataclasses
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
