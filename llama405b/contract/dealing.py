"""How the micro-batches of a step are dealt to the ranks that split the batch, however many there are. Pure.

Each has as many as the others, or one less: in the last round those without one take part with nothing to learn.
"""

import dataclasses

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted
from llama405b.contract.schema import Training


@dataclasses.dataclass(frozen=True, slots=True)
class Dealing:
    """The micro-batches of a step, for so many ranks."""

    n_micro: int
    n_ranks: int

    @classmethod
    def of(cls, training: Training, n_ranks: int) -> "Dealing":
        """Deal the configured batch; a batch of 0 is one micro-batch for each rank.

        Raises:
            UserError: The batch is not a number of whole micro-batches; names the nearest ones that are.
        """
        micro, batch = training.micro_batch_size, training.global_batch_size
        if batch % micro:
            nearest = " or ".join(str(size) for size in (batch // micro * micro, -(-batch // micro) * micro) if size)
            raise UserError(
                f"--training.global_batch_size: {counted(batch, 'sequence')} cannot be divided into micro-batches of {micro}; "
                f"use --training.global_batch_size {nearest}, or --training.micro_batch_size 1"
            )
        return cls(batch // micro if batch else n_ranks, n_ranks)

    @property
    def rounds(self) -> int:
        """Forwards of each rank in a step."""
        return -(-self.n_micro // self.n_ranks)

    @property
    def idle(self) -> int:
        """How many ranks have nothing to learn in the last round."""
        return self.rounds * self.n_ranks - self.n_micro

    @property
    def wasted(self) -> float:
        """Share of all forwards and backwards of a step that learn nothing."""
        return self.idle / (self.rounds * self.n_ranks)

    @property
    def even(self) -> list[int]:
        """The nearest numbers of micro-batches of which nothing is wasted."""
        return [n for n in ((self.rounds - 1) * self.n_ranks, self.rounds * self.n_ranks) if n]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the first of a rank's micro-batches in the step, and how many it has."""
        each, more = divmod(self.n_micro, self.n_ranks)
        return rank * each + min(rank, more), each + (rank < more)


def waste_note(training: Training, n_ranks: int) -> str:
    """Say what the last round of a step wastes, and which batches waste nothing; '' if nothing is wasted."""
    dealing = Dealing.of(training, n_ranks)
    if not dealing.idle:
        return ""
    of = f"the last of {dealing.rounds} rounds" if dealing.rounds > 1 else "each step"
    batches = " or ".join(str(n * training.micro_batch_size) for n in dealing.even)
    return (
        f"in {of} {dealing.idle} of {counted(n_ranks, 'rank')} {'has' if dealing.idle == 1 else 'have'} nothing to learn, which wastes "
        f"{100 * dealing.wasted:.0f}% of a step; --training.global_batch_size {batches} wastes nothing"
    )
