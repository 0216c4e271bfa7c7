"""What ends training before its last step, or leaves a step out: steps that went wrong, spikes of the loss, the budget.

Loss spikes: a loss far above those of the last steps.

Steps that went wrong: a loss that spikes or is not finite, a batch with nothing to learn; what is done, and reported, about them.

The GPU-hours that a run may take, over all of its attempts: it warns, and saves and stops before they are spent.

Knows clocks and ``spent.json``, which rank 0 keeps; not when a step or a save happens.
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

WINDOW = 64  # steps whose median is compared with
MIN_STEPS = 16  # before these no loss is a spike
MAX_SKIPPED = 16  # in a row: then something else is wrong


class SpikeDetector:
    """The losses of the last steps."""

    def __init__(self, factor: float, losses: Iterable[float] = ()) -> None:
        """``factor``: times the median of the last losses, above which a loss is a spike; ``losses``: those of steps before."""
        self.factor, self.losses = factor, collections.deque(losses, maxlen=WINDOW)
        self.skipped = 0  # steps in a row that changed no weight, for whatever reason

    @classmethod
    def replay(cls, factor: float, losses: Iterable[float], *, always: bool = False) -> "SpikeDetector":
        """Return what has seen the losses of earlier steps, as ``update`` sees them."""
        detector = cls(factor)
        for loss in losses:
            detector.update(loss, always=always)
        return detector

    @property
    def median(self) -> float | None:
        """The median of the last losses; None if there were too few steps."""
        return statistics.median(self.losses) if len(self.losses) >= MIN_STEPS else None

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is a spike."""
        return self.median is not None and loss > self.factor * self.median

    def skip(self) -> None:
        """Count a step that changed no weight."""
        self.skipped += 1

    def update(self, loss: float, *, always: bool = False) -> bool:
        """Return whether a step's loss is a spike; it counts for the median if it is not, or ``always``."""
        is_spike = self.is_spike(loss)
        if always or not is_spike:
            self.skipped = 0
            self.losses.append(loss)
        else:
            self.skip()
        return is_spike


MAX_NAMED = 20  # documents of a step
MIN_EMPTY = 10  # steps without targets, before most steps being so counts as a mistake


class BadSteps:
    """Judges each step of a run; all ranks call it alike."""

    def __init__(
        self, settings: Training, detector: SpikeDetector, reader: Reader, journal: Journal, first_step: int
    ) -> None:
        """``first_step``: of this attempt."""
        self.settings = settings
        self.detector = detector
        self.reader = reader
        self.journal, self.first_step = journal, first_step
        self.n_empty = 0  # steps with nothing to learn, in this attempt

    def refuses(self, loss: float) -> bool:
        """Whether a step with this loss must not change the weights."""
        return self.settings.on_loss_spike != "warn" and self.detector.is_spike(loss)

    def count_empty(self, step: int) -> None:
        """Report a step in which every target is masked, for example by very long prompts."""
        self.n_empty += 1
        self.journal.log(f"step {step}/{self.journal.steps}  skipped: every target is masked")
        self.journal.event(EventKind.SKIPPED, step=step, count=self.n_empty)
        taken = step - self.first_step + 1
        if self.n_empty >= MIN_EMPTY and 2 * self.n_empty > taken:
            raise UserError(
                f"--data.paths: {self.n_empty} of {taken} steps have no target to learn; remove documents whose prompts are "
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
                f"step {step}: {MAX_SKIPPED} steps in a row were left out, the last since {error}; resume from an older "
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
                f"step {step}: {MAX_SKIPPED} steps in a row were left out, the last since {loss}; resume from an older "
                "checkpoint, or with --training.on_loss_spike warn or a higher --training.loss_spike_factor"
            )

    def _report(self, kind: EventKind, step: int, choice: str, what: str) -> None:
        """Log what is wrong with a step, with its documents; ``choice``: what is done about it."""
        if not self.journal.me.is_rank0:  # others report nothing
            return
        detail = f"{what}; its documents: {self._documents()}"
        self.journal.log(f"step {step}/{self.journal.steps}  {detail}")
        self.journal.event(kind, step=step, detail=f"{choice}: {detail}")

    def _documents(self) -> str:
        """Name the first documents of the step that was read last."""
        end = self.reader.position
        indices = range(end - self.reader.global_batch, end)
        names = list(itertools.islice(documents_at(self.reader.batches.mixture, indices), MAX_NAMED + 1))
        return ", ".join(names[:MAX_NAMED]) + " and more" * (len(names) > MAX_NAMED) if names else "unknown"


WARNS_AT = 0.8  # of them
KEEP_EVERY_S = 10.0
STEPS, SAVES, ENDING_S = 2, 1.5, 5.0  # that must fit into what is left: of the time that the last ones took
GUESSED_BYTES_PER_S = 1e9  # of a host, until it has saved


class Budget:
    """On rank 0; on other ranks it is never spent."""

    def __init__(self, gpu_hours: float, context: RankContext, began: float) -> None:
        """``gpu_hours``: 0: any number; ``began``: when this attempt did, by the monotonic clock."""
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
                f"--training.gpu_hours: {_hours(self.before)} of {gpu_hours:g} are spent; raise it to go on, or leave it out"
            )
        self.closed = threading.Event()
        if self.counts:
            self.keep()
            self.keeper = threading.Thread(target=self._keep_on, name="budget", daemon=True)
            self.keeper.start()

    def saves(self, host_bytes: float) -> None:
        """Learn how many bytes a host saves, from which the time of the first save is guessed."""
        self.first_save_s = host_bytes / GUESSED_BYTES_PER_S

    @property
    def spent(self) -> float:
        """GPU-hours of all attempts so far, from when each began to train or load."""
        return self.before + (time.monotonic() - self.began) * self.context.me.world / 3600

    @property
    def left_s(self) -> float:
        """Seconds until they are spent; 0 where none are counted."""
        return max(0.0, self.most - self.spent) * 3600 / self.context.me.world if self.counts else 0.0

    def after_step(self, step_s: float, save_s: float) -> bool:
        """Count; returns whether to stop now, so that it is saved in time. ``step_s``, ``save_s``: what the last ones took."""
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
        """Remember what was spent, for the next attempt."""
        write_json(self.context.run.spent, SpentHours(self.spent))

    def _keep_on(self) -> None:
        """Keep it while the attempt loads, steps or hangs: it may end at any time."""
        while not self.closed.wait(KEEP_EVERY_S):
            with contextlib.suppress(OSError):  # a full disk must not end all ranks; the next time may succeed
                self.keep()

    def close(self) -> None:
        """Keep it once more, for the next attempt."""
        self.closed.set()
        if self.counts:
            self.keeper.join()  # which writes through the same partial file
            with contextlib.suppress(OSError):  # a run that ended well has done so
                self.keep()

    @property
    def why_stopped(self) -> str:
        """Say why the run was stopped."""
        return f"as {_hours(self.spent)} of {self.most:g} GPU-hours are spent" if self.is_spent else "as requested"


def _hours(gpu_hours: float) -> str:
    """Write them with two digits that count."""
    return f"{gpu_hours:.2f}" if gpu_hours >= 1 else f"{gpu_hours:.2g}"
