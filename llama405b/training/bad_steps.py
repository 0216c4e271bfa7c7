"""Steps that went wrong: a loss that spikes or is not finite, a batch with nothing to learn; what is done, and reported, about them."""

import itertools
import math

from llama405b.contract.errors import UserError
from llama405b.contract.events import EventKind
from llama405b.contract.schema import Training
from llama405b.data.provenance import documents_at
from llama405b.data.reader import Reader
from llama405b.optim.step import NonFiniteError, SpikeError, StepResult
from llama405b.training.journal import Journal
from llama405b.training.loss_spikes import MAX_SKIPPED, SpikeDetector

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
        """Report a step in which every target is masked, for example by very long prompts.

        Raises:
            UserError: Most steps of this attempt have nothing to learn.
        """
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
        """Report a loss or gradient that is not finite, with the documents of its step.

        Raises:
            NonFiniteError: The run is to stop then, or one step after another would be left out.
        """
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
        """Report a loss spike, with the documents of its step.

        Raises:
            SpikeError: The run is to stop then, or one step after another would be left out.
        """
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
