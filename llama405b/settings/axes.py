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

from llama405b.contract.errors import UserError, last_or, pluralize
from llama405b.settings.choices import STRATEGIES

if TYPE_CHECKING:
    from llama405b.settings.schema import Parallel, Training

AXIS_NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DP_AXES = ("dp_replicate", "dp_shard")  # split the batch
SHARD_AXES = ("dp_shard", "cp")  # split each parameter


@dataclasses.dataclass(frozen=True, slots=True)
class Coordinate:
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
    def from_parallel(cls, parallel: "Parallel", world_size: int, ranks_per_host: int) -> "Axes":
        """Return the mesh of these settings; ``dp_shard`` is what the other axes leave of the ranks.

        Raises:
            UserError: The axes do not divide the number of ranks; the message names sizes that do.
        """
        inner = parallel.pp * parallel.cp * parallel.tp
        copies = STRATEGIES[parallel.strategy].copies
        hosts = max(1, world_size // ranks_per_host)
        replicas = parallel.dp_replicate or {"one": 1, "hosts": hosts, "ranks": max(1, world_size // inner)}[copies]
        if world_size % (inner * replicas):
            axes = {"pp": parallel.pp, "cp": parallel.cp, "tp": parallel.tp, "dp_replicate": replicas}
            sizes = {name: size for name, size in axes.items() if size > 1}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            name = last_or(list(sizes))
            raise UserError(
                f"--parallel.{name}: {pluralize(world_size, 'rank')} cannot be divided by {product}; "
                f"use {_suggest_sizes(world_size, inner * replicas // sizes[name], sizes[name], name)}"
            )
        if copies == "ranks" and replicas * inner != world_size:
            raise UserError(
                f"--parallel.dp_replicate: ddp has a copy of the model on each of "
                f"{pluralize(world_size // inner, 'rank')}, not {replicas}; "
                "leave it out, or use hsdp"
            )
        return cls(world_size // (inner * replicas), parallel.pp, replicas, parallel.cp, parallel.tp)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in AXIS_NAMES}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "dp_shard 1"

    def describe_rank(self, rank: int) -> str:
        """Return a rank's coordinates along the axes larger than 1, like ``pp 1, dp 2, tp 5``."""
        places = {"pp": self.coordinate(rank, ("pp",)), "dp": self.coordinate(rank, DP_AXES)}
        places |= {name: self.coordinate(rank, (name,)) for name in ("cp", "tp")}
        return ", ".join(f"{name} {place.rank}" for name, place in places.items() if place.size > 1)

    @property
    def label(self) -> str:
        """Short mesh label; '' for plain FSDP."""
        return str(self) if self.dp_shard != self.world_size else ""

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.size(AXIS_NAMES)

    def size(self, names: Sequence[str]) -> int:
        """Return the number of ranks along these axes together."""
        return math.prod(getattr(self, name) for name in names)

    def coordinate(self, rank: int, names: Sequence[str]) -> Coordinate:
        """Return a rank's coordinate along these axes taken together; the first is the outermost."""
        index, remainder = 0, rank
        indices = {}
        for name in reversed(AXIS_NAMES):
            remainder, indices[name] = divmod(remainder, getattr(self, name))
        for name in names:
            index = index * getattr(self, name) + indices[name]
        return Coordinate(index, self.size(names))


def _suggest_sizes(world_size: int, other_size: int, size: int, name: str) -> str:
    """Return a size of the axis that works with the sizes of the other axes, as a clause."""
    if world_size % other_size:
        return "sizes whose product divides the number of ranks"
    return f"{name} {nearest_divisor(world_size // other_size, size)}"


def nearest_divisor(size: int, target: int) -> int:
    """Return the divisor of ``size`` that is nearest to the target."""
    return min(
        (divisor for divisor in range(1, size + 1) if size % divisor == 0), key=lambda divisor: abs(divisor - target)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class MicrobatchSplit:
    """How the micro-batches of a step are split over ranks."""

    n_microbatches: int
    n_ranks: int

    @classmethod
    def from_training(cls, training: "Training", n_ranks: int) -> "MicrobatchSplit":
        """Split the configured batch; a batch of 0 is one micro-batch per rank.

        Raises:
            UserError: The batch is not a multiple of the micro-batch; the message names the nearest multiples.
        """
        micro, batch = training.micro_batch_size, training.global_batch_size
        if batch % micro:
            nearest = " or ".join(str(size) for size in (batch // micro * micro, -(-batch // micro) * micro) if size)
            raise UserError(
                f"--training.global_batch_size: {pluralize(batch, 'sequence')} cannot be divided into micro-batches of {micro}; "
                f"use --training.global_batch_size {nearest}, or --training.micro_batch_size 1"
            )
        return cls(batch // micro if batch else n_ranks, n_ranks)

    @property
    def grad_accum_steps(self) -> int:
        """Forward passes of each rank in a step."""
        return -(-self.n_microbatches // self.n_ranks)

    @property
    def n_idle_ranks(self) -> int:
        """Number of ranks without a micro-batch in the last accumulation step."""
        return self.grad_accum_steps * self.n_ranks - self.n_microbatches

    @property
    def idle_fraction(self) -> float:
        """Fraction of a step's forwards and backwards that run without a micro-batch."""
        return self.n_idle_ranks / (self.grad_accum_steps * self.n_ranks)

    @property
    def even_n_microbatches(self) -> list[int]:
        """The nearest numbers of micro-batches that leave no rank idle."""
        return [n for n in ((self.grad_accum_steps - 1) * self.n_ranks, self.grad_accum_steps * self.n_ranks) if n]

    def first_and_count(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's first micro-batch in the step, and its number of micro-batches."""
        base, extra = divmod(self.n_microbatches, self.n_ranks)
        return rank * base + min(rank, extra), base + (rank < extra)


def idle_rank_note(training: "Training", n_ranks: int) -> str:
    """Return a sentence on idle ranks, with batch sizes that leave none idle; '' if no rank is idle."""
    microbatches = MicrobatchSplit.from_training(training, n_ranks)
    if not microbatches.n_idle_ranks:
        return ""
    where_idle = (
        f"the last of {microbatches.grad_accum_steps} accumulation steps"
        if microbatches.grad_accum_steps > 1
        else "each step"
    )
    batches = " or ".join(str(n * training.micro_batch_size) for n in microbatches.even_n_microbatches)
    return (
        f"in {where_idle} {microbatches.n_idle_ranks} of {pluralize(n_ranks, 'rank')} "
        f"{'is' if microbatches.n_idle_ranks == 1 else 'are'} idle ("
        f"{100 * microbatches.idle_fraction:.0f}% of a step); --training.global_batch_size {batches} leaves none idle"
    )


RecomputeKind = Literal["full", "operators", "none"]
LEGACY_VALUES = {"true": "full", "false": "none"}  # values from before other kinds existed
RECOMPUTE_HINT = (
    "write full, operators, operators:K (in the last K layers), every:N (in every Nth layer), none, or auto"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """What the backward pass recomputes of each decoder layer (activation checkpointing).

    full: everything, from the layer's input. operators: everything but matrix products and attention, whose outputs are kept.
    none: nothing.
    """

    kind: RecomputeKind = "full"
    last: int | None = None  # operators: only in the last layers of each pipeline stage, this many; None: in all
    every: int = 1  # full: only in the first of every N layers; the others recompute nothing

    @classmethod
    def parse(cls, text: str) -> "Recompute":
        """Parse ``full``, ``operators``, ``operators:24``, ``every:2`` or ``none``.

        ``auto`` counts as ``full`` until it is resolved.

        Raises:
            UserError: It is none of them.
        """
        name, colon, number = LEGACY_VALUES.get(text, text).partition(":")
        count = int(number) if number.isdecimal() and len(number) < 6 else 0
        match name, bool(colon):
            case "full" | "operators" | "none" as kind, False:
                return cls(kind)
            case "auto", False:
                return FULL_RECOMPUTE
            case "operators", True if count:
                return cls("operators", last=count)
            case "every", True if count:
                return cls(every=count)
        raise UserError(f"model.activation_checkpointing is {text!r}; {RECOMPUTE_HINT}")

    def layer_kinds(self, layers: int) -> tuple[RecomputeKind, ...]:
        """Return the kind of recomputation for each layer of a pipeline stage."""
        return _layer_kinds(self, layers)

    def count_kinds(self, stages: tuple[int, ...]) -> Mapping[RecomputeKind, int]:
        """Return the number of layers of each kind; ``stages``: number of layers per pipeline stage."""
        return _count_kinds(self, stages)

    def __str__(self) -> str:
        """Return the setting's text."""
        if self.last is not None:
            return f"{self.kind}:{self.last}"
        return f"every:{self.every}" if self.every > 1 else self.kind


@functools.lru_cache(1024)
def _layer_kinds(recompute: Recompute, layers: int) -> tuple[RecomputeKind, ...]:
    if recompute.last is not None:
        return tuple("full" if layer < layers - recompute.last else recompute.kind for layer in range(layers))
    return tuple("none" if layer % recompute.every else recompute.kind for layer in range(layers))


@functools.lru_cache(1024)
def _count_kinds(recompute: Recompute, stages: tuple[int, ...]) -> Mapping[RecomputeKind, int]:
    kinds = [kind for layers in stages for kind in recompute.layer_kinds(layers)]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


FULL_RECOMPUTE = Recompute()
