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

from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.errors import UserError, counted
from llama405b.settings.axes import DP, SHARD, Axes
from llama405b.settings.rules import ALL, STEPS
from llama405b.settings.schema import Config, Optimizer, Parallel
from llama405b.settings.strategies import STRATEGIES
from llama405b.spec.models import Llama, describe


def check_mesh(axes: Axes, parallel: Parallel, llama: Llama | None, seq_len: int, ranks_per_host: int) -> None:
    """Refuse a mesh that does not suit the model or the hosts. ``llama``: None if it is not known yet; then only the hosts are checked.

    Raises:
        UserError: Names the setting, why, and what to use.
    """
    for key, fault in faults_of_mesh(axes, parallel, llama, seq_len, ranks_per_host):
        raise UserError(f"--{key}: {fault}")


def faults_of_mesh(
    axes: Axes, parallel: Parallel, llama: Llama | None, seq_len: int, ranks_per_host: int
) -> Iterator[tuple[str, str]]:
    """Yield the faults of a mesh: the setting, and a message to follow its name."""

    def within_host(tp: int) -> bool:
        return parallel.tp_across_hosts or ranks_per_host % tp == 0

    if llama:
        yield from _of_matrices(axes, parallel, llama, seq_len, within_host)
        yield from _of_sequences(axes, parallel, llama, seq_len)
        yield from _of_layers(axes, parallel, llama)
    yield from _of_shards(axes.size(SHARD), parallel.reshard_after_forward)
    if not within_host(axes.tp):
        fits = _smaller(axes, parallel, "tp", within_host)
        yield (
            "parallel.tp",
            f"tp {axes.tp} would span hosts of {counted(ranks_per_host, 'rank')}, so every layer would wait for the network; "
            f"use {fits}, or --parallel.tp_across_hosts true",
        )


def _of_matrices(
    axes: Axes, parallel: Parallel, llama: Llama, seq_len: int, within_host: Callable[[int], bool]
) -> Iterator[tuple[str, str]]:
    divided = {
        "attention heads": llama.heads,
        "key-value heads": llama.kv_heads,
        "rows of the MLP": llama.intermediate,
        "tokens of the vocabulary": llama.vocab,
        "tokens of a sequence": seq_len,
    }
    if axes.tp > 1 and llama.family.query_norms:
        yield (
            "parallel.tp",
            f"tp cannot split the query and key norms of a {llama.family.architecture}; use tp 1",
        )
    for what, size in divided.items():
        if size % axes.tp:
            fits = _smaller(
                axes, parallel, "tp", lambda n: within_host(n) and not any(each % n for each in divided.values())
            )
            yield "parallel.tp", f"{size} {what} cannot be divided by {axes.tp}; use {fits}"


def _of_sequences(axes: Axes, parallel: Parallel, llama: Llama, seq_len: int) -> Iterator[tuple[str, str]]:
    divided = {"attention heads": llama.heads // axes.tp, "tokens of a sequence": seq_len // axes.tp}
    if llama.heads % axes.tp or seq_len % axes.tp:
        return  # told of tp
    for what, size in divided.items():
        if size % axes.cp:
            fits = _smaller(axes, parallel, "cp", lambda n: not any(each % n for each in divided.values()))
            each = f" on each of {axes.tp} ranks" if axes.tp > 1 else ""
            yield "parallel.cp", f"{size} {what}{each} cannot be divided by {axes.cp}; use {fits}"


def _of_layers(axes: Axes, parallel: Parallel, llama: Llama) -> Iterator[tuple[str, str]]:
    stages = axes.pp * parallel.chunks
    if axes.pp == 1:
        return
    if llama.tied:
        yield (
            "parallel.pp",
            "the embedding is also the head, so the first and the last stage would both need it; use pp 1",
        )
    if stages > llama.layers:
        fits = _smaller(axes, parallel, "pp", lambda n: n * parallel.chunks <= llama.layers)
        yield "parallel.pp", f"{counted(llama.layers, 'layer')} cannot be divided into {stages} stages; use {fits}"


def _of_shards(shards: int, kept_by: int) -> Iterator[tuple[str, str]]:
    if not kept_by or (shards % kept_by == 0 and kept_by < shards):
        return
    divisors = [n for n in range(2, min(kept_by, shards)) if shards % n == 0]
    instead = f"use {divisors[-1]}" if divisors else "leave it out"
    yield (
        "parallel.reshard_after_forward",
        f"{counted(shards, 'shard')} cannot be divided into groups of {kept_by} ranks; {instead}",
    )


def _smaller(axes: Axes, parallel: Parallel, name: str, fits: Callable[[int], bool]) -> str:
    """Return the largest smaller size of an axis that fits and divides the ranks."""
    rest = DP if STRATEGIES[parallel.strategy].copies == "ranks" else ("dp_shard",)
    ranks = axes.size((name, *rest))
    smaller = (n for n in range(1, getattr(axes, name)) if ranks % n == 0 and fits(n))
    return f"{name} {max(smaller, default=1)}"


STD = 0.02  # of a weight: Llama's initializer_range
EXPONENTS = range(-60, 2)  # of weights in BF16 that count
ENOUGH = 0.5  # of the weights


def rounding_note(parallel: Parallel, optimizer: Optimizer) -> str:
    """Return a note on how few BF16 weights a step changes; '' if it changes most."""
    share = changed_share(optimizer.lr, optimizer.betas[0])
    if parallel.numerics != "pure-bf16" or share > ENOUGH:
        return ""
    norms = " and none of the norms'" * parallel.by_fsdp1  # which have no FP32 masters there
    return (
        f"with numerics pure-bf16 a step at learning rate {optimizer.lr:g} changes about {100 * share:.2g}% of the weights{norms}; "
        "BF16 rounds the other updates away: use fp32-master, or a higher --optimizer.lr"
    )


def changed_share(lr: float, beta1: float) -> float:
    """Return the share of BF16 weights that one step changes, roughly: weights and updates are normal, and independent.

    A weight changes if its update is above half a unit in its last place, 2^-8 of its power of two. An update is lr m / sqrt(v), where
    m is a running average of gradients, whose variance is (1 - beta1) / (1 + beta1) of theirs if they are noise (AdamW: arXiv 1711.05101).
    """
    update = lr * math.sqrt((1 - beta1) / (1 + beta1))
    return sum(
        (_within(2.0 ** (e + 1) / STD) - _within(2.0**e / STD)) * (1 - _within(2.0 ** (e - 8) / update))
        for e in EXPONENTS
    )


def _within(deviations: float) -> float:
    """Return the share of a normal distribution within so many standard deviations."""
    return math.erf(deviations / math.sqrt(2))


def settings_of(optimizer: Optimizer, steps: int) -> Mapping[str, Any]:
    """Return the settings that determine updates, with the number of steps if the schedule needs it.

    ``steps``: 0 if unknown.
    """
    found = {f"optimizer.{name}": value for name, value in dataclasses.asdict(optimizer).items()}
    found |= {f"optimizer.{name}": list(getattr(optimizer, name)) for name in ("betas", "groups")}  # as JSON has them
    falls = optimizer.decay != "constant" and optimizer.min_lr != optimizer.lr
    if steps > optimizer.warmup_steps(steps) and (falls or 0 < optimizer.warmup < 1):
        found[STEPS] = steps
    return found


def as_configured(before: RunIdentity, config: Config) -> RunIdentity:
    """Return a checkpoint's identity with these settings; only ranks can compare model, data and packing.

    A global batch of 0 follows the number of ranks, which is unknown here: it is taken to be unchanged.
    """
    return dataclasses.replace(
        before,
        sequence_length=config.data.seq_len,
        global_batch_size=config.training.global_batch_size or before.global_batch_size,
        numerics=config.parallel.numerics,
        data_seed=config.data.seed,
        training_seed=config.training.seed,
        adapter=describe(config.adapter),
        settings=settings_of(config.optimizer, config.training.max_steps),
    )


def same_data(before: RunIdentity, now: RunIdentity) -> bool:
    """Check whether both read the same sequences in the same order; packing does not matter."""
    one, other = ((each.data, each.sequence_length, each.data_seed) for each in (before, now))
    return one == other


def accept_changes(path: str, before: RunIdentity, now: RunIdentity, allowed: Sequence[str]) -> str:
    """Say what changes with a resume from ``path``, for the log; '' if nothing does.

    Raises:
        UserError: Something changes that is not in ``allowed``.
    """
    changes = before.changes(now)
    if not changes:
        return ""
    anew = "" if same_data(before, now) else ", so the data is read from its beginning"
    if before.adapter != now.adapter:  # then it holds other tensors
        raise UserError(
            f"--resume: {path} was saved with adapter {changes['adapter']}; set --adapter.kind, .rank, .alpha and .targets back, or "
            "begin another run with another --checkpoint.dir"
        )
    # Steps that follow from other data are accepted with that.
    to_accept = {name: words for name, words in changes.items() if name != STEPS or same_data(before, now)}
    refuses = ALL not in allowed and not to_accept.keys() <= {*allowed}
    told = to_accept if refuses else changes
    said = f"{path} was saved with other settings ({', '.join(map(' '.join, told.items()))}){anew}"
    if refuses:
        names = ",".join([*allowed, *(name for name in to_accept if name not in allowed)])
        raise UserError(f"--resume: {said}; set them back, or accept this with --checkpoint.allow_changes {names}")
    return said


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward of a micro-batch through one of a rank's stages."""

    backward: bool
    chunk: int
    micro: int


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """The micro-batches that wait for their backward while a rank computes another backward."""

    chunk: int  # of the backward
    others: tuple[int, ...]  # micro-batches that wait, by chunk
    done: tuple[bool, ...]  # whether a chunk had a backward before, by chunk
    forward: bool = True  # whether a forward comes between it and the backward before

    def is_less(self, other: "InFlight") -> bool:
        """Check whether another state needs at least as much memory in every respect."""
        mine, others = (*self.others, *self.done, self.forward), (*other.others, *other.done, other.forward)
        return self.chunk == other.chunk and mine != others and all(a <= b for a, b in zip(mine, others, strict=True))


@functools.lru_cache(1024)
def in_flight(schedule: str, n_ranks: int, n_chunks: int, rank: int, n_micro: int) -> frozenset[InFlight]:
    """Return what occurs in a step, but for what is less than something else that does; see ``order_of``."""
    waiting, done = [0] * n_chunks, [False] * n_chunks
    found = set()
    forward = False
    for each in order_of(schedule, n_ranks, n_chunks, rank, n_micro):
        if each.backward:
            waiting[each.chunk] -= 1
            found.add(InFlight(each.chunk, tuple(waiting), tuple(done), forward))
            done[each.chunk] = True
        else:
            waiting[each.chunk] += 1
        forward = not each.backward
    return frozenset(each for each in found if not any(each.is_less(other) for other in found))


def order_of(schedule: str, n_ranks: int, n_chunks: int, rank: int, n_micro: int) -> list[Pass]:
    """Return what a rank does, one after the other.

    ``n_ranks``: of the pipeline; ``n_chunks``: stages on each; stage k is chunk k // n_ranks of rank k % n_ranks.
    """
    groups = [range(begin, min(begin + n_ranks, n_micro)) for begin in range(0, n_micro, n_ranks)]
    if n_chunks == 1:
        groups = [range(n_micro)]
    forwards = [Pass(False, chunk, micro) for group in groups for chunk in range(n_chunks) for micro in group]
    backwards = [Pass(True, chunk, micro) for group in groups for chunk in reversed(range(n_chunks)) for micro in group]
    ahead = _ahead(schedule, n_ranks, n_chunks, rank, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *itertools.chain(*pairs), *backwards[len(forwards) - ahead :]]


def _ahead(schedule: str, n_ranks: int, n_chunks: int, rank: int, n_forwards: int) -> int:
    """Return how many forwards a rank of a pipeline takes before its first forward-backward pair."""
    if schedule == "gpipe":
        return n_forwards
    if n_chunks == 1:
        return min(n_forwards, n_ranks - rank - 1)
    return min(n_forwards, 2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks)
