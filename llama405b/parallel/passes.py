"""Run the forwards and backwards of a step's micro-batches, in a loop or as a pipeline. Knows modules; not the update.

In a pipeline, each direction has a process group of its own, and so does each direction between the last rank and the first. NCCL runs
the sends and receives of one group in order; with separate groups, transfers in one direction never wait for those in another.

Shape suffixes: B sequences of a micro-batch, S positions of a rank's part, h hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llama405b import extend
from llama405b.contract.errors import UserError
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model.attention import model_inputs
from llama405b.model.head import HeadLoss, OfLogits, loss_of
from llama405b.parallel.fsdp import GradientSync, give_forward, set_last_backward, take_forward
from llama405b.parallel.split import Stage, attention_of, group_along, loss_of_parts
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Parallel
from llama405b.spec.rules import Pass, order_of

Lap = Callable[[str], None]  # called with the name of each part when it ends: forward, backward


class Accumulator(Protocol):
    """Receiver of the gradients; see ``optim.updater``."""

    def expect(self, *, last: bool) -> None:
        """Announce a micro-batch before its forward; the argument says whether it is the last of the step."""

    def accumulate(self) -> None:
        """Take the gradients of a micro-batch."""


class Passes(Protocol):
    """This rank's part in the forwards and backwards of a step."""

    @property
    def model(self) -> nn.Module:
        """The module that computes."""

    def n_targets(self, batch: Batch) -> Tensor:
        """Return the number of targets that this rank contributes; over all ranks each target is counted once."""

    def train(self, microbatches: Sequence[Batch], n_targets: int, gradients: Accumulator, lap: Lap) -> Tensor:
        """Compute the gradients of the mean loss over the ``n_targets`` of all ranks.

        Return this rank's contribution to the negative log-likelihood, in nats.
        """

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's contribution to the negative log-likelihood of a micro-batch, in nats; keep nothing for a backward."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """This rank's slice of a batch that its tp, cp and pp peers also read."""

    axes: Axes
    rank: int
    attention: str  # name of the attention function

    @property
    def counts(self) -> bool:
        """Whether this rank contributes the loss: of ranks that know the same loss, only one does."""
        places = {name: self.axes.place(self.rank, (name,)).rank for name in ("tp", "pp")}
        return places["tp"] == 0 and places["pp"] == self.axes.pp - 1

    @property
    def is_split(self) -> bool:
        """Whether sequences or the model are split between ranks."""
        return self.axes.tp * self.axes.cp * self.axes.pp > 1

    def counted(self, value: Tensor) -> Tensor:
        """Return the value if this rank contributes the loss, else 0."""
        return value * self.counts

    def n_targets(self, batch: Batch) -> Tensor:
        """Return the number of targets that this rank contributes."""
        return self.counted((self._part(batch.targets_BS) != IGNORE_INDEX).sum())

    def inputs(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return this rank's slice of a batch, and the model's arguments for it."""
        found = model_inputs(batch, self.attention, is_split=self.is_split)
        found |= {name: self._part(found[name]) for name in ("input_ids", "position_ids") if name in found}
        part = Batch(found["input_ids"], self._part(batch.targets_BS))
        return part, found

    def _part(self, whole_BS: Tensor) -> Tensor:
        place = self.axes.place(self.rank, ("cp",))
        return whole_BS.chunk(place.size, 1)[place.rank] if place.size > 1 else whole_BS


@dataclasses.dataclass(frozen=True, slots=True)
class OneByOne:
    """Runs the micro-batches one after the other through the full model."""

    model: nn.Module
    averaged: int  # number of ranks over which FSDP averages gradients
    sync: GradientSync | None = None  # None: FSDP reshards and reduces in each micro-batch
    cut: Cut | None = None  # None: the rank computes the full batch that it reads
    loss: HeadLoss = OfLogits()

    def n_targets(self, batch: Batch) -> Tensor:
        return self._cut.n_targets(batch)

    def train(self, microbatches: Sequence[Batch], n_targets: int, gradients: Accumulator, lap: Lap) -> Tensor:
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
    """Return a loss as a plain FP64 tensor, equal on all ranks of ``tp``."""
    nll = nll.detach()
    return (nll.to_local() if isinstance(nll, DTensor) else nll).double()


def no_loss(batch: Batch) -> Tensor:
    """Return a zero to which losses are added."""
    return torch.zeros((), dtype=torch.float64, device=batch.targets_BS.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Connection to the rank with the next or the previous stage."""

    peer: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """A rank's neighbors in its pipeline."""

    before: Link
    after: Link


def links_of(axes: Axes, rank: int, *, is_ring: bool) -> Links:
    """Make the process groups of all pipelines, on all ranks; return this rank's links. ``is_ring``: last and first rank are linked."""
    ways = group_along(axes, "pp"), group_along(axes, "pp")
    around = (group_along(axes, "pp"), group_along(axes, "pp")) if is_ring else ways
    ranks.share_timeout()
    stride, place = axes.world // axes.pp, axes.place(rank, ("pp",)).rank
    before, after = (rank - stride) % axes.world, (rank + stride) % axes.world
    return Links(Link(before, *(ways if place else around)), Link(after, *(ways if place < axes.pp - 1 else around)))


class Pipeline:
    """Runs this rank's pipeline stages; see ``Passes``."""

    def __init__(
        self,
        model: Stage,
        axes: Axes,
        rank: int,
        schedule: str,
        averaged: int,
        sync: GradientSync,
        cut: Cut,
        loss: HeadLoss,
    ) -> None:
        """``averaged``: number of ranks over which FSDP averages gradients."""
        self.model: nn.Module = model
        self.stage, self.cut, self.axes, self.loss = model, cut, axes, loss
        self.schedule, self.averaged, self.sync = schedule, averaged, sync
        self.place = axes.place(rank, ("pp",)).rank
        self.links = links_of(axes, rank, is_ring=len(model.chunks) > 1)
        self.sending: list[tuple[dist.Work | None, Tensor]] = []

    def n_targets(self, batch: Batch) -> Tensor:
        return self.cut.n_targets(batch)

    def train(self, microbatches: Sequence[Batch], n_targets: int, gradients: Accumulator, lap: Lap) -> Tensor:
        """See ``Passes``. Forwards and backwards alternate, so all of it is timed as backward."""
        n_chunks = len(self.stage.chunks)
        order = order_of(self.schedule, self.axes.pp, n_chunks, self.place, len(microbatches))
        last = order[-1].micro
        nll = no_loss(microbatches[0])
        held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        forwards: dict[tuple[int, int], list[Any]] = {}
        gradients.expect(last=True)
        with loss_of_parts(self.axes.tp):
            for each in order:
                at = each.chunk, each.micro
                if not each.backward:
                    held[at] = self._forward(each, microbatches[each.micro])
                    forwards[at] = take_forward(self.stage)
                    continue
                self.sync.expect(last=each.micro == last)
                set_last_backward(self.stage, each == order[-1])
                give_forward(self.stage, forwards.pop(at))
                nll = nll + self._backward(each, *held.pop(at), n_targets)
                take_forward(self.stage)
        self._finish_sending()
        gradients.accumulate()
        lap("backward")
        return self.cut.counted(nll)

    def evaluate(self, batch: Batch) -> Tensor:
        with loss_of_parts(self.axes.tp):
            for chunk in range(len(self.stage.chunks)):
                _, output = self._forward(Pass(False, chunk, 0), batch)
        self._finish_sending()
        take_forward(self.stage)
        nll = own_value(output) if self._is_last(chunk) else no_loss(batch)
        return self.cut.counted(nll)

    def _forward(self, each: Pass, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a chunk's input and output; the output of the last stage is the loss."""
        part, more = self.cut.inputs(batch)
        x = more.pop("input_ids")
        if not self._is_first(each.chunk):
            x = self._receive(self.links.before.peer, self.links.before.forward, self._hidden(part))
            x.requires_grad_(torch.is_grad_enabled())

        def run() -> Tensor:
            return self.stage(x, each.chunk, **more)

        if self._is_last(each.chunk):
            return x, self.loss.nll(run, part.targets_BS)
        output = run()
        self._send(output.detach(), self.links.after.peer, self.links.after.forward)
        return x, output

    def _backward(self, each: Pass, x: Tensor, output: Tensor, n_targets: int) -> float | Tensor:
        """Run a chunk's backward and send the gradient of its input; return the loss if this is the last stage, else 0."""
        if self._is_last(each.chunk):
            (output * (self.averaged / n_targets)).backward()
        else:
            empty = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            gradient = self._receive(self.links.after.peer, self.links.after.backward, empty)
            if output.requires_grad:  # False if all parameters of the first stage are frozen
                torch.autograd.backward(output, gradient)
        if not self._is_first(each.chunk):
            assert x.grad is not None
            self._send(x.grad, self.links.before.peer, self.links.before.backward)
        return own_value(output) if self._is_last(each.chunk) else 0.0

    def _hidden(self, part: Batch) -> Tensor:
        """Return uninitialized memory for the hidden states of a micro-batch."""
        n_sequences, length = part.ids_BS.shape
        shape = n_sequences, length // self.axes.tp, self.stage.config.hidden_size
        return torch.empty(shape, dtype=self.stage.compute_dtype, device=part.ids_BS.device)

    def _receive(self, peer: int, group: dist.ProcessGroup, into: Tensor) -> Tensor:
        dist.recv(into, peer, group)
        return into

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        # Keep the tensor together with its work: gloo does not keep the memory of an unfinished send alive.
        kept = tensor.contiguous()
        self.sending = [(work, sent) for work, sent in self.sending if work and not work.is_completed()]
        self.sending.append((dist.isend(kept, peer, group), kept))

    def _finish_sending(self) -> None:
        for work, _ in self.sending:
            if work:
                work.wait()
        self.sending = []

    def _is_first(self, chunk: int) -> bool:
        return chunk == 0 and self.place == 0

    def _is_last(self, chunk: int) -> bool:
        return chunk == len(self.stage.chunks) - 1 and self.place == self.axes.pp - 1


def build_passes(parallel: Parallel, model: nn.Module, me: Rank) -> Passes:
    """Build the forward and backward of a model that is split over the ranks.

    Raises:
        UserError: The user's module computes a loss of full logits, but no rank has them.
    """
    own = extend.current().loss
    if own and (parallel.loss == "parts" or me.axes.tp > 1):
        raise UserError(
            "--extend: loss() needs all logits, but no rank has them with loss = parts or tp; remove one of the two"
        )
    averaged, loss = me.dp.size * me.axes.cp, loss_of(parallel.loss, model.lm_head, own)
    if parallel.by_fsdp1:
        return OneByOne(model, averaged, loss=loss)
    cut = Cut(me.axes, me.rank, attention_of(model.config._attn_implementation))
    sync = GradientSync(model, parallel.of_strategy, me.axes.dp_replicate)
    if isinstance(model, Stage):
        return Pipeline(model, me.axes, me.rank, parallel.pp_schedule, averaged, sync, cut, loss)
    return OneByOne(model, averaged, sync, cut, loss)
