"""Find the bad document of a step, by the loss and gradient of each document by itself.

Uses the weights of the checkpoint before the step, and trains on nothing. Knows the data's order and passes of the model; not how the
weights were loaded. Shape suffixes: B sequences, S positions.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from llama405b.checkpoint.compatibility import beginning
from llama405b.commands.evaluate_only import choose_checkpoint, look_at_weights, write_settings
from llama405b.contract import reader
from llama405b.contract.errors import UserError, counted
from llama405b.contract.files import write_atomic
from llama405b.contract.records import Phase
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.data.batches import Batches, Skipped
from llama405b.data.encode import FIRST, MARKS, NOT_LEARNT
from llama405b.data.sources import Source, name_of
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater
from llama405b.parallel.passes import Passes
from llama405b.settings.config import on_ranks
from llama405b.settings.schema import Config
from llama405b.training.build import bind_to_numa_node, bring_model_files, open_data
from llama405b.training.context import RankContext

BLAMED = 5.0  # lowest score of a document that is named
OF_A_TARGET = 2.5  # nats: approximate standard deviation of a single target's loss
OF_A_PULL = 1.5  # the same for the logarithm of a single target's gradient norm
LEAST_SPREAD = 0.05  # of any measure: if all are alike, a small difference must not stand out
NORMAL = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A document, or the part of it in one sequence."""

    index: int  # of the sequence in the run's order
    source: int
    place: int  # in its token file
    end: int
    offset: int  # in the sequence
    name: str

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.place


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Loss and gradient norm of a document by itself."""

    piece: Piece
    n_targets: int
    loss: float  # nats per target
    grad_norm: float  # of that loss
    read_loss: float | None = None  # nats per token that is read but not trained on; None: there are none


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """A document with its score: how far it is from the others."""

    measured: Measured
    score: float


def pieces_of(batches: Batches, indices: Iterable[int]) -> Iterator[Piece]:
    """Yield the documents of these sequences, in order."""
    for index in indices:
        number, place = batches.mixture.at(index)
        source = batches.mixture.sources[number]
        begin, end = source.span(place)
        offset = 0
        for start, stop in source.ranges(begin, end + (end - begin == source.seq_len and end < source.n_tokens)):
            firsts = np.flatnonzero(source.tokens_N[start + 1 : stop] & FIRST) + start + 1
            for first, last in zip([start, *firsts.tolist()], [*firsts.tolist(), stop], strict=True):
                yield Piece(index, number, first, last, offset + first - start, name_of(source, first))
            offset += stop - start


def measure(passes: Passes, updater: Updater, me: Rank, batches: Batches, piece: Piece) -> Measured | None:
    """Return a document's losses and gradient norm; None if it has no target.

    All ranks must call it. It does not change the weights.
    """
    learnt = _batch(batches, piece, me, learnt=True)
    n_targets = int(all_reduce_sum(passes.n_targets(learnt)))
    if not n_targets:
        return None
    nll = passes.train([learnt], n_targets, updater, lambda _: None)
    loss = float(all_reduce_sum(nll)) / n_targets
    norm = updater.clip(0.0)  # 0: no clipping, only the norm
    updater.zero_grad()
    read = _batch(batches, piece, me, learnt=False)
    n_read = int(all_reduce_sum(passes.n_targets(read)))
    read_loss = None
    if n_read:
        with torch.no_grad():
            read_loss = float(all_reduce_sum(passes.evaluate(read))) / n_read
    return Measured(piece, n_targets, loss, norm, read_loss)


def _batch(batches: Batches, piece: Piece, me: Rank, *, learnt: bool) -> Batch:
    """Return the document's sequence with only its own targets.

    On all but the first data-parallel rank every target is masked.

    ``learnt``: keep the targets that are trained on, else the tokens that are only read.
    """
    batch = batches.read([piece.index])
    targets_BS = batch.targets_BS
    if not learnt:
        window = batches.mixture.window(piece.index)[1:]
        tokens_S = torch.from_numpy((window & ~MARKS).astype(np.int64))
        is_read_S = torch.from_numpy(
            window & MARKS == NOT_LEARNT
        )  # a document's first token has no context to predict it from
        targets_BS = torch.where(is_read_S, tokens_S, IGNORE_INDEX)[None]
    places_S = torch.arange(1, targets_BS.shape[1] + 1)  # positions of the targets in the sequence
    is_own_S = (places_S >= piece.offset) & (places_S < piece.offset + piece.n_tokens)
    targets_BS = torch.where(is_own_S & (me.dp.rank == 0), targets_BS, IGNORE_INDEX)
    return dataclasses.replace(batch, targets_BS=targets_BS).to(me.device)


def scored(found: Sequence[Measured]) -> list[Scored]:
    """Return the documents with their scores, highest first.

    The score is the largest of three robust deviations above the median, in standard deviations (from the median absolute deviation):
    of the loss; of the loss minus the loss of tokens that are only read, which shows a misplaced mask; and of the logarithm of the
    gradient norm times the square root of the number of targets. The gradient of n targets is their mean, so its norm falls with the
    square root of n unless they all point the same way.
    """
    sizes = [each.n_targets for each in found]
    losses = [each.loss for each in found]
    gaps = [None if each.read_loss is None else each.loss - each.read_loss for each in found]
    pulls = [math.log(max(each.grad_norm, 1e-30) * math.sqrt(each.n_targets)) for each in found]
    deviations = (_above(losses, sizes, OF_A_TARGET), _above(gaps, sizes, OF_A_TARGET), _above(pulls, sizes, OF_A_PULL))
    scores = [Scored(each, max(above)) for each, *above in zip(found, *deviations, strict=True)]
    return sorted(scores, key=lambda each: -each.score)


def _above(values: Sequence[float | None], sizes: Sequence[int], of_one: float) -> list[float]:
    """Return each value's deviation above the median; the spread grows for few targets, from ``of_one`` of a single target."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    median = statistics.median(known or [0.0])
    spread = max(LEAST_SPREAD, NORMAL * statistics.median([abs(value - median) for value in known] or [0.0]))
    return [
        _deviation(value, median, math.hypot(spread, of_one / math.sqrt(n)))
        for value, n in zip(values, sizes, strict=True)
    ]


def _deviation(value: float | None, median: float, spread: float) -> float:
    if value is None:
        return 0.0
    return max(0.0, value - median) / spread if math.isfinite(value) else math.inf


def skips_of(batches: Batches, blamed: Iterable[Scored]) -> Iterator[Skipped]:
    """Yield the documents to skip, each as a whole even if the step has only part of it."""
    for each in blamed:
        piece = each.measured.piece
        source = batches.mixture.sources[piece.source]
        begin, end = _whole(source, piece)
        why = f"loss {each.measured.loss:.4f}, gradient norm {each.measured.grad_norm:.3f}, score {each.score:.1f}"
        yield Skipped(piece.source, len(source.tokens_N), begin, end, piece.name, why)


def _whole(source: Source, piece: Piece) -> tuple[int, int]:
    begin, end = piece.place, piece.end
    while begin > 0 and not source.tokens_N[begin] & FIRST:
        begin -= 1
    while end < len(source.tokens_N) and not source.tokens_N[end] & FIRST:
        end += 1
    return begin, end


def report(step: int, scores: Sequence[Scored], skip_list: Path, shown: int = 10) -> Iterator[str]:
    """Yield the lines of a step's table of documents, highest score first, and what to do."""
    yield f"step {step}: {counted(len(scores), 'document')}; score: distance from the other documents, in standard deviations"
    yield f"{'score':>7}  {'loss':>8}  {'grad norm':>9}  {'targets':>7}  document"
    for each in scores[:shown]:
        of = each.measured
        yield f"{each.score:7.1f}  {of.loss:8.4f}  {of.grad_norm:9.3f}  {of.n_targets:7,}  {of.piece.name}"
    if len(scores) > shown:
        yield f"… and {len(scores) - shown} more"
    blamed = [each for each in scores if each.score >= BLAMED]
    if not blamed:
        yield f"no document stands out: none has a score of {BLAMED:g}"
        return
    names = ", ".join(each.measured.piece.name for each in blamed)
    yield f"to blame: {names}; resume with --data.skip {skip_list} to leave {'it' if len(blamed) == 1 else 'them'} out"


def blame(config: Config, resume: str, step: int, context: RankContext) -> None:
    """Measure a step's documents and log those that stand out.

    Uses the weights of the checkpoint at the path ``resume`` (no: the model itself).

    Raises:
        UserError: The step or the data does not follow the checkpoint, or a model, data or checkpoint cannot be used.
    """
    config = on_ranks(config, context.me.axes)
    bind_to_numa_node(config.parallel, context)
    files = bring_model_files(config.model, config.data, context, whole=config.parallel.by_fsdp1)
    chosen = choose_checkpoint(config, resume, files, context)
    context.phase(Phase.DATA)
    unmasked = dataclasses.replace(config.data, skip="")
    batches, _ = open_data(unmasked, config.evaluation, files, context)
    start = beginning(chosen.found if chosen else None, config, files, batches)
    manifest = chosen.found.manifest if chosen and chosen.found else None
    if manifest and manifest.identity and manifest.identity.data != start.identity.data:
        raise UserError(f"--data.paths: {resume} was trained on different data, so its step {step} had other documents")
    done = manifest.step if manifest else 0
    if step <= done:
        raise UserError(f"--blame: {resume} is from step {step} or later; name an older checkpoint")
    write_settings(config, context)
    context.phase(Phase.LOAD)
    weights = look_at_weights(config, chosen, files, context)
    context.phase(Phase.EVAL)
    each = config.training.global_batch_size
    first = start.position + (step - 1 - done) * each
    found = []
    for piece in pieces_of(batches, range(first, first + each)):
        context.heartbeat.alive()
        if one := measure(weights.passes, weights.updater, context.me, batches, piece):
            found.append(one)
    if not found:
        raise UserError(f"--blame: step {step} has no target to train on; name another step")
    scores = scored(found)
    if context.me.is_rank0:
        path = context.run.skips
        blamed = [score for score in scores if score.score >= BLAMED]
        write_atomic(context.run.blamed, "".join(reader.dumps(score) + "\n" for score in scores))
        if blamed:
            write_atomic(path, "".join(reader.dumps(skip) + "\n" for skip in skips_of(batches, blamed)))
        context.log(f"using the weights of {weights.what}")
        for line in report(step, scores, path):
            context.log(line)
