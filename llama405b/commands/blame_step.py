"""Which document a step went wrong with: the step again, in halves.

Which document of a step is to blame: each by itself, its loss and its gradient, by the weights before the step.

Knows the data's order and passes of the model; not how weights came there. Shape suffixes: B sequences, S positions.

Which document of a run's step is to blame: each by itself, by the weights of the checkpoint before, without training.
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

BLAMED = 5.0  # a score from which on a document is named
OF_A_TARGET = 2.5  # nats: the standard deviation of a single target's loss, about
OF_A_PULL = 1.5  # the same of the logarithm of a single target's gradient
LEAST_SPREAD = 0.05  # of any measure: where all are alike, a little is not much
NORMAL = 1.4826  # times the median deviation: the standard deviation, if that were normal


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A document, or the part of it that a sequence has."""

    index: int  # of the sequence, in the order of the run
    source: int
    place: int  # in its token file
    end: int
    offset: int  # in the sequence
    name: str

    @property
    def n_tokens(self) -> int:
        """Number of its tokens."""
        return self.end - self.place


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a piece does to the weights."""

    piece: Piece
    n_targets: int
    loss: float  # nats per target
    grad_norm: float  # of that
    read_loss: float | None = None  # nats per token that is read, but not learnt; None: there is none


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """How far it is from the others."""

    measured: Measured
    score: float


def pieces_of(batches: Batches, indices: Iterable[int]) -> Iterator[Piece]:
    """Yield the documents of sequences, in their order."""
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
    """Return its losses and the norm of its gradient; None if nothing of it is learnt. All ranks call it; the weights stay."""
    learnt = _batch(batches, piece, me, learnt=True)
    n_targets = int(all_reduce_sum(passes.n_targets(learnt)))
    if not n_targets:
        return None
    nll = passes.train([learnt], n_targets, updater, lambda _: None)
    loss = float(all_reduce_sum(nll)) / n_targets
    norm = updater.clip(0.0)
    updater.zero_grad()
    read = _batch(batches, piece, me, learnt=False)
    n_read = int(all_reduce_sum(passes.n_targets(read)))
    read_loss = None
    if n_read:
        with torch.no_grad():
            read_loss = float(all_reduce_sum(passes.evaluate(read))) / n_read
    return Measured(piece, n_targets, loss, norm, read_loss)


def _batch(batches: Batches, piece: Piece, me: Rank, *, learnt: bool) -> Batch:
    """Return a piece's sequence, of which only its own targets count, and only on the first of the ranks that split a batch.

    ``learnt``: those that are learnt, or the others.
    """
    batch = batches.read([piece.index])
    targets_BS = batch.targets_BS
    if not learnt:
        window = batches.mixture.window(piece.index)[1:]
        tokens_S = torch.from_numpy((window & ~MARKS).astype(np.int64))
        is_read_S = torch.from_numpy(window & MARKS == NOT_LEARNT)  # which nothing foretells of a document's first
        targets_BS = torch.where(is_read_S, tokens_S, IGNORE_INDEX)[None]
    places_S = torch.arange(1, targets_BS.shape[1] + 1)  # of the targets, in the sequence
    is_own_S = (places_S >= piece.offset) & (places_S < piece.offset + piece.n_tokens)
    targets_BS = torch.where(is_own_S & (me.dp.rank == 0), targets_BS, IGNORE_INDEX)
    return dataclasses.replace(batch, targets_BS=targets_BS).to(me.device)


def scored(found: Sequence[Measured]) -> list[Scored]:
    """Return them with the most unlike the others first.

    The score is the greatest of how many standard deviations (robust ones: by the median deviation) these are above the median: the
    loss; the loss less that of what is only read, which shows a mask at the wrong place; and the logarithm of the gradient's norm times
    the square root of the targets. The gradient of n targets is their mean, so its norm falls with the square root of n, unless they
    all pull the same way.
    """
    sizes = [each.n_targets for each in found]
    losses = [each.loss for each in found]
    gaps = [None if each.read_loss is None else each.loss - each.read_loss for each in found]
    pulls = [math.log(max(each.grad_norm, 1e-30) * math.sqrt(each.n_targets)) for each in found]
    deviations = (_above(losses, sizes, OF_A_TARGET), _above(gaps, sizes, OF_A_TARGET), _above(pulls, sizes, OF_A_PULL))
    scores = [Scored(each, max(above)) for each, *above in zip(found, *deviations, strict=True)]
    return sorted(scores, key=lambda each: -each.score)


def _above(values: Sequence[float | None], sizes: Sequence[int], of_one: float) -> list[float]:
    """Return how far above the median each value is; of few targets one may be so by chance, by ``of_one`` of a single one."""
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
    """Yield what not to learn: each document as a whole, though a step has only a part of it."""
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
    """Yield the table of a step's documents, the worst first, and what is to be done."""
    yield f"step {step}: {counted(len(scores), 'document')}; score: how far from the others, in standard deviations"
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
    """Measure the documents of a step by the checkpoint at the path ``resume`` (no: the model itself), and report which stand out.

    Raises:
        UserError: The step or the data is not what the checkpoint goes on with, or something cannot be used.
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
        raise UserError(
            f"--data.paths: the data is not what {resume} was trained with, so its step {step} had other documents"
        )
    done = manifest.step if manifest else 0
    if step <= done:
        raise UserError(f"--blame: step {step} was taken before {resume}; name an older checkpoint")
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
        raise UserError(f"--blame: step {step} has no target to learn; name another step")
    scores = scored(found)
    if context.me.is_rank0:
        path = context.run.skips
        blamed = [score for score in scores if score.score >= BLAMED]
        write_atomic(context.run.blamed, "".join(reader.dumps(score) + "\n" for score in scores))
        if blamed:
            write_atomic(path, "".join(reader.dumps(skip) + "\n" for skip in skips_of(batches, blamed)))
        context.log(f"by the weights of {weights.what}")
        for line in report(step, scores, path):
            context.log(line)
