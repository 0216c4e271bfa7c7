"""The mesh of ranks, the split of micro-batches, and recomputed layers: arithmetic on settings alone.

Mesh axes from the outermost to the innermost: ``pp`` pipeline stages, ``dp_replicate`` copies of the model, ``dp_shard`` shards of each
copy, ``cp`` parts of a sequence, ``tp`` parts of each matrix. Innermost neighbors have adjacent ranks, so they share a host.

Micro-batches are split over the ranks of the batch axes, however many there are: each rank has as many as the others, or one less. In
the last accumulation step the ranks without one take part but train on nothing.

Knows sizes and coordinates; nothing of torch or process groups.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from llama405b.contract.errors import UserError, counted, last_of
from llama405b.settings.strategies import STRATEGIES

if TYPE_CHECKING:
    from llama405b.settings.schema import Parallel, Training

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DP = ("dp_replicate", "dp_shard")  # split the batch
SHARD = ("dp_shard", "cp")  # split each parameter


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinate along one or more axes."""

    rank: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Axes:
    """Number of ranks along each axis."""

    dp_shard: int
    pp: int = 1
    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, parallel: "Parallel", world: int, ranks_per_host: int) -> "Axes":
        """Return the mesh of these settings; ``dp_shard`` is what the other axes leave of the ranks.

        Raises:
            UserError: The axes do not divide the number of ranks; the message names sizes that do.
        """
        inner = parallel.pp * parallel.cp * parallel.tp
        copies = STRATEGIES[parallel.strategy].copies
        hosts = max(1, world // ranks_per_host)
        replicas = parallel.dp_replicate or {"one": 1, "hosts": hosts, "ranks": max(1, world // inner)}[copies]
        if world % (inner * replicas):
            axes = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp, "dp_replicate": replicas}
            sizes = {name: size for name, size in axes.items() if size > 1}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            name = last_of(list(sizes))
            raise UserError(
                f"--parallel.{name}: {counted(world, 'rank')} cannot be divided by {product}; "
                f"use {_nearest(world, inner * replicas // sizes[name], sizes[name], name)}"
            )
        if copies == "ranks" and replicas * inner != world:
            raise UserError(
                f"--parallel.dp_replicate: ddp has a copy of the model on each of {counted(world // inner, 'rank')}, not {replicas}; "
                "leave it out, or use hsdp"
            )
        return cls(world // (inner * replicas), parallel.pp, replicas, parallel.cp, parallel.tp)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in NAMES}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp_shard 1"

    def where(self, rank: int) -> str:
        """Return a rank's coordinates along the axes larger than 1, like ``pp 1, dp 2, tp 5``."""
        places = {"pp": self.place(rank, ("pp",)), "dp": self.place(rank, DP)}
        places |= {name: self.place(rank, (name,)) for name in ("cp", "tp")}
        return ", ".join(f"{name} {place.rank}" for name, place in places.items() if place.size > 1)

    @property
    def told(self) -> str:
        """Short mesh label; '' for plain FSDP."""
        return str(self) if self.dp_shard != self.world else ""

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.size(NAMES)

    def size(self, names: Sequence[str]) -> int:
        """Return the number of ranks along these axes together."""
        return math.prod(getattr(self, name) for name in names)

    def place(self, rank: int, names: Sequence[str]) -> Place:
        """Return a rank's coordinate along these axes taken together; the first is the outermost."""
        found, rest = 0, rank
        indices = {}
        for name in reversed(NAMES):
            rest, indices[name] = divmod(rest, getattr(self, name))
        for name in names:
            found = found * getattr(self, name) + indices[name]
        return Place(found, self.size(names))


def _nearest(world: int, others: int, size: int, name: str) -> str:
    """Return a size of the axis that works with the sizes of the other axes, as a clause."""
    if world % others:
        return "sizes whose product divides the number of ranks"
    return f"{name} {nearest_divisor(world // others, size)}"


def nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of ``size`` that is nearest to the target."""
    return min((each for each in range(1, size + 1) if size % each == 0), key=lambda each: abs(each - wanted))


@dataclasses.dataclass(frozen=True, slots=True)
class Dealing:
    """How the micro-batches of a step are split over ranks."""

    n_micro: int
    n_ranks: int

    @classmethod
    def of(cls, training: "Training", n_ranks: int) -> "Dealing":
        """Split the configured batch; a batch of 0 is one micro-batch per rank.

        Raises:
            UserError: The batch is not a multiple of the micro-batch; the message names the nearest multiples.
        """
        micro, batch = training.micro_batch_size, training.global_batch_size
        if batch % micro:
            nearest = " or ".join(str(size) for size in (batch // micro * micro, -(-batch // micro) * micro) if size)
            raise UserError(
                f"--training.global_batch_size: {counted(batch, 'sequence')} cannot be divided into micro-batches of {micro}; "
                f"use --training.global_batch_size {nearest}, or --training.micro_batch_size 1"
            )
        return cls(batch // micro if batch else n_ranks, n_ranks)

    @property
    def rounds(self) -> int:
        """Forward passes of each rank in a step."""
        return -(-self.n_micro // self.n_ranks)

    @property
    def idle(self) -> int:
        """Number of ranks without a micro-batch in the last accumulation step."""
        return self.rounds * self.n_ranks - self.n_micro

    @property
    def wasted(self) -> float:
        """Fraction of a step's forwards and backwards that run without a micro-batch."""
        return self.idle / (self.rounds * self.n_ranks)

    @property
    def even(self) -> list[int]:
        """The nearest numbers of micro-batches that leave no rank idle."""
        return [n for n in ((self.rounds - 1) * self.n_ranks, self.rounds * self.n_ranks) if n]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's first micro-batch in the step, and its number of micro-batches."""
        each, more = divmod(self.n_micro, self.n_ranks)
        return rank * each + min(rank, more), each + (rank < more)


def waste_note(training: "Training", n_ranks: int) -> str:
    """Return a sentence on idle ranks, with batch sizes that leave none idle; '' if no rank is idle."""
    dealing = Dealing.of(training, n_ranks)
    if not dealing.idle:
        return ""
    of = f"the last of {dealing.rounds} accumulation steps" if dealing.rounds > 1 else "each step"
    batches = " or ".join(str(n * training.micro_batch_size) for n in dealing.even)
    return (
        f"in {of} {dealing.idle} of {counted(n_ranks, 'rank')} {'is' if dealing.idle == 1 else 'are'} idle ("
        f"{100 * dealing.wasted:.0f}% of a step); --training.global_batch_size {batches} leaves none idle"
    )


Kind = Literal["full", "operators", "none"]
OLD = {"true": "full", "false": "none"}  # values from before other kinds existed
WAYS = "write full, operators, operators:K (in the last K layers), every:N (in every Nth layer), none, or auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """What the backward pass recomputes of each decoder layer (activation checkpointing).

    full: everything, from the layer's input. operators: everything but matrix products and attention, whose outputs are kept.
    none: nothing.
    """

    kind: Kind = "full"
    last: int | None = None  # operators: only in the last layers of each pipeline stage, this many; None: in all
    every: int = 1  # full: only in the first of every N layers; the others recompute nothing

    @classmethod
    def read(cls, text: str) -> "Recompute":
        """Parse ``full``, ``operators``, ``operators:24``, ``every:2`` or ``none``.

        ``auto`` counts as ``full`` until it is resolved.

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
        """Return the kind of recomputation for each layer of a pipeline stage."""
        return _of(self, layers)

    def counts(self, stages: tuple[int, ...]) -> Mapping[Kind, int]:
        """Return the number of layers of each kind; ``stages``: number of layers per pipeline stage."""
        return _counts(self, stages)

    def __str__(self) -> str:
        """Return the setting's text."""
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
