"""What a run trains on, and what it evaluates on."""

import dataclasses
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.contract.schema import Data, Evaluation
from llama405b.data.batches import Batches, describe_held_out, open_batches
from llama405b.data.skip import Skipped, read_skips, without, words_of
from llama405b.distributed import collectives
from llama405b.model.batch import IGNORE_INDEX
from llama405b.training.context import RankContext


def open_data(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> tuple[Batches, Batches | None]:
    """Return what is trained on, and what is evaluated on, if anything; ``files``: the directory of the tokenizer.

    Raises:
        UserError: The data cannot be used.
    """
    batches = _open(data, files, context)
    if not evaluation.every:
        return batches, None
    if evaluation.paths:
        return batches, _open_apart(data, evaluation, files, context)
    return _hold_out(batches, data, evaluation, context)


def open_held_out(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> Batches:
    """Return what is evaluated on; data to train on is read only to hold out a part of it.

    Raises:
        UserError: The data cannot be used.
    """
    if evaluation.paths:
        return _open_apart(data, evaluation, files, context)
    return _hold_out(_open(data, files, context), data, evaluation, context)[1]


def _open(data: Data, files: Path, context: RankContext, option: str = "--data.paths") -> Batches:
    cache = context.run.path.parent / ".cache"
    batches = open_batches(data, files, cache, context.me, context.heartbeat.progress, context.log, option)
    if not data.skip:
        return batches
    skips: tuple[Skipped, ...] = ()
    with collectives.raise_on_all_ranks():
        if context.me.is_rank0:
            skips = read_skips(Path(data.skip))
    skips = collectives.broadcast_object(skips, tuple[Skipped, ...])
    context.log(words_of(skips))
    return dataclasses.replace(batches, mixture=without(batches.mixture, skips))


def _open_apart(data: Data, evaluation: Evaluation, files: Path, context: RankContext) -> Batches:
    """The data of ``evaluation.paths``."""
    apart = dataclasses.replace(data, paths=evaluation.paths, weights=(), max_bytes=0, skip="")
    return _with_targets(_open(apart, files, context, "--evaluation.paths"))


def _hold_out(batches: Batches, data: Data, evaluation: Evaluation, context: RankContext) -> tuple[Batches, Batches]:
    """Documents of the data itself."""
    batches, held_out = batches.hold_out(evaluation.fraction)
    for line in describe_held_out(data, held_out):
        context.log(line)
    return batches, _with_targets(held_out)


def _with_targets(held_out: Batches) -> Batches:
    """Refuse data of which nothing would be evaluated."""
    if not any((held_out.in_order([i]).targets_BS != IGNORE_INDEX).any() for i in range(held_out.n_sequences)):
        raise UserError("[evaluation]: the held-out data has no target to learn; name other data, or a larger fraction")
    return held_out
