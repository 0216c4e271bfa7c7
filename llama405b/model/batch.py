"""A micro-batch: what a step reads. Knows tensors alone.

Shape suffixes: B sequences, S positions.
"""

import dataclasses

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that does not count: a prompt, or what follows the end of a document


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Packed documents, and what is to be learnt of them."""

    ids_BS: Tensor  # int64
    targets_BS: Tensor  # int64: each position's next token, or IGNORE_INDEX
    positions_BS: Tensor | None = None  # int64, in the document: each 0 begins one. None: a sequence is one document

    def to(self, device: torch.device) -> "Batch":
        """Bring it to a device."""
        positions_BS = None if self.positions_BS is None else self.positions_BS.to(device)
        return Batch(self.ids_BS.to(device), self.targets_BS.to(device), positions_BS)

    def split(self, size: int) -> list["Batch"]:
        """Return micro-batches of so many sequences."""
        n_sequences = len(self.ids_BS)
        return [
            Batch(
                self.ids_BS[begin : begin + size],
                self.targets_BS[begin : begin + size],
                None if self.positions_BS is None else self.positions_BS[begin : begin + size],
            )
            for begin in range(0, n_sequences, size)
        ]
