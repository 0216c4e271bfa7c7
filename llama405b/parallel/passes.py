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

from llama405b import extend
from llama405b.contract.errors import UserError
from llama405b.data.batch import IGNORE_INDEX, Batch
from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model.attention import model_inputs
from llama405b.model.head import CrossEntropy, Loss, ModelOutput, UserLoss, build_loss
from llama405b.parallel.fsdp import GradientSync, set_last_backward
from llama405b.parallel.fsdp_internals import pop_prefetch_order, restore_prefetch_order
from llama405b.parallel.split import PipelineStages, base_attention_name, make_group_along
from llama405b.settings.axes import Axes
from llama405b.settings.schema import Config, Model, Parallel
from llama405b.spec.rules import MicrobatchPass, pipeline_order

OnPhaseEnd = Callable[[str], None]  # called with the name of each part when it ends: forward, backward


class GradientAccumulator(Protocol):
    """Receiver of the gradients; see ``optim.updater``."""

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Announce a micro-batch before its forward; the argument says whether it is the last of the step."""

    def accumulate(self) -> None:
        """Take the gradients of a micro-batch."""


class ForwardBackward(Protocol):
    """This rank's part in the forwards and backwards of a step."""

    @property
    def model(self) -> nn.Module:
        """The module that computes."""

    def count(self, batch: Batch) -> Tensor:
        """Return the loss's terms and the targets that this rank contributes, (2,); over all ranks each is counted once."""

    def train(
        self, microbatches: Sequence[Batch], n_terms: float, accumulator: GradientAccumulator, on_phase_end: OnPhaseEnd
    ) -> Tensor:
        """Compute the gradients of the mean loss over the ``n_terms`` of all ranks.

        Return this rank's contribution to the sum of the terms, in nats.
        """

    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's contribution to the sum of the terms of a micro-batch, in nats; keep nothing for a backward."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSlice:
    """This rank's slice of a batch that its tp, cp and pp peers also read."""

    axes: Axes
    rank: int
    attention: str  # name of the attention function
    is_compiled: bool = False  # decoder layers are
    isolated: bool = False  # documents that share a sequence are kept apart

    @property
    def adds_loss(self) -> bool:
        """Whether this rank contributes the loss: of ranks that know the same loss, only one does."""
        places = {name: self.axes.coordinate(self.rank, (name,)).rank for name in ("tp", "pp")}
        return places["tp"] == 0 and places["pp"] == self.axes.pp - 1

    @property
    def is_split(self) -> bool:
        """Whether sequences or the model are split between ranks."""
        return self.axes.tp * self.axes.cp * self.axes.pp > 1

    def contribution(self, value: Tensor) -> Tensor:
        """Return the value if this rank contributes the loss, else 0."""
        return value * self.adds_loss

    def count(self, batch: Batch, loss: Loss) -> Tensor:
        """Return the terms and targets that this rank contributes, (2,)."""
        local_batch = self.local(batch)
        counts = loss.count(local_batch), (local_batch.targets_BS != IGNORE_INDEX).sum()
        return self.contribution(torch.stack([count.double() for count in counts]))  # of one dtype on all ranks

    def inputs(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return this rank's slice of a batch, and the model's arguments for it."""
        arguments = model_inputs(
            batch, self.attention, is_split=self.is_split, is_compiled=self.is_compiled, isolated=self.isolated
        )
        arguments |= {
            name: self._cp_slice(arguments[name]) for name in ("input_ids", "position_ids") if name in arguments
        }
        return self.local(batch), arguments

    def local(self, batch: Batch) -> Batch:
        """Return this rank's slice of a batch; of a split sequence without the ends of documents."""
        if self.axes.cp == 1:
            return batch
        return Batch(self._cp_slice(batch.ids_BS), self._cp_slice(batch.targets_BS))

    def _cp_slice(self, full_BS: Tensor) -> Tensor:
        place = self.axes.coordinate(self.rank, ("cp",))
        return full_BS.chunk(place.size, 1)[place.rank] if place.size > 1 else full_BS


@dataclasses.dataclass(frozen=True, slots=True)
class MicrobatchLoop:
    """Runs the micro-batches one after the other through the full model."""

    model: nn.Module
    grad_divisor: int  # number of ranks over which FSDP averages gradients
    sync: GradientSync | None = None  # None: FSDP reshards and reduces in each micro-batch
    batch_slice: BatchSlice | None = None  # None: the rank computes the full batch that it reads
    loss: Loss = CrossEntropy()

    def count(self, batch: Batch) -> Tensor:
        return self._batch_slice.count(batch, self.loss)

    def train(
        self, microbatches: Sequence[Batch], n_terms: float, accumulator: GradientAccumulator, on_phase_end: OnPhaseEnd
    ) -> Tensor:
        nll = zero_loss(microbatches[0])
        for n_left, batch in zip(reversed(range(len(microbatches))), microbatches, strict=True):
            accumulator.begin_microbatch(is_last=n_left == 0)
            if self.sync:
                self.sync.begin_microbatch(is_last=n_left == 0)
            nll_micro = self._nll(batch)
            on_phase_end("forward")
            # FSDP averages over ranks; scaling by ranks / global count turns that average into the global mean.
            (nll_micro * (self.grad_divisor / n_terms)).backward()
            nll = nll + nll_micro.detach().double()
            accumulator.accumulate()
            on_phase_end("backward")
        return self._batch_slice.contribution(nll)

    def evaluate(self, batch: Batch) -> Tensor:
        nll = self._nll(batch)
        pop_prefetch_order(self.model)
        return self._batch_slice.contribution(nll.detach().double())

    @property
    def _batch_slice(self) -> BatchSlice:
        return self.batch_slice or BatchSlice(Axes(self.grad_divisor), 0, self.model.config._attn_implementation)

    def _nll(self, batch: Batch) -> Tensor:
        local_batch, inputs = self._batch_slice.inputs(batch)
        return self.loss.loss(
            ModelOutput(self.model, lambda: self.model(**inputs, use_cache=False).logits), local_batch
        )


def zero_loss(batch: Batch) -> Tensor:
    """Return a zero to which losses are added."""
    return torch.zeros((), dtype=torch.float64, device=batch.targets_BS.device)


@dataclasses.dataclass(frozen=True, slots=True)
class StageLink:
    """Connection to the rank with the next or the previous stage."""

    peer: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """A rank's neighbors in its pipeline."""

    before: StageLink
    after: StageLink


def make_links(axes: Axes, rank: int, *, is_ring: bool) -> Links:
    """Make the process groups of all pipelines, on all ranks; return this rank's links. ``is_ring``: last and first rank are linked."""
    groups = make_group_along(axes, "pp"), make_group_along(axes, "pp")
    ring_groups = (make_group_along(axes, "pp"), make_group_along(axes, "pp")) if is_ring else groups
    ranks.share_timeout()
    stride, place = axes.world_size // axes.pp, axes.coordinate(rank, ("pp",)).rank
    before, after = (rank - stride) % axes.world_size, (rank + stride) % axes.world_size
    return Links(
        StageLink(before, *(groups if place else ring_groups)),
        StageLink(after, *(groups if place < axes.pp - 1 else ring_groups)),
    )


class Pipeline:
    """Runs this rank's pipeline stages; see ``ForwardBackward``."""

    def __init__(
        self,
        model: PipelineStages,
        axes: Axes,
        rank: int,
        schedule: str,
        grad_divisor: int,
        sync: GradientSync,
        batch_slice: BatchSlice,
        loss: Loss,
    ) -> None:
        """``grad_divisor``: number of ranks over which FSDP averages gradients."""
        self.model: nn.Module = model
        self.stage, self.batch_slice, self.axes, self.loss = model, batch_slice, axes, loss
        self.schedule, self.grad_divisor, self.sync = schedule, grad_divisor, sync
        self.pp_rank = axes.coordinate(rank, ("pp",)).rank
        self.links = make_links(axes, rank, is_ring=len(model.chunks) > 1)
        self.pending_sends: list[tuple[dist.Work | None, Tensor]] = []

    def count(self, batch: Batch) -> Tensor:
        return self.batch_slice.count(batch, self.loss)

    def train(
        self, microbatches: Sequence[Batch], n_terms: float, accumulator: GradientAccumulator, on_phase_end: OnPhaseEnd
    ) -> Tensor:
        """See ``ForwardBackward``. Forwards and backwards alternate, so all of it is timed as backward."""
        n_chunks = len(self.stage.chunks)
        order = pipeline_order(self.schedule, self.axes.pp, n_chunks, self.pp_rank, len(microbatches))
        last_micro = order[-1].microbatch
        nll = zero_loss(microbatches[0])
        activations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        prefetch_orders: dict[tuple[int, int], list[Any]] = {}
        accumulator.begin_microbatch(is_last=True)
        for op in order:
            key = op.virtual_stage, op.microbatch
            if not op.is_backward:
                activations[key] = self._forward(op, microbatches[op.microbatch])
                prefetch_orders[key] = pop_prefetch_order(self.stage)
                continue
            self.sync.begin_microbatch(is_last=op.microbatch == last_micro)
            set_last_backward(self.stage, op == order[-1])
            restore_prefetch_order(self.stage, prefetch_orders.pop(key))
            nll = nll + self._backward(op, *activations.pop(key), n_terms)
            pop_prefetch_order(self.stage)
        self._finish_sending()
        accumulator.accumulate()
        on_phase_end("backward")
        return self.batch_slice.contribution(nll)

    def evaluate(self, batch: Batch) -> Tensor:
        for chunk in range(len(self.stage.chunks)):
            _, output = self._forward(MicrobatchPass(False, chunk, 0), batch)
        self._finish_sending()
        pop_prefetch_order(self.stage)
        nll = output.detach().double() if self._is_last(chunk) else zero_loss(batch)
        return self.batch_slice.contribution(nll)

    def _forward(self, op: MicrobatchPass, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a chunk's input and output; the output of the last stage is the loss."""
        local_batch, arguments = self.batch_slice.inputs(batch)
        x = arguments.pop("input_ids")
        if not self._is_first(op.virtual_stage):
            x = self._receive(self.links.before.peer, self.links.before.forward, self._empty_hidden(local_batch))
            x.requires_grad_(torch.is_grad_enabled())

        def run_stage() -> Tensor:
            return self.stage(x, op.virtual_stage, **arguments)

        if self._is_last(op.virtual_stage):
            return x, self.loss.loss(ModelOutput(self.stage, run_stage), local_batch)
        output = run_stage()
        self._send(output.detach(), self.links.after.peer, self.links.after.forward)
        return x, output

    def _backward(self, op: MicrobatchPass, x: Tensor, output: Tensor, n_terms: float) -> float | Tensor:
        """Run a chunk's backward and send the gradient of its input; return the loss if this is the last stage, else 0."""
        if self._is_last(op.virtual_stage):
            (output * (self.grad_divisor / n_terms)).backward()
        else:
            empty = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            gradient = self._receive(self.links.after.peer, self.links.after.backward, empty)
            if output.requires_grad:  # False if all parameters of the first stage are frozen
                torch.autograd.backward(output, gradient)
        if not self._is_first(op.virtual_stage):
            assert x.grad is not None
            self._send(x.grad, self.links.before.peer, self.links.before.backward)
        return output.detach().double() if self._is_last(op.virtual_stage) else 0.0

    def _empty_hidden(self, local_batch: Batch) -> Tensor:
        """Return uninitialized memory for the hidden states of a micro-batch."""
        n_sequences, length = local_batch.ids_BS.shape
        shape = n_sequences, length // self.axes.tp, self.stage.config.hidden_size
        return torch.empty(shape, dtype=self.stage.compute_dtype, device=local_batch.ids_BS.device)

    def _receive(self, peer: int, group: dist.ProcessGroup, out: Tensor) -> Tensor:
        dist.recv(out, peer, group)
        return out

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        # Keep the tensor together with its work: gloo does not keep the memory of an unfinished send alive.
        contiguous = tensor.contiguous()
        self.pending_sends = [(work, sent) for work, sent in self.pending_sends if work and not work.is_completed()]
        self.pending_sends.append((dist.isend(contiguous, peer, group), contiguous))

    def _finish_sending(self) -> None:
        for work, _ in self.pending_sends:
            if work:
                work.wait()
        self.pending_sends = []

    def _is_first(self, chunk: int) -> bool:
        return chunk == 0 and self.pp_rank == 0

    def _is_last(self, chunk: int) -> bool:
        return chunk == len(self.stage.chunks) - 1 and self.pp_rank == self.axes.pp - 1


def check_user_loss(config: Config, axes: Axes) -> None:
    """Check that ranks have what the loss of the user's module needs; before anything is read.

    Raises:
        UserError: They have not.
    """
    extension = extend.current()
    if extension.has_loss and (config.model.loss == "chunked" or axes.tp > 1):
        name = "Loss" if extension.has_document_loss else "loss()"
        raise UserError(
            f"--extend: {name} needs all logits, but no rank has them with model.loss chunked or tp; remove one of the two"
        )
    if extension.has_document_loss and axes.cp > 1:
        raise UserError(
            "--extend: Loss needs whole sequences, which no rank has with cp; use cp 1, or a loss() of tokens"
        )
    if extension.has_document_loss and config.data.packing == "concatenated":
        raise UserError(
            "--extend: Loss sees documents, which data.packing concatenated joins into one text; use isolated"
        )
    if extension.has_document_loss and config.data.documents == "split":
        raise UserError("--extend: Loss sees documents, which data.documents split cuts anywhere; use auto or whole")


def build_forward_backward(
    parallel: Parallel, model: nn.Module, rank: Rank, settings: Model, *, isolated: bool = False
) -> ForwardBackward:
    """Build the forward and backward of a model that is split over the ranks.

    ``settings``: how it computes; ``isolated``: documents that share a sequence are kept apart.
    """
    user_loss = UserLoss(extend.current()) if extend.current().has_loss else None
    grad_divisor, loss = rank.dp.size * rank.axes.cp, build_loss(settings.loss, model.lm_head, user_loss)
    if parallel.is_fsdp1:
        return MicrobatchLoop(model, grad_divisor, loss=loss)
    attention = base_attention_name(model.config._attn_implementation)
    batch_slice = BatchSlice(rank.axes, rank.index, attention, settings.compile, isolated)
    sync = GradientSync(model, parallel.strategy_spec, rank.axes.dp_replicate)
    if isinstance(model, PipelineStages):
        return Pipeline(model, rank.axes, rank.index, parallel.pp_schedule, grad_divisor, sync, batch_slice, loss)
    return MicrobatchLoop(model, grad_divisor, sync, batch_slice, loss)
