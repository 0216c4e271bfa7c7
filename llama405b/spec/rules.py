"""Rules on meshes, pipeline schedules, BF16 rounding, and changes at a resume. Pure.

A refused mesh names a size that would work. Schedules: gpipe, arXiv 1811.06965; 1f1b, arXiv 2006.09503; interleaved, arXiv 2104.04473,
with two stages on each rank, and with a last group of micro-batches that may be smaller than the others.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama405b.contract.checkpoints import OPTIMIZER, RunIdentity
from llama405b.contract.errors import UserError, pluralize
from llama405b.settings.axes import DP_AXES, SHARD_AXES, Axes
from llama405b.settings.choices import ALL_SETTINGS, STRATEGIES
from llama405b.settings.rules import ALL_CHANGES, STEPS
from llama405b.settings.schema import Config, Optimizer, Parallel
from llama405b.spec.adapters import adapter_label
from llama405b.spec.models import FUSED, Llama


def check_mesh(axes: Axes, parallel: Parallel, llama: Llama | None, seq_len: int, ranks_per_host: int) -> None:
    """Refuse a mesh that does not suit the model or the hosts. ``llama``: None if it is not known yet; then only the hosts are checked.

    Raises:
        UserError: Names the setting, why, and what to use.
    """
    for key, fault in find_mesh_faults(axes, parallel, llama, seq_len, ranks_per_host):
        raise UserError(f"--{key}: {fault}")


def find_mesh_faults(
    axes: Axes, parallel: Parallel, llama: Llama | None, seq_len: int, ranks_per_host: int
) -> Iterator[tuple[str, str]]:
    """Yield the faults of a mesh: the setting, and a message to follow its name."""

    def within_host(tp: int) -> bool:
        return parallel.tp_across_hosts or ranks_per_host % tp == 0

    if llama:
        yield from _find_tp_faults(axes, parallel, llama, seq_len, within_host)
        yield from _find_cp_faults(axes, parallel, llama, seq_len)
        yield from _find_pp_faults(axes, parallel, llama)
    yield from _find_reshard_faults(axes.size(SHARD_AXES), parallel.reshard_after_forward)
    if not within_host(axes.tp):
        fits = _largest_fit(axes, parallel, "tp", within_host)
        yield (
            "parallel.tp",
            f"tp {axes.tp} would span hosts of {pluralize(ranks_per_host, 'rank')}, so every layer would wait for the network; "
            f"use {fits}, or --parallel.tp_across_hosts true",
        )


def _find_tp_faults(
    axes: Axes, parallel: Parallel, llama: Llama, seq_len: int, within_host: Callable[[int], bool]
) -> Iterator[tuple[str, str]]:
    divided = {
        "attention heads": llama.heads,
        "key-value heads": llama.kv_heads,
        "rows of the MLP": llama.intermediate,
        "tokens of the vocabulary": llama.vocab,
        "tokens of a sequence": seq_len,
    }
    if axes.tp > 1 and (fused := [name for name in (*llama.family.attention, *llama.family.mlp) if name in FUSED]):
        yield "parallel.tp", f"tp cannot split the {' and '.join(fused)} of a {llama.family.architecture}; use tp 1"
    for label, size in divided.items():
        if size % axes.tp:
            fits = _largest_fit(
                axes, parallel, "tp", lambda n: within_host(n) and not any(count % n for count in divided.values())
            )
            yield "parallel.tp", f"{size} {label} cannot be divided by {axes.tp}; use {fits}"


def _find_cp_faults(axes: Axes, parallel: Parallel, llama: Llama, seq_len: int) -> Iterator[tuple[str, str]]:
    divided = {"attention heads": llama.heads // axes.tp, "tokens of a sequence": seq_len // axes.tp}
    if llama.heads % axes.tp or seq_len % axes.tp:
        return  # told of tp
    for label, size in divided.items():
        if size % axes.cp:
            fits = _largest_fit(axes, parallel, "cp", lambda n: not any(count % n for count in divided.values()))
            per_rank = f" on each of {axes.tp} ranks" if axes.tp > 1 else ""
            yield "parallel.cp", f"{size} {label}{per_rank} cannot be divided by {axes.cp}; use {fits}"


def _find_pp_faults(axes: Axes, parallel: Parallel, llama: Llama) -> Iterator[tuple[str, str]]:
    stages = axes.pp * parallel.virtual_stages
    if axes.pp == 1:
        return
    if llama.tied:
        yield (
            "parallel.pp",
            "the embedding is also the head, so the first and the last stage would both need it; use pp 1",
        )
    if stages > llama.layers:
        fits = _largest_fit(axes, parallel, "pp", lambda n: n * parallel.virtual_stages <= llama.layers)
        yield "parallel.pp", f"{pluralize(llama.layers, 'layer')} cannot be divided into {stages} stages; use {fits}"


def _find_reshard_faults(shards: int, group_size: int) -> Iterator[tuple[str, str]]:
    if not group_size or (shards % group_size == 0 and group_size < shards):
        return
    divisors = [n for n in range(2, min(group_size, shards)) if shards % n == 0]
    remedy = f"use {divisors[-1]}" if divisors else "leave it out"
    yield (
        "parallel.reshard_after_forward",
        f"{pluralize(shards, 'shard')} cannot be divided into groups of {group_size} ranks; {remedy}",
    )


def _largest_fit(axes: Axes, parallel: Parallel, name: str, fits: Callable[[int], bool]) -> str:
    """Return the largest smaller size of an axis that fits and divides the ranks."""
    other_axes = DP_AXES if STRATEGIES[parallel.strategy].copies == "ranks" else ("dp_shard",)
    ranks = axes.size((name, *other_axes))
    smaller = (n for n in range(1, getattr(axes, name)) if ranks % n == 0 and fits(n))
    return f"{name} {max(smaller, default=1)}"


WEIGHT_STD = 0.02  # of a weight: Llama's initializer_range
BF16_EXPONENTS = range(-60, 2)  # of weights in BF16 that count
MOST_WEIGHTS = 0.5  # of the weights


def rounding_note(parallel: Parallel, optimizer: Optimizer) -> str:
    """Return a note on how few BF16 weights a step changes; '' if it changes most."""
    share = changed_share(optimizer.lr * optimizer.spec.update_rms(optimizer.betas[0]))
    if parallel.numerics != "pure-bf16" or share > MOST_WEIGHTS:
        return ""
    norms_note = " and none of the norms'" * parallel.is_fsdp1  # which have no FP32 masters there
    return (
        f"with numerics pure-bf16 a step at learning rate {optimizer.lr:g} changes about {100 * share:.2g}% of the weights{norms_note}; "
        "BF16 rounds the other updates away: use fp32-master, or a higher --optimizer.lr"
    )


def changed_share(update: float) -> float:
    """Return the share of BF16 weights that one step changes, roughly: weights and updates are normal, and independent.

    A weight changes if its update is above half a unit in its last place, 2^-8 of its power of two. ``update``: root mean square.
    """
    return sum(
        (_normal_share_within(2.0 ** (e + 1) / WEIGHT_STD) - _normal_share_within(2.0**e / WEIGHT_STD))
        * (1 - _normal_share_within(2.0 ** (e - 8) / update))
        for e in BF16_EXPONENTS
    )


def _normal_share_within(deviations: float) -> float:
    """Return the share of a normal distribution within so many standard deviations."""
    return math.erf(deviations / math.sqrt(2))


def update_settings(optimizer: Optimizer, steps: int) -> Mapping[str, Any]:
    """Return the settings that determine updates, with the number of steps if the schedule needs it.

    ``steps``: 0 if unknown.
    """
    unread = ALL_SETTINGS - {*optimizer.spec.settings}
    settings = {
        f"optimizer.{name}": list(value) if isinstance(value, tuple) else value  # as JSON has it
        for name, value in dataclasses.asdict(optimizer).items()
        if name not in unread
    }
    is_decaying = optimizer.decay != "constant" and optimizer.min_lr != optimizer.lr
    if steps > optimizer.warmup_steps(steps) and (is_decaying or 0 < optimizer.warmup < 1):
        settings[STEPS] = steps
    return settings


def with_config(previous: RunIdentity, config: Config) -> RunIdentity:
    """Return a checkpoint's identity with these settings; only ranks can compare model, data and packing.

    A global batch of 0 follows the number of ranks, which is unknown here: it is taken to be unchanged.
    """
    return dataclasses.replace(
        previous,
        sequence_length=config.data.seq_len,
        global_batch_size=config.training.global_batch_size or previous.global_batch_size,
        numerics=config.parallel.numerics,
        data_seed=config.data.seed,
        training_seed=config.training.seed,
        adapter=adapter_label(config.adapter),
        settings=update_settings(config.optimizer, config.training.max_steps),
    )


def reads_same_data(previous: RunIdentity, current: RunIdentity) -> bool:
    """Check whether both read the same sequences in the same order; packing does not matter."""
    first, second = ((identity.data, identity.sequence_length, identity.data_seed) for identity in (previous, current))
    return first == second


def check_resume_changes(path: str, previous: RunIdentity, current: RunIdentity, allowed: Sequence[str]) -> str:
    """Say what changes with a resume from ``path``, for the log; '' if nothing does.

    Raises:
        UserError: Something changes that is not in ``allowed``.
    """
    changes = previous.changes(current)
    if not changes:
        return ""
    restart_note = "" if reads_same_data(previous, current) else ", so the data is read from its beginning"
    if previous.adapter != current.adapter:  # then it holds other tensors
        raise UserError(
            f"--resume: {path} was saved with adapter {changes['adapter']}; set --adapter.kind, .rank, .alpha and .targets back, or "
            "begin another run with another --checkpoint.dir"
        )
    if change := changes.get(OPTIMIZER):
        raise UserError(
            f"--resume: {path} was saved with another optimizer, whose states differ ({OPTIMIZER} {change}); set it back, or begin "
            "another run from an export"
        )
    # Steps that follow from other data are accepted with that.
    to_accept = {
        name: change for name, change in changes.items() if name != STEPS or reads_same_data(previous, current)
    }
    is_refused = ALL_CHANGES not in allowed and not to_accept.keys() <= {*allowed}
    shown = to_accept if is_refused else changes
    message = f"{path} was saved with other settings ({', '.join(map(' '.join, shown.items()))}){restart_note}"
    if is_refused:
        names = ",".join([*allowed, *(name for name in to_accept if name not in allowed)])
        raise UserError(f"--resume: {message}; set them back, or accept this with --checkpoint.allow_changes {names}")
    return message


@dataclasses.dataclass(frozen=True, slots=True)
class MicrobatchPass:
    """One forward or backward of a micro-batch through one of a rank's stages."""

    is_backward: bool
    virtual_stage: int
    microbatch: int


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """The micro-batches that wait for their backward while a rank computes another backward."""

    virtual_stage: int  # of the backward
    waiting: tuple[int, ...]  # micro-batches that wait, by chunk
    had_backward: tuple[bool, ...]  # whether a chunk had a backward before, by chunk
    after_forward: bool = True  # whether a forward comes between it and the backward before

    def is_dominated_by(self, other: "InFlight") -> bool:
        """Check whether another state needs at least as much memory in every respect."""
        values, other_values = (
            (*self.waiting, *self.had_backward, self.after_forward),
            (*other.waiting, *other.had_backward, other.after_forward),
        )
        return (
            self.virtual_stage == other.virtual_stage
            and values != other_values
            and all(a <= b for a, b in zip(values, other_values, strict=True))
        )


@functools.lru_cache(1024)
def find_in_flight(schedule: str, n_ranks: int, n_virtual_stages: int, rank: int, n_micro: int) -> frozenset[InFlight]:
    """Return what occurs in a step, but for what is less than something else that does; see ``pipeline_order``."""
    waiting, had_backward = [0] * n_virtual_stages, [False] * n_virtual_stages
    states = set()
    forward = False
    for step in pipeline_order(schedule, n_ranks, n_virtual_stages, rank, n_micro):
        if step.is_backward:
            waiting[step.virtual_stage] -= 1
            states.add(InFlight(step.virtual_stage, tuple(waiting), tuple(had_backward), forward))
            had_backward[step.virtual_stage] = True
        else:
            waiting[step.virtual_stage] += 1
        forward = not step.is_backward
    return frozenset(state for state in states if not any(state.is_dominated_by(other) for other in states))


def pipeline_order(schedule: str, n_ranks: int, n_virtual_stages: int, rank: int, n_micro: int) -> list[MicrobatchPass]:
    """Return what a rank does, one after the other.

    ``n_ranks``: of the pipeline; ``n_virtual_stages``: stages on each; stage k is chunk k // n_ranks of rank k % n_ranks.
    """
    groups = [range(begin, min(begin + n_ranks, n_micro)) for begin in range(0, n_micro, n_ranks)]
    if n_virtual_stages == 1:
        groups = [range(n_micro)]
    forwards = [
        MicrobatchPass(False, virtual_stage, microbatch)
        for group in groups
        for virtual_stage in range(n_virtual_stages)
        for microbatch in group
    ]
    backwards = [
        MicrobatchPass(True, virtual_stage, microbatch)
        for group in groups
        for virtual_stage in reversed(range(n_virtual_stages))
        for microbatch in group
    ]
    n_warmup = _n_warmup_forwards(schedule, n_ranks, n_virtual_stages, rank, len(forwards))
    pairs = zip(forwards[n_warmup:], backwards, strict=False)
    return [*forwards[:n_warmup], *itertools.chain(*pairs), *backwards[len(forwards) - n_warmup :]]


def _n_warmup_forwards(schedule: str, n_ranks: int, n_virtual_stages: int, rank: int, n_forwards: int) -> int:
    """Return how many forwards a rank of a pipeline takes before its first forward-backward pair."""
    if schedule == "gpipe":
        return n_forwards
    if n_virtual_stages == 1:
        return min(n_forwards, n_ranks - rank - 1)
    return min(n_forwards, 2 * (n_ranks - rank - 1) + (n_virtual_stages - 1) * n_ranks)
