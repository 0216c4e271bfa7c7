"""A micro-batch, the input of one forward pass. Knows only tensors.

Shape suffixes: B sequences, S positions.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a target that does not count: a prompt, or what follows the end of a document


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentEnds:
    """Ends of the documents in a flattened batch, for attention kernels that take no mask."""

    ends: Tensor  # int32, after a 0
    max_length: int  # tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Packed documents and their training targets."""

    ids_BS: Tensor  # int64
    targets_BS: Tensor  # int64: each position's next token, or IGNORE_INDEX
    positions_BS: Tensor | None = None  # int64, in the document: each 0 begins one. None: a sequence is one document
    known_ends: DocumentEnds | None = None  # None: not counted yet

    @property
    def document_ends(self) -> DocumentEnds:
        """The ends of documents. Counting them synchronizes with the device, unless ``to`` moved the batch there."""
        if self.known_ends:
            return self.known_ends
        n_sequences, length = self.ids_BS.shape
        if self.positions_BS is None:
            ends = torch.arange(0, n_sequences * length + 1, length, dtype=torch.int32, device=self.ids_BS.device)
            return DocumentEnds(ends, length)
        begins = (self.positions_BS.flatten() == 0).nonzero().flatten().int()
        ends = F.pad(begins, (0, 1), value=n_sequences * length)
        return DocumentEnds(ends, int(ends.diff().max()))

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch and its document ends to a device. The ends are counted first; no copy is waited for."""
        ends = self.document_ends
        return Batch(
            _copy_to_device(self.ids_BS, device),
            _copy_to_device(self.targets_BS, device),
            None if self.positions_BS is None else _copy_to_device(self.positions_BS, device),
            DocumentEnds(_copy_to_device(ends.ends, device), ends.max_length),
        )

    def split(self, size: int) -> list["Batch"]:
        """Split into micro-batches of ``size`` sequences."""
        n_sequences = len(self.ids_BS)
        return [
            Batch(
                self.ids_BS[begin : begin + size],
                self.targets_BS[begin : begin + size],
                None if self.positions_BS is None else self.positions_BS[begin : begin + size],
            )
            for begin in range(0, n_sequences, size)
        ]


def _copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    pinned = tensor.contiguous().pin_memory()  # pin_memory copies a strided view twice, through pageable memory
    return pinned.to(device, non_blocking=True)  # torch keeps the block until it has been read
