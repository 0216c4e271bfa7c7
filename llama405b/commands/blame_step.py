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

from llama405b import extend
from llama405b.contract import reader
from llama405b.contract.errors import UserError, pluralize
from llama405b.contract.files import write_atomic
from llama405b.contract.records import Phase
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.data.batches import Batches, SkippedRange
from llama405b.data.encode import DOCUMENT_START, MARKS, NOT_TRAINED
from llama405b.data.sources import Source, document_name
from llama405b.distributed.collectives import all_reduce_sum
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater
from llama405b.parallel.passes import ForwardBackward
from llama405b.settings.schema import Config
from llama405b.training.context import RankContext
from llama405b.training.setup import Purpose, Start, prepare

MIN_BLAMED_SCORE = 5.0  # lowest score of a document that is named
TARGET_LOSS_STD = 2.5  # nats: approximate standard deviation of a single target's loss
LOG_GRADIENT_STD = 1.5  # the same for the logarithm of a single target's gradient norm
MIN_SPREAD = 0.05  # of any measure: if all are alike, a small difference must not stand out
MAD_TO_STD = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentInStep:
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
class DocumentEffect:
    """Loss and gradient norm of a document by itself."""

    piece: DocumentInStep
    n_targets: int
    loss: float  # nats per target
    grad_norm: float  # of that loss
    read_loss: float | None = None  # nats per token that is read but not trained on; None: there are none


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document with its score: how far it is from the others."""

    measured: DocumentEffect
    score: float


def iterate_documents(batches: Batches, indices: Iterable[int]) -> Iterator[DocumentInStep]:
    """Yield the documents of these sequences, in order."""
    for index in indices:
        number, place = batches.mixture.locate(index)
        source = batches.mixture.sources[number]
        begin, end = source.span(place)
        offset = 0
        for start, stop in source.file_ranges(begin, end + (end - begin == source.seq_len and end < source.n_tokens)):
            firsts = np.flatnonzero(source.tokens_N[start + 1 : stop] & DOCUMENT_START) + start + 1
            for first, last in zip([start, *firsts.tolist()], [*firsts.tolist(), stop], strict=True):
                yield DocumentInStep(index, number, first, last, offset + first - start, document_name(source, first))
            offset += stop - start


def measure_document(
    passes: ForwardBackward, updater: Updater, rank: Rank, batches: Batches, document: DocumentInStep
) -> DocumentEffect | None:
    """Return a document's losses and gradient norm; None if it has no target.

    All ranks must call it. It does not change the weights.
    """
    trained = _build_batch(batches, document, rank, is_trained=True)
    n_terms, n_targets = all_reduce_sum(passes.count(trained)).tolist()
    if not n_terms:
        return None
    nll = passes.train([trained], n_terms, updater, lambda _: None)
    loss = float(all_reduce_sum(nll)) / n_terms
    norm = updater.clip(0.0)  # 0: no clipping, only the norm
    updater.zero_grad()
    untrained = _build_batch(batches, document, rank, is_trained=False)
    n_untrained = float(all_reduce_sum(passes.count(untrained))[0])
    untrained_loss = None
    if n_untrained:
        with torch.no_grad():
            untrained_loss = float(all_reduce_sum(passes.evaluate(untrained))) / n_untrained
    return DocumentEffect(document, int(n_targets), loss, norm, untrained_loss)


def _build_batch(batches: Batches, document: DocumentInStep, rank: Rank, *, is_trained: bool) -> Batch:
    """Return the document's sequence with only its own targets.

    On all but the first data-parallel rank every target is masked.

    ``is_trained``: keep the targets that are trained on, else the tokens that are only read.
    """
    batch = batches.read([document.index])
    targets_BS = batch.targets_BS
    if not is_trained:
        window = batches.mixture.window(document.index)[1:]
        tokens_S = torch.from_numpy((window & ~MARKS).astype(np.int64))
        is_read_S = torch.from_numpy(
            window & MARKS == NOT_TRAINED
        )  # a document's first token has no context to predict it from
        targets_BS = torch.where(is_read_S, tokens_S, IGNORE_INDEX)[None]
    places_S = torch.arange(1, targets_BS.shape[1] + 1)  # positions of the targets in the sequence
    is_own_S = (places_S >= document.offset) & (places_S < document.offset + document.n_tokens)
    targets_BS = torch.where(is_own_S & (rank.dp.rank == 0), targets_BS, IGNORE_INDEX)
    return dataclasses.replace(batch, targets_BS=targets_BS).to(rank.device)


def score_documents(effects: Sequence[DocumentEffect]) -> list[ScoredDocument]:
    """Return the documents with their scores, highest first.

    The score is the largest of three robust deviations above the median, in standard deviations (from the median absolute deviation):
    of the loss; of the loss minus the loss of tokens that are only read, which shows a misplaced mask; and of the logarithm of the
    gradient norm times the square root of the number of targets. The gradient of n targets is their mean, so its norm falls with the
    square root of n unless they all point the same way.
    """
    sizes = [item.n_targets for item in effects]
    losses = [item.loss for item in effects]
    gaps = [None if item.read_loss is None else item.loss - item.read_loss for item in effects]
    log_gradients = [math.log(max(item.grad_norm, 1e-30) * math.sqrt(item.n_targets)) for item in effects]
    deviations = (
        _deviations_above(losses, sizes, TARGET_LOSS_STD),
        _deviations_above(gaps, sizes, TARGET_LOSS_STD),
        _deviations_above(log_gradients, sizes, LOG_GRADIENT_STD),
    )
    scores = [ScoredDocument(item, max(above)) for item, *above in zip(effects, *deviations, strict=True)]
    return sorted(scores, key=lambda item: -item.score)


def _deviations_above(values: Sequence[float | None], sizes: Sequence[int], single_std: float) -> list[float]:
    """Return each value's deviation above the median; the spread grows for few targets, from ``single_std`` of a single target."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    median = statistics.median(finite or [0.0])
    spread = max(MIN_SPREAD, MAD_TO_STD * statistics.median([abs(value - median) for value in finite] or [0.0]))
    return [
        _deviation(value, median, math.hypot(spread, single_std / math.sqrt(n)))
        for value, n in zip(values, sizes, strict=True)
    ]


def _deviation(value: float | None, median: float, spread: float) -> float:
    if value is None:
        return 0.0
    return max(0.0, value - median) / spread if math.isfinite(value) else math.inf


def iterate_skips(batches: Batches, blamed: Iterable[ScoredDocument]) -> Iterator[SkippedRange]:
    """Yield the documents to skip, each as a whole even if the step has only part of it."""
    for entry in blamed:
        document = entry.measured.piece
        source = batches.mixture.sources[document.source]
        begin, end = _document_span(source, document)
        reason = (
            f"loss {entry.measured.loss:.4f}, gradient norm {entry.measured.grad_norm:.3f}, score {entry.score:.1f}"
        )
        yield SkippedRange(document.source, len(source.tokens_N), begin, end, document.name, reason)


def _document_span(source: Source, document: DocumentInStep) -> tuple[int, int]:
    begin, end = document.place, document.end
    while begin > 0 and not source.tokens_N[begin] & DOCUMENT_START:
        begin -= 1
    while end < len(source.tokens_N) and not source.tokens_N[end] & DOCUMENT_START:
        end += 1
    return begin, end


def report_lines(step: int, scores: Sequence[ScoredDocument], skip_list: Path, max_shown: int = 10) -> Iterator[str]:
    """Yield the lines of a step's table of documents, highest score first, and what to do."""
    yield f"step {step}: {pluralize(len(scores), 'document')}; score: distance from the other documents, in standard deviations"
    yield f"{'score':>7}  {'loss':>8}  {'grad norm':>9}  {'targets':>7}  document"
    for entry in scores[:max_shown]:
        effect = entry.measured
        yield f"{entry.score:7.1f}  {effect.loss:8.4f}  {effect.grad_norm:9.3f}  {effect.n_targets:7,}  {effect.piece.name}"
    if len(scores) > max_shown:
        yield f"… and {len(scores) - max_shown} more"
    blamed = [entry for entry in scores if entry.score >= MIN_BLAMED_SCORE]
    if not blamed:
        yield f"no document stands out: none has a score of {MIN_BLAMED_SCORE:g}"
        return
    names = ", ".join(entry.measured.piece.name for entry in blamed)
    yield f"to blame: {names}; resume with --data.skip {skip_list} to leave {'it' if len(blamed) == 1 else 'them'} out"


def blame(config: Config, resume: str, step: int, context: RankContext) -> None:
    """Measure a step's documents and log those that stand out.

    Uses the weights of the checkpoint at the path ``resume`` (no: the model itself).

    Raises:
        UserError: The step or the data does not follow the checkpoint, or a model, data or checkpoint cannot be used.
    """
    if extend.current().has_document_loss:
        raise UserError(
            "--blame: measures documents one by one, which the Loss of --extend does not count; use a loss() of tokens"
        )

    def check_start(start: Start) -> None:
        identity = start.saved.manifest.identity if start.saved else None
        if identity and identity.data != start.point(start.saved).identity.data:
            raise UserError(
                f"--data.paths: {resume} was trained on different data, so its step {step} had other documents"
            )
        if step <= (start.saved.manifest.step if start.saved else 0):
            raise UserError(f"--blame: {resume} is from step {step} or later; name an older checkpoint")

    setup = prepare(config, resume, context, Purpose.BLAME, check_start)
    batches, position = setup.start.batches, setup.start.point(setup.start.saved).position
    assert batches
    context.heartbeat.enter_phase(Phase.EVAL)
    batch_size = setup.start.config.training.global_batch_size
    first = position + (step - 1 - setup.step) * batch_size
    effects = []
    for document in iterate_documents(batches, range(first, first + batch_size)):
        context.heartbeat.record_alive()
        if effect := measure_document(setup.forward_backward, setup.updater, context.rank, batches, document):
            effects.append(effect)
    if not effects:
        raise UserError(f"--blame: step {step} has no target to train on; name another step")
    scores = score_documents(effects)
    if context.rank.is_rank0:
        path = context.run.skips
        blamed = [score for score in scores if score.score >= MIN_BLAMED_SCORE]
        write_atomic(context.run.blamed, "".join(reader.dumps(score) + "\n" for score in scores))
        if blamed:
            write_atomic(path, "".join(reader.dumps(skip) + "\n" for skip in iterate_skips(batches, blamed)))
        context.journal.log(f"using the weights of {setup.weights}")
        for line in report_lines(step, scores, path):
            context.journal.log(line)
