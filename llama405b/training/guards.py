"""Guards that end training early or skip a step: bad steps (loss spikes, non-finite values, no targets) and the GPU-hour budget.

A loss spike is a loss far above the median of the last steps. The budget counts GPU-hours over all attempts of a run; it warns at 80 %, and
stops the run early enough to save. Knows clocks and ``spent.json``, which rank 0 writes; not when a step or a save happens.
"""

import collections
import contextlib
import itertools
import math
import statistics
import threading
import time
from collections.abc import Iterable

from llama405b import extend
from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.records import EventKind, SpentHours
from llama405b.data.batches import BatchLoader
from llama405b.data.sources import document_names_at
from llama405b.optim.step import NonFiniteError, SpikeError, StepResult
from llama405b.settings.schema import Training
from llama405b.training.context import RankContext
from llama405b.training.journal import Journal

WINDOW = 64  # a loss is compared with the median of so many steps
MIN_STEPS = 16  # with fewer steps, no loss counts as a spike
MAX_SKIPPED = 16  # skipped steps in a row before the run is stopped


class SpikeDetector:
    """Detects loss spikes by the median loss of the last steps."""

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        """``factor``: times the median of the last losses, above which a loss is a spike; ``losses``: those of steps before."""
        self.factor, self.losses = factor, collections.deque(losses, maxlen=WINDOW)
        self.n_skipped = 0  # steps in a row that changed no weight, for any reason

    @classmethod
    def from_losses(cls, factor: float, losses: Iterable[float], *, count_spikes: bool = False) -> "SpikeDetector":
        """Return a detector that has processed the losses of earlier steps, as ``update`` does."""
        detector = cls(factor)
        for loss in losses:
            detector.update(loss, count_spikes=count_spikes)
        return detector

    @property
    def median(self) -> float | None:
        """The median of the last losses; None after too few steps."""
        return statistics.median(self.losses) if len(self.losses) >= MIN_STEPS else None

    def is_spike(self, loss: float) -> bool:
        """Return whether a loss is a spike."""
        return self.median is not None and loss > self.factor * self.median

    def count_skipped(self) -> None:
        """Count a step that changed no weight."""
        self.n_skipped += 1

    def update(self, loss: float, *, count_spikes: bool = False) -> bool:
        """Add a step's loss and return whether it is a spike; spikes do not enter the median unless ``count_spikes``."""
        is_spike = self.is_spike(loss)
        if count_spikes or not is_spike:
            self.n_skipped = 0
            self.losses.append(loss)
        else:
            self.count_skipped()
        return is_spike


MAX_NAMED = 20  # documents named in a report
MIN_EMPTY = 10  # steps without targets from which on a majority of such steps is an error


class BadSteps:
    """Checks each step of a run; all ranks call it with the same values."""

    def __init__(
        self, settings: Training, detector: SpikeDetector, reader: BatchLoader, journal: Journal, first_step: int
    ) -> None:
        """``first_step``: the first step of this attempt."""
        self.settings = settings
        self.detector = detector
        self.reader = reader
        self.journal, self.first_step = journal, first_step
        self.n_empty = 0  # steps without targets in this attempt
        self.loss_note = ", or nothing that the Loss of --extend counts" * extend.current().has_document_loss

    def refuses_loss(self, loss: float) -> bool:
        """Return whether a step with this loss must not change the weights."""
        return self.settings.on_loss_spike != "warn" and self.detector.is_spike(loss)

    def count_empty(self, step: int) -> None:
        """Report a step whose targets are all masked, for example by very long prompts."""
        self.n_empty += 1
        self.journal.log(f"step {step}/{self.journal.steps}  skipped: every target is masked{self.loss_note}")
        self.journal.write_event(EventKind.SKIPPED, step=step, count=self.n_empty)
        n_steps = step - self.first_step + 1
        if self.n_empty >= MIN_EMPTY and 2 * self.n_empty > n_steps:
            raise UserError(
                f"--data.paths: {self.n_empty} of {n_steps} steps have no target token{self.loss_note}; remove documents "
                "whose prompts are longer than --data.seq_len, or raise it"
            )

    def check_finite(self, step: int, error: NonFiniteError) -> None:
        """Report a loss or gradient that is not finite, with the documents of its step."""
        choice = self.settings.on_nonfinite
        self.detector.count_skipped()
        self._report(EventKind.NOT_FINITE, step, choice, f"{error}; the weights are still those of step {step - 1}")
        if choice == "stop":
            raise NonFiniteError(
                f"step {step}: {error}; the weights are still those of step {step - 1}; the log names its documents; resume "
                "with --training.on_nonfinite skip, without these documents, or with a lower --optimizer.lr"
            ) from None
        if self.detector.n_skipped >= MAX_SKIPPED:
            raise NonFiniteError(
                f"step {step}: {MAX_SKIPPED} steps in a row were skipped, the last one for: {error}; resume from an older "
                "checkpoint, or with a lower --optimizer.lr"
            ) from None

    def check_spike(self, step: int, result: StepResult) -> None:
        """Report a loss spike, with the documents of its step."""
        median, choice = self.detector.median, self.settings.on_loss_spike
        if not self.detector.update(result.loss, count_spikes=choice == "warn"):
            return
        loss = f"loss {result.loss:.4f} is {result.loss / (median or math.inf):.1f} times the median of the last steps"
        weights_note = "" if result.updated else f"; the weights are still those of step {step - 1}"
        self._report(EventKind.SPIKE, step, choice, f"{loss}{weights_note}")
        if choice == "stop":
            raise SpikeError(
                f"step {step}: {loss}; the log names its documents; resume from the last checkpoint, with "
                "--training.on_loss_spike skip or without these documents"
            )
        if choice == "skip" and self.detector.n_skipped >= MAX_SKIPPED:
            raise SpikeError(
                f"step {step}: {MAX_SKIPPED} steps in a row were skipped, the last one for: {loss}; resume from an older "
                "checkpoint, or with --training.on_loss_spike warn or a higher --training.loss_spike_factor"
            )

    def _report(self, kind: EventKind, step: int, choice: str, problem: str) -> None:
        """Log and record a problem of a step with its documents; ``choice``: the configured reaction."""
        if not self.journal.rank.is_rank0:  # only rank 0 reports
            return
        detail = f"{problem}; its documents: {self._documents()}"
        self.journal.log(f"step {step}/{self.journal.steps}  {detail}")
        self.journal.write_event(kind, step=step, detail=f"{choice}: {detail}")

    def _documents(self) -> str:
        """Return the names of the first documents of the step that was read last."""
        end = self.reader.position
        indices = range(end - self.reader.global_batch, end)
        names = list(itertools.islice(document_names_at(self.reader.batches.mixture, indices), MAX_NAMED + 1))
        return ", ".join(names[:MAX_NAMED]) + " and more" * (len(names) > MAX_NAMED) if names else "unknown"


WARN_FRACTION = 0.8  # fraction of the budget
WRITE_INTERVAL_S = 10.0
RESERVED_STEPS, RESERVED_SAVES, RESERVED_S = (
    2,
    1.5,
    5.0,
)  # what must fit into the rest: steps and saves as long as the last ones, and seconds
ASSUMED_BYTES_PER_S = 1e9  # write speed of a host, until it has saved once


class Budget:
    """The GPU-hour budget, on rank 0; on other ranks it is never spent."""

    def __init__(self, gpu_hours: float, context: RankContext, start_s: float) -> None:
        """``gpu_hours``: 0: unlimited; ``start_s``: start of this attempt, by the monotonic clock."""
        self.max_gpu_hours, self.context, self.start_s = gpu_hours, context, start_s
        self.first_save_s = 0.0
        self.is_counting = context.rank.is_rank0
        self.previous_gpu_hours = 0.0
        if self.is_counting and (record := read_record(SpentHours, context.run.spent)):
            self.previous_gpu_hours = record.gpu_hours
        self.has_warned = False
        self.is_spent = False
        if gpu_hours and self.previous_gpu_hours >= gpu_hours:
            raise UserError(
                f"--training.gpu_hours: {_format_hours(self.previous_gpu_hours)} of {gpu_hours:g} are spent; raise it "
                f"to continue, or remove it"
            )
        self.closed = threading.Event()
        if self.is_counting:
            self.write()
            self.writer = threading.Thread(target=self._write_regularly, name="budget", daemon=True)
            self.writer.start()

    def set_save_size(self, host_bytes: float) -> None:
        """Set how many bytes a host saves, to estimate the time of the first save."""
        self.first_save_s = host_bytes / ASSUMED_BYTES_PER_S

    @property
    def spent_gpu_hours(self) -> float:
        """GPU-hours of all attempts so far, each counted from when it began to load."""
        return self.previous_gpu_hours + (time.monotonic() - self.start_s) * self.context.rank.world_size / 3600

    @property
    def remaining_s(self) -> float:
        """Seconds until the budget is spent; 0 on ranks that do not count."""
        return (
            max(0.0, self.max_gpu_hours - self.spent_gpu_hours) * 3600 / self.context.rank.world_size
            if self.is_counting
            else 0.0
        )

    def after_step(self, step_s: float, save_s: float) -> bool:
        """Return whether to stop now so that a save still fits. ``step_s``, ``save_s``: duration of the last step and save."""
        if not (self.is_counting and self.max_gpu_hours):
            return False
        spent_gpu_hours, world_size = self.spent_gpu_hours, self.context.rank.world_size
        if spent_gpu_hours >= WARN_FRACTION * self.max_gpu_hours and not self.has_warned:
            self.has_warned = True
            message = (
                f"{_format_hours(spent_gpu_hours)} of {self.max_gpu_hours:g} GPU-hours are spent (--training.gpu_hours)"
            )
            self.context.journal.log(message)
            self.context.journal.write_event(EventKind.BUDGET, detail=message)
        reserve_s = RESERVED_STEPS * step_s + RESERVED_SAVES * (save_s or self.first_save_s) + RESERVED_S
        self.is_spent = spent_gpu_hours + reserve_s * world_size / 3600 >= self.max_gpu_hours
        return self.is_spent

    def write(self) -> None:
        """Write the spent GPU-hours for the next attempt."""
        write_json(self.context.run.spent, SpentHours(self.spent_gpu_hours))

    def _write_regularly(self) -> None:
        """Write regularly while the attempt loads, trains or hangs: it may be killed at any time."""
        while not self.closed.wait(WRITE_INTERVAL_S):
            with contextlib.suppress(OSError):  # a full disk must not end all ranks; the next write may succeed
                self.write()

    def close(self) -> None:
        """Stop the writer thread, and write once more for the next attempt."""
        self.closed.set()
        if self.is_counting:
            self.writer.join()  # the thread writes through the same temporary file
            with contextlib.suppress(OSError):  # a run that ended well has done so
                self.write()

    @property
    def stop_reason(self) -> str:
        """Why the run was stopped, for the log."""
        return (
            f"as {_format_hours(self.spent_gpu_hours)} of {self.max_gpu_hours:g} GPU-hours are spent"
            if self.is_spent
            else "as requested"
        )


def _format_hours(gpu_hours: float) -> str:
    """Format GPU-hours with two decimals, or below 1 with two significant digits."""
    return f"{gpu_hours:.2f}" if gpu_hours >= 1 else f"{gpu_hours:.2g}"
