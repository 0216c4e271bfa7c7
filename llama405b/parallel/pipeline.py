"""Pipeline parallelism: each rank has some of the layers, and passes on hidden states and their gradients.

Either direction has a group of its own, and so has what goes around from the last rank to the first: with NCCL the sends and receives of
a group are in one order, and what goes one way never waits for what goes another.

Shape suffixes: B sequences of a micro-batch, S positions of a rank's part, h hidden size, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llama405b.contract.mesh import Axes
from llama405b.contract.schedule import Pass, order_of
from llama405b.distributed import ranks
from llama405b.model.batch import Batch
from llama405b.model.head import HeadLoss
from llama405b.parallel.fsdp2 import GradientSync, give_forward, set_last_backward, take_forward
from llama405b.parallel.groups import group_along
from llama405b.parallel.passes import Accumulator, Cut, Lap, no_loss, own_value
from llama405b.parallel.stage import Stage
from llama405b.parallel.tensor import loss_of_parts


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """To the rank with the next stage, or the one before."""

    peer: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """A rank's neighbors in its pipeline."""

    before: Link
    after: Link


def links_of(axes: Axes, rank: int, *, is_ring: bool) -> Links:
    """Make the groups of all pipelines, on all ranks; returns this rank's. ``is_ring``: the ends talk to each other."""
    ways = group_along(axes, "pp"), group_along(axes, "pp")
    around = (group_along(axes, "pp"), group_along(axes, "pp")) if is_ring else ways
    ranks.share_timeout()
    stride, place = axes.world // axes.pp, axes.place(rank, ("pp",)).rank
    before, after = (rank - stride) % axes.world, (rank + stride) % axes.world
    return Links(Link(before, *(ways if place else around)), Link(after, *(ways if place < axes.pp - 1 else around)))


class Pipeline:
    """A rank's stages; see ``Passes``."""

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
        """``averaged``: ranks over which FSDP averages gradients."""
        self.model: nn.Module = model
        self.stage, self.cut, self.axes, self.loss = model, cut, axes, loss
        self.schedule, self.averaged, self.sync = schedule, averaged, sync
        self.place = axes.place(rank, ("pp",)).rank
        self.links = links_of(axes, rank, is_ring=len(model.chunks) > 1)
        self.sending: list[tuple[dist.Work | None, Tensor]] = []

    def n_targets(self, batch: Batch) -> Tensor:
        """See ``Passes``."""
        return self.cut.n_targets(batch)

    def train(self, microbatches: Sequence[Batch], n_targets: int, gradients: Accumulator, lap: Lap) -> Tensor:
        """See ``Passes``. Parts of a step alternate, so all of it is timed as its backward."""
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
        """See ``Passes``."""
        with loss_of_parts(self.axes.tp):
            for chunk in range(len(self.stage.chunks)):
                _, output = self._forward(Pass(False, chunk, 0), batch)
        self._finish_sending()
        take_forward(self.stage)
        nll = own_value(output) if self._is_last(chunk) else no_loss(batch)
        return self.cut.counted(nll)

    def _forward(self, each: Pass, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a chunk's input and output; of the last stage, the loss."""
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
        """Pass on the gradient of a chunk's input; returns the loss, if this is the last stage."""
        if self._is_last(each.chunk):
            (output * (self.averaged / n_targets)).backward()
        else:
            empty = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            gradient = self._receive(self.links.after.peer, self.links.after.backward, empty)
            if output.requires_grad:  # else the first stage is frozen
                torch.autograd.backward(output, gradient)
        if not self._is_first(each.chunk):
            assert x.grad is not None
            self._send(x.grad, self.links.before.peer, self.links.before.backward)
        return own_value(output) if self._is_last(each.chunk) else 0.0

    def _hidden(self, part: Batch) -> Tensor:
        """Return memory for the hidden states of a micro-batch."""
        n_sequences, length = part.ids_BS.shape
        shape = n_sequences, length // self.axes.tp, self.stage.config.hidden_size
        return torch.empty(shape, dtype=self.stage.compute_dtype, device=part.ids_BS.device)

    def _receive(self, peer: int, group: dist.ProcessGroup, into: Tensor) -> Tensor:
        dist.recv(into, peer, group)
        return into

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
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
