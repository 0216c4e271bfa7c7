"""The forwards and backwards of a step's micro-batches, between its batch and the clipping. Knows modules; not the update.

Shape suffixes: B sequences of a micro-batch, S positions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b.contract.mesh import Axes
from llama405b.model.batch import IGNORE_INDEX, Batch
from llama405b.model.head import HeadLoss, OfLogits
from llama405b.model.inputs import model_inputs
from llama405b.parallel.fsdp2 import GradientSync, take_forward
from llama405b.parallel.tensor import loss_of_parts

Lap = Callable[[str], None]  # called with the name of each part as it ends: forward, backward


class Accumulator(Protocol):
    """Who takes the gradients; see ``optim.updater``."""

    def expect(self, *, last: bool) -> None:
        """Tell, before a forward, whether the gradients of its micro-batch are the last of the step."""

    def accumulate(self) -> None:
        """Take the gradients of a micro-batch."""


class Passes(Protocol):
    """How this rank takes its part in a step's forwards and backwards."""

    @property
    def model(self) -> nn.Module:
        """What computes."""

    def n_targets(self, batch: Batch) -> Tensor:
        """Return how many targets this rank adds to those of others; each is counted once."""

    def train(self, microbatches: Sequence[Batch], n_targets: int, gradients: Accumulator, lap: Lap) -> Tensor:
        """Compute the gradients of the mean over ``n_targets``, of all ranks.

        Returns the negative log-likelihood, in nats, that this rank adds to that of others.
        """

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the negative log-likelihood of a micro-batch that this rank adds to others', in nats; keeps nothing for a backward."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """What a rank computes of the sequences that it reads, which others read as well."""

    axes: Axes
    rank: int
    attention: str  # what computes it

    @property
    def counts(self) -> bool:
        """Whether it adds its loss to that of others, which may know it as well."""
        places = {name: self.axes.place(self.rank, (name,)).rank for name in ("tp", "pp")}
        return places["tp"] == 0 and places["pp"] == self.axes.pp - 1

    @property
    def is_split(self) -> bool:
        """Whether its hidden states are a part of the sequences, or of the model."""
        return self.axes.tp * self.axes.cp * self.axes.pp > 1

    def counted(self, value: Tensor) -> Tensor:
        """Return what it adds to the values of others."""
        return value * self.counts

    def n_targets(self, batch: Batch) -> Tensor:
        """Return how many targets it adds to those of others."""
        return self.counted((self._part(batch.targets_BS) != IGNORE_INDEX).sum())

    def inputs(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return its part of a batch, and the model's arguments for it."""
        found = model_inputs(batch, self.attention, is_split=self.is_split)
        found |= {name: self._part(found[name]) for name in ("input_ids", "position_ids") if name in found}
        part = Batch(found["input_ids"], self._part(batch.targets_BS))
        return part, found

    def _part(self, whole_BS: Tensor) -> Tensor:
        place = self.axes.place(self.rank, ("cp",))
        return whole_BS.chunk(place.size, 1)[place.rank] if place.size > 1 else whole_BS


@dataclasses.dataclass(frozen=True, slots=True)
class OneByOne:
    """One micro-batch after the other, through the whole model."""

    model: nn.Module
    averaged: int  # ranks over which FSDP averages gradients
    sync: GradientSync | None = None  # None: all that FSDP does is done for each micro-batch
    cut: Cut | None = None  # None: the rank computes all that it reads
    loss: HeadLoss = OfLogits()

    def n_targets(self, batch: Batch) -> Tensor:
        """See ``Passes``."""
        return self._cut.n_targets(batch)

    def train(self, microbatches: Sequence[Batch], n_targets: int, gradients: Accumulator, lap: Lap) -> Tensor:
        """See ``Passes``."""
        nll = no_loss(microbatches[0])
        with loss_of_parts(self._cut.axes.tp):
            for left, batch in zip(reversed(range(len(microbatches))), microbatches, strict=True):
                gradients.expect(last=left == 0)
                if self.sync:
                    self.sync.expect(last=left == 0)
                nll_micro = self._nll(batch)
                lap("forward")
                # FSDP averages over ranks; scaling by ranks / global count turns that average into the global mean.
                (nll_micro * (self.averaged / n_targets)).backward()
                nll = nll + own_value(nll_micro)
                gradients.accumulate()
                lap("backward")
        return self._cut.counted(nll)

    def evaluate(self, batch: Batch) -> Tensor:
        """See ``Passes``."""
        with loss_of_parts(self._cut.axes.tp):
            nll = self._nll(batch)
        take_forward(self.model)
        return self._cut.counted(own_value(nll))

    @property
    def _cut(self) -> Cut:
        return self.cut or Cut(Axes(self.averaged), 0, self.model.config._attn_implementation)

    def _nll(self, batch: Batch) -> Tensor:
        part, inputs = self._cut.inputs(batch)
        return self.loss.nll(lambda: self.model(**inputs, use_cache=False).logits, part.targets_BS)


def own_value(nll: Tensor) -> Tensor:
    """Return a loss as a plain number, in FP64, which all ranks of ``tp`` know."""
    nll = nll.detach()
    return (nll.to_local() if isinstance(nll, DTensor) else nll).double()


def no_loss(batch: Batch) -> Tensor:
    """Return what losses are added to."""
    return torch.zeros((), dtype=torch.float64, device=batch.targets_BS.device)
