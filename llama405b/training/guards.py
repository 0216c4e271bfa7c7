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

from llama405b.contract.errors import UserError
from llama405b.contract.files import read_record, write_json
from llama405b.contract.records import EventKind, SpentHours
from llama405b.data.batches import Reader
from llama405b.data.sources import documents_at
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
        self.skipped = 0  # steps in a row that changed no weight, for any reason

    @classmethod
    def replay(cls, factor: float, losses: Iterable[float], *, always: bool = False) -> "SpikeDetector":
        """Return a detector that has processed the losses of earlier steps, as ``update`` does."""
        detector = cls(factor)
        for loss in losses:
            detector.update(loss, always=always)
        return detector

    @property
    def median(self) -> float | None:
        """The median of the last losses; None after too few steps."""
        return statistics.median(self.losses) if len(self.losses) >= MIN_STEPS else None

    def is_spike(self, loss: float) -> bool:
        """Return whether a loss is a spike."""
        return self.median is not None and loss > self.factor * self.median

    def skip(self) -> None:
        """Count a step that changed no weight."""
        self.skipped += 1

    def update(self, loss: float, *, always: bool = False) -> bool:
        """Add a step's loss and return whether it is a spike; spikes do not enter the median unless ``always``."""
        is_spike = self.is_spike(loss)
        if always or not is_spike:
            self.skipped = 0
            self.losses.append(loss)
        else:
            self.skip()
        return is_spike


MAX_NAMED = 20  # documents named in a report
MIN_EMPTY = 10  # steps without targets from which on a majority of such steps is an error


class BadSteps:
    """Checks each step of a run; all ranks call it with the same values."""

    def __init__(
        self, settings: Training, detector: SpikeDetector, reader: Reader, journal: Journal, first_step: int
    ) -> None:
        """``first_step``: the first step of this attempt."""
        self.settings = settings
        self.detector = detector
        self.reader = reader
        self.journal, self.first_step = journal, first_step
        self.n_empty = 0  # steps without targets in this attempt

    def refuses(self, loss: float) -> bool:
        """Return whether a step with this loss must not change the weights."""
        return self.settings.on_loss_spike != "warn" and self.detector.is_spike(loss)

    def count_empty(self, step: int) -> None:
        """Report a step whose targets are all masked, for example by very long prompts."""
        self.n_empty += 1
        self.journal.log(f"step {step}/{self.journal.steps}  skipped: every target is masked")
        self.journal.event(EventKind.SKIPPED, step=step, count=self.n_empty)
        taken = step - self.first_step + 1
        if self.n_empty >= MIN_EMPTY and 2 * self.n_empty > taken:
            raise UserError(
                f"--data.paths: {self.n_empty} of {taken} steps have no target token; remove documents whose prompts are "
                "longer than --data.seq_len, or raise it"
            )

    def check_finite(self, step: int, error: NonFiniteError) -> None:
        """Report a loss or gradient that is not finite, with the documents of its step."""
        choice = self.settings.on_nonfinite
        self.detector.skip()
        self._report(EventKind.NOT_FINITE, step, choice, f"{error}; the weights are still those of step {step - 1}")
        if choice == "stop":
            raise NonFiniteError(
                f"step {step}: {error}; the weights are still those of step {step - 1}; the log names its documents; resume "
                "with --training.on_nonfinite skip, without these documents, or with a lower --optimizer.lr"
            ) from None
        if self.detector.skipped >= MAX_SKIPPED:
            raise NonFiniteError(
                f"step {step}: {MAX_SKIPPED} steps in a row were skipped, the last one for: {error}; resume from an older "
                "checkpoint, or with a lower --optimizer.lr"
            ) from None

    def check_spike(self, step: int, result: StepResult) -> None:
        """Report a loss spike, with the documents of its step."""
        median, choice = self.detector.median, self.settings.on_loss_spike
        if not self.detector.update(result.loss, always=choice == "warn"):
            return
        loss = f"loss {result.loss:.4f} is {result.loss / (median or math.inf):.1f} times the median of the last steps"
        what = "" if result.updated else f"; the weights are still those of step {step - 1}"
        self._report(EventKind.SPIKE, step, choice, f"{loss}{what}")
        if choice == "stop":
            raise SpikeError(
                f"step {step}: {loss}; the log names its documents; resume from the last checkpoint, with "
                "--training.on_loss_spike skip or without these documents"
            )
        if choice == "skip" and self.detector.skipped >= MAX_SKIPPED:
            raise SpikeError(
                f"step {step}: {MAX_SKIPPED} steps in a row were skipped, the last one for: {loss}; resume from an older "
                "checkpoint, or with --training.on_loss_spike warn or a higher --training.loss_spike_factor"
            )

    def _report(self, kind: EventKind, step: int, choice: str, what: str) -> None:
        """Log and record a problem of a step with its documents; ``choice``: the configured reaction."""
        if not self.journal.me.is_rank0:  # only rank 0 reports
            return
        detail = f"{what}; its documents: {self._documents()}"
        self.journal.log(f"step {step}/{self.journal.steps}  {detail}")
        self.journal.event(kind, step=step, detail=f"{choice}: {detail}")

    def _documents(self) -> str:
        """Return the names of the first documents of the step that was read last."""
        end = self.reader.position
        indices = range(end - self.reader.global_batch, end)
        names = list(itertools.islice(documents_at(self.reader.batches.mixture, indices), MAX_NAMED + 1))
        return ", ".join(names[:MAX_NAMED]) + " and more" * (len(names) > MAX_NAMED) if names else "unknown"


WARNS_AT = 0.8  # fraction of the budget
KEEP_EVERY_S = 10.0
STEPS, SAVES, ENDING_S = (
    2,
    1.5,
    5.0,
)  # what must fit into the rest: steps and saves as long as the last ones, and seconds
GUESSED_BYTES_PER_S = 1e9  # write speed of a host, until it has saved once


class Budget:
    """The GPU-hour budget, on rank 0; on other ranks it is never spent."""

    def __init__(self, gpu_hours: float, context: RankContext, began: float) -> None:
        """``gpu_hours``: 0: unlimited; ``began``: start of this attempt, by the monotonic clock."""
        self.most, self.context, self.began = gpu_hours, context, began
        self.first_save_s = 0.0
        self.counts = context.me.is_rank0
        self.before = 0.0
        if self.counts and (kept := read_record(SpentHours, context.run.spent)):
            self.before = kept.gpu_hours
        self.warned = False
        self.is_spent = False
        if gpu_hours and self.before >= gpu_hours:
            raise UserError(
                f"--training.gpu_hours: {_hours(self.before)} of {gpu_hours:g} are spent; raise it to continue, or remove it"
            )
        self.closed = threading.Event()
        if self.counts:
            self.keep()
            self.keeper = threading.Thread(target=self._keep_on, name="budget", daemon=True)
            self.keeper.start()

    def saves(self, host_bytes: float) -> None:
        """Set how many bytes a host saves, to estimate the time of the first save."""
        self.first_save_s = host_bytes / GUESSED_BYTES_PER_S

    @property
    def spent(self) -> float:
        """GPU-hours of all attempts so far, each counted from when it began to load."""
        return self.before + (time.monotonic() - self.began) * self.context.me.world / 3600

    @property
    def left_s(self) -> float:
        """Seconds until the budget is spent; 0 on ranks that do not count."""
        return max(0.0, self.most - self.spent) * 3600 / self.context.me.world if self.counts else 0.0

    def after_step(self, step_s: float, save_s: float) -> bool:
        """Return whether to stop now so that a save still fits. ``step_s``, ``save_s``: duration of the last step and save."""
        if not (self.counts and self.most):
            return False
        spent, world = self.spent, self.context.me.world
        if spent >= WARNS_AT * self.most and not self.warned:
            self.warned = True
            words = f"{_hours(spent)} of {self.most:g} GPU-hours are spent (--training.gpu_hours)"
            self.context.log(words)
            self.context.journal.event(EventKind.BUDGET, detail=words)
        left_s = STEPS * step_s + SAVES * (save_s or self.first_save_s) + ENDING_S
        self.is_spent = spent + left_s * world / 3600 >= self.most
        return self.is_spent

    def keep(self) -> None:
        """Write the spent GPU-hours for the next attempt."""
        write_json(self.context.run.spent, SpentHours(self.spent))

    def _keep_on(self) -> None:
        """Write regularly while the attempt loads, trains or hangs: it may be killed at any time."""
        while not self.closed.wait(KEEP_EVERY_S):
            with contextlib.suppress(OSError):  # a full disk must not end all ranks; the next write may succeed
                self.keep()

    def close(self) -> None:
        """Stop the writer thread, and write once more for the next attempt."""
        self.closed.set()
        if self.counts:
            self.keeper.join()  # the thread writes through the same temporary file
            with contextlib.suppress(OSError):  # a run that ended well has done so
                self.keep()

    @property
    def why_stopped(self) -> str:
        """Why the run was stopped, for the log."""
        return f"as {_hours(self.spent)} of {self.most:g} GPU-hours are spent" if self.is_spent else "as requested"


def _hours(gpu_hours: float) -> str:
    """Format GPU-hours with two decimals, or below 1 with two significant digits."""
    return f"{gpu_hours:.2f}" if gpu_hours >= 1 else f"{gpu_hours:.2g}"
