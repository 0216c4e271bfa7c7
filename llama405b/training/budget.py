"""The GPU-hours that a run may take, over all of its attempts: it warns, and saves and stops before they are spent.

Knows clocks and ``spent.json``, which rank 0 keeps; not when a step or a save happens.
"""

import contextlib
import threading
import time

from llama405b.contract.errors import UserError
from llama405b.contract.events import EventKind
from llama405b.contract.files import read_record, write_json
from llama405b.contract.records import SpentHours
from llama405b.training.context import RankContext

WARNS_AT = 0.8  # of them
KEEP_EVERY_S = 10.0
STEPS, SAVES, ENDING_S = 2, 1.5, 5.0  # that must fit into what is left: of the time that the last ones took
GUESSED_BYTES_PER_S = 1e9  # of a host, until it has saved


class Budget:
    """On rank 0; on other ranks it is never spent."""

    def __init__(self, gpu_hours: float, context: RankContext, began: float) -> None:
        """``gpu_hours``: 0: any number; ``began``: when this attempt did, by the monotonic clock.

        Raises:
            UserError: They are spent.
        """
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
