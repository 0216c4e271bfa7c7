"""The names that people know for training on many ranks: what each sets. All of FSDP2 is one engine. Pure.

A step has several micro-batches where the global batch is larger than what all ranks compute at once. ZeRO's stages: arXiv 1910.02054.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    pass

Name = Literal["fsdp2", "fsdp1", "zero3", "zero2", "zero1", "ddp", "hsdp", "3d", "auto"]
Copies = Literal["one", "hosts", "ranks"]  # of the model, where dp_replicate does not say how many


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """What a name sets."""

    copies: Copies = "one"
    keeps_weights: bool = False  # gathered from a step's first forward to its last backward; else anew for each
    reduces_each: bool = True  # gradients are reduced and sharded in each micro-batch; else whole until the last one
    chosen: bool = False  # the mesh is chosen by what the plan predicts (``predict.search``)


STRATEGIES: dict[Name, Strategy] = {
    "fsdp2": Strategy(),
    "fsdp1": Strategy(),
    "zero3": Strategy(),
    "zero2": Strategy(keeps_weights=True),
    "zero1": Strategy(keeps_weights=True, reduces_each=False),
    "ddp": Strategy(copies="ranks", keeps_weights=True, reduces_each=False),
    "hsdp": Strategy(copies="hosts"),
    "3d": Strategy(chosen=True),
    "auto": Strategy(chosen=True),
}
