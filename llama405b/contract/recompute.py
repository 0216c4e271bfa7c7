"""What activation checkpointing computes again in the backward, layer by layer: ``model.activation_checkpointing``. Pure."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from llama405b.contract.errors import UserError

Kind = Literal["full", "operators", "none"]
OLD = {"true": "full", "false": "none"}  # until there were more
WAYS = "write full, operators, operators:K (in the last K layers), every:N (in every Nth layer), none, or auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again of a decoder layer.

    full: all, of its input. operators: what matrix products and attention made is kept, all else computed again. none: nothing.
    """

    kind: Kind = "full"
    last: int | None = None  # operators: in so many layers, the last of each pipeline stage; None: in all
    every: int = 1  # full: of every so many layers the first; none of the others

    @classmethod
    def read(cls, text: str) -> "Recompute":
        """Read ``full``, ``operators``, ``operators:24``, ``every:2`` or ``none``; ``auto``, until it is chosen, is ``full``.

        Raises:
            UserError: It is none of them.
        """
        name, colon, number = OLD.get(text, text).partition(":")
        count = int(number) if number.isdecimal() and len(number) < 6 else 0
        match name, bool(colon):
            case "full" | "operators" | "none" as kind, False:
                return cls(kind)
            case "auto", False:
                return FULL
            case "operators", True if count:
                return cls("operators", last=count)
            case "every", True if count:
                return cls(every=count)
        raise UserError(f"model.activation_checkpointing is {text!r}; {WAYS}")

    def of(self, layers: int) -> tuple[Kind, ...]:
        """Return what is done in each of so many layers of a pipeline stage."""
        return _of(self, layers)

    def counts(self, stages: tuple[int, ...]) -> Mapping[Kind, int]:
        """Return in how many layers what is done, of pipeline stages of so many."""
        return _counts(self, stages)

    def __str__(self) -> str:
        """As it is written."""
        if self.last is not None:
            return f"{self.kind}:{self.last}"
        return f"every:{self.every}" if self.every > 1 else self.kind


@functools.lru_cache(1024)
def _of(recompute: Recompute, layers: int) -> tuple[Kind, ...]:
    if recompute.last is not None:
        return tuple("full" if layer < layers - recompute.last else recompute.kind for layer in range(layers))
    return tuple("none" if layer % recompute.every else recompute.kind for layer in range(layers))


@functools.lru_cache(1024)
def _counts(recompute: Recompute, stages: tuple[int, ...]) -> Mapping[Kind, int]:
    kinds = [kind for layers in stages for kind in recompute.of(layers)]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


FULL = Recompute()
