"""Which settings train the same steps fastest: places of the states, moments, units, micro-batches, activations, meshes. Pure."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from llama405b.capacity.changes import OFFLOADS, can_run, keeping_most
from llama405b.capacity.estimate import seconds_per_step
from llama405b.capacity.outlook import HALVES, WHOLE, Fit, Outlook
from llama405b.capacity.part import held_elements
from llama405b.capacity.run_shape import RunShape
from llama405b.contract.errors import UserError
from llama405b.contract.mesh import Axes
from llama405b.contract.mesh_rules import check_mesh
from llama405b.contract.recompute import FULL
from llama405b.contract.schema import Moments, Offload, Parallel, PipelineSchedule
from llama405b.contract.strategies import Name

NEAR = 0.033  # of one program, once fitted, nine of ten step times are within this of what is predicted (docs/plan-accuracy.md)
MESHES = 3  # the fastest that fit
WALKED = 40  # the fastest meshes whose memory is looked at
LONG = 8192  # tokens of a sequence from which on it may be worth while to split it
LARGEST = 16  # ranks of a pipeline
OF_MESHES: tuple[Name, ...] = ("fsdp2", "zero2", "hsdp")


def best(outlook: Outlook, moments: Sequence[Moments] = ("fp32",)) -> list[Outlook]:
    """Return the variants, and what is faster but has run on one GPU at most: those that fit first, then those that need nothing of it.

    Of those that are near the fastest, the one with most room. Moments in BF16 that were not asked for come after the others near
    the fastest, as they are rounded, and so do states in memory of hosts that is not known to be enough. Meshes come by speed.
    """

    def order(each: Outlook) -> tuple[float, ...]:
        untried = bool(untried_of(each.load))
        if untried or not is_near(each, fastest[each.fit]):
            return (-each.fit, untried, 1, -(each.tokens_per_s or 0.0), each.needs.gpu_bytes)
        unseen = each.load.offload != "none" and not each.ram_bytes
        rounds = each.load.moments != outlook.load.moments and each.load.moments == "bf16"
        return (-each.fit, untried, 0, rounds, unseen, -each.room)

    found = list(variants(outlook, moments))
    of_parts = dataclasses.replace(outlook.load, loss="parts")
    for load in (of_parts, dataclasses.replace(of_parts, activations="host")):
        if not any(each.fit is Fit.YES for each in found):
            found += [each for each in variants(outlook.of_load(load), moments) if each.fit is Fit.YES]
    fastest = {fit: max((each.tokens_per_s or 0.0 for each in found if each.fit is fit), default=0.0) for fit in Fit}
    ranked = sorted(found, key=order)
    more = [keeping_most(each) for each in ranked[:1] if each.fit is Fit.YES and not untried_of(each.load)]
    return sorted([*ranked, *meshes(outlook), *(each for each in more if untried_of(each.load))], key=order)


def variants(outlook: Outlook, moments: Sequence[Moments] = ("fp32",)) -> Iterator[Outlook]:
    """Yield the settings that the trainer takes for the same steps: places of the states, moments, units, micro-batches."""
    load = outlook.load
    dtypes = dict.fromkeys((load.moments, *moments))
    sizes = sorted({load.micro_batch, *divisors(max(1, load.global_batch // load.dp))})
    for offload, dtype, wrap, size in itertools.product(OFFLOADS, dtypes, (WHOLE, HALVES), sizes):
        other = dataclasses.replace(load, offload=offload, moments=dtype, wrap=wrap, micro_batch=size)
        if can_run(other, outlook.cluster) or other == load:
            yield outlook.of_load(other)


def meshes(outlook: Outlook) -> list[Outlook]:
    """Return the fastest other ways to split the model, sequences and batch, of those that fit, the fastest first."""
    cluster = outlook.cluster
    if outlook.calibration or cluster.gpu.is_cpu or not outlook.tokens_per_s:  # of meshes nothing is measured
        return []
    found: dict[str, Outlook] = {}  # by how the ranks are split: where the states are makes no other mesh
    for load in fastest_first(outlook, OFFLOADS)[:WALKED]:
        each = outlook.of_load(load)
        if each.fit is Fit.YES:
            found.setdefault(split_of(load), each)
        if len(found) == MESHES:
            break
    return list(found.values())


def fastest_first(outlook: Outlook, offloads: Sequence[Offload]) -> list[RunShape]:
    """Return the meshes that suit a run, with states in these places, the fastest first; whether they fit is not known yet."""
    return sorted(_loads(outlook, offloads), key=lambda each: seconds_per_step(each, outlook.cluster))


def split_of(load: RunShape) -> str:
    """Say how a run's ranks are split, in the words of settings."""
    words = [str(load.axes)]
    if load.pp > 1 and load.pp_schedule != "1f1b":
        words.append(load.pp_schedule)
    if load.keeps_weights:
        words.append("zero2" if load.reduces_each else "zero1")
    return ", ".join(words)


def untried_of(load: RunShape) -> str:
    """Say what a run needs, beside FSDP, that has run on one GPU at most, in the words of settings; '': nothing."""
    words = [split_of(load)] if load.axes.told or load.keeps_weights else []
    if load.loss == "parts":
        words.append("--parallel.loss parts")
    if load.activations == "host":
        words.append("--model.activations host")
    if load.compiled:
        words.append("--model.compile true")
    if load.numerics in ("fp8", "bf16-stochastic"):
        words.append(f"--parallel.numerics {load.numerics}")
    if load.fused:
        words.append("--model.fused true")
    if load.prefetch:
        words.append(f"--parallel.prefetch {load.prefetch}")
    if load.kept_by:
        words.append(f"--parallel.reshard_after_forward {load.kept_by}")
    if load.recompute != FULL:
        words.append(f"--model.activation_checkpointing {load.recompute}")
    return ", ".join(words)


def is_near(outlook: Outlook, fastest: float) -> bool:
    """Whether it is as fast as another, in tokens/s, as far as a prediction can tell."""
    return outlook.tokens_per_s is not None and outlook.tokens_per_s >= fastest * (1 - NEAR)


def divisors(n: int) -> list[int]:
    """Return what divides a number, in order."""
    small = [each for each in range(1, math.isqrt(n) + 1) if n % each == 0]
    return sorted({*small, *(n // each for each in small)})


def _splits(load: RunShape) -> Iterator[Parallel]:
    """Yield the ways to split a run that are tried, whether they suit it or not."""
    near = divisors(load.ranks_per_host)
    of_sequences = near if load.seq_len >= LONG else [1]
    of_layers = [size for size in divisors(load.world) if size <= LARGEST]
    schedules: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved")
    for tp, cp, pp, strategy, schedule in itertools.product(near, of_sequences, of_layers, OF_MESHES, schedules):
        if (schedule == "1f1b" or pp > 1) and (tp * cp * pp > 1 or strategy != "fsdp2"):
            yield Parallel(strategy=strategy, tp=tp, cp=cp, pp=pp, pp_schedule=schedule)


def _axes_of(parallel: Parallel, load: RunShape) -> Axes | None:
    """Return the mesh that settings make of a run's ranks; None: they cannot be divided so, or it does not suit the model."""
    try:
        axes = Axes.of(parallel, load.world, load.ranks_per_host)
        check_mesh(axes, parallel, load.llama, load.seq_len, load.ranks_per_host)
    except UserError:
        return None
    return axes


def _loads(outlook: Outlook, offloads: Sequence[Offload]) -> Iterator[RunShape]:
    """Yield what else the trainer takes, and whose states alone do not fill a GPU."""
    load, memory = outlook.load, outlook.cluster.gpu.memory_bytes
    for parallel in _splits(load):
        axes = _axes_of(parallel, load)
        if axes is None or (not axes.told and not parallel.of_strategy.keeps_weights):
            continue
        split = dataclasses.replace(
            load,
            tp=axes.tp,
            cp=axes.cp,
            pp=axes.pp,
            pp_schedule=parallel.pp_schedule,
            dp_shard=axes.dp_shard if axes.dp_replicate > 1 else 0,
            keeps_weights=parallel.of_strategy.keeps_weights,
            reduces_each=parallel.of_strategy.reduces_each,
            wrap=WHOLE,
            prefetch=0,
            kept_by=0,
        )
        if split.dp > load.global_batch:
            continue
        held = held_elements(load.llama, axes, 0, parallel.chunks)
        for offload, size in itertools.product(offloads, divisors(max(1, load.global_batch // split.dp))):
            other = dataclasses.replace(split, offload=offload, micro_batch=size)
            if can_run(other, outlook.cluster) and held * other.states_bytes < memory:
                yield other
