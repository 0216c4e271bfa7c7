"""Predict what a GPU's memory holds at the worst moment of a step with FSDP2. Pure.

A step is walked through unit by unit, as FSDP2, autograd and activation checkpointing allocate and free. What a unit holds was read,
allocation by allocation, from torch's FSDPMemTracker on the trainer's own modules (tests/ranks/test_tracked.py compares the two).
Attention is taken to be a kernel that needs no mask. The memory of CUDA and NCCL, and fragmentation, are not included.

With ``tp`` a rank has part of each sequence between matrices, and gathers all of it before each. In a pipeline other micro-batches wait
for their backward meanwhile; the worst moment is that of the rank and stage that hold most.

T: tokens of a micro-batch; h: hidden size; f: intermediate size; V: vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping

from llama405b.predict.run_shape import (
    NORMS,
    Part,
    RunShape,
    UnitSizes,
    adapter_shapes,
    norm_elements,
    trained_elements,
)
from llama405b.settings.axes import Kind
from llama405b.settings.schema import LOSS_PART
from llama405b.spec.rules import InFlight

BUFFERS = 2  # on the device, for layers' inputs that come back from CPU memory (model.host_inputs)
OF_ATTENTION, OF_MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # what reads the norm before each
LOSS_BYTES = 4  # of a logit in FP32: its copy, its log-softmax and each of two gradients


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a step at which a GPU holds most."""

    moment: str
    held: Mapping[str, float]  # bytes, by what they are

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.held.values())


def peak(run: RunShape) -> Peak:
    """Return the worst moment of a step over all ranks."""
    return max((peak_of(run, stage) for stage in range(run.pp)), key=lambda each: each.total)


def peak_of(run: RunShape, stage: int) -> Peak:
    """Return the worst moment of a step of the ranks at this place along ``pp``."""
    steps = [_Step(run, stage, waiting) for waiting in run.in_flight(stage)]
    return max((step.walk() for step in steps), key=lambda each: each.total)


class _Step:
    """A walk of one micro-batch through one stage of a rank's model, with the worst moment so far."""

    def __init__(self, run: RunShape, stage: int, in_flight: InFlight) -> None:
        """``in_flight``: what else the rank has begun."""
        kept = run.parts(stage)
        part = kept[in_flight.chunk]
        self.run, self.part, self.llama = run, part, part.llama
        self.sizes, self.trained = UnitSizes.of(part, run.adapter), UnitSizes.trained(part, run.adapter)
        self.in_flight = in_flight
        of_chunks = [trained_elements(each, run.shards, run.adapter) for each in kept]
        trained = sum(of_chunks)
        self.held: dict[str, float] = collections.defaultdict(float)
        self.held |= {name: trained * size for name, size in run.shard_bytes.items() if name != "gradients"}
        self.held["parameters"] += run.frozen_bytes * run.elements(stage)
        self.held[NORMS] = run.norm_bytes * sum(norm_elements(each, run.shards) for each in kept)
        self.flow = run.flow_bytes
        waiting = zip(in_flight.others, kept, strict=True)
        self.held["micro-batches in flight"] = sum(count * _waiting(run, each) for count, each in waiting)
        self.gradient_bytes = run.shard_bytes["gradients"]
        later = in_flight.done[in_flight.chunk]  # gradients of earlier micro-batches are there
        self.sums_shards = later and run.reduces_each
        self.sums_whole = later and not run.reduces_each
        if run.reduces_each:
            there = sum(size for size, done in zip(of_chunks, in_flight.done, strict=True) if done)
            self.held["gradients"] += there * self.gradient_bytes
        if self.sums_whole:
            self.held["whole gradients"] = sum(
                self._whole(UnitSizes.trained(each, run.adapter), each.llama.layers) for each in kept
            )
        self.keeps = run.keeps_weights
        self.saved, self.moments = _saved(run, part), _moments(run, part)
        self.kinds = run.recompute.of(part.llama.layers)
        self.inputs = [0, *itertools.accumulate(_keeps_input(run, kind) for kind in self.kinds)]
        of_kind = {kind: _kept(run, part, kind) for kind in {*self.kinds}}
        self.kept = [0.0, *itertools.accumulate(map(of_kind.__getitem__, self.kinds))]  # by so many layers
        self.several = run.shards > 1  # one rank gathers nothing
        self.units = (self.sizes.attention, self.sizes.mlp) if run.halves else (self.sizes.layer,)
        self.order = [
            *self.units * part.llama.layers,
            self.sizes.head,
        ]  # as a forward gathers them, after the embedding
        if run.pp > 1 and any(in_flight.done):  # only after a step's last backward does FSDP free the last buffer
            last = self.sizes.embedding or (self.sizes.attention if run.halves else self.sizes.layer)
            self.held["reduce-scatter buffers"] = run.gradient_bytes * last
        self.worst = Peak("", {})
        self.waiting = 0.0  # of the forward: the buffer of the last all-gather

    def walk(self) -> Peak:
        """Walk through the step and return its worst moment.

        Of identical layers only the first two and the last two are walked: the others show nothing more.
        """
        run, part, sizes, hidden = self.run, self.part, self.sizes, self.flow
        layers, telling = self.llama.layers, _telling(self.kinds)
        root = sizes.embedding if part.llama.tied or not run.embedding_apart else 0
        if root:
            self._gather("the embedding's forward", root, 0)
        elif part.embedding:
            self._gather("the embedding's forward", sizes.embedding, 0)
            self.held["gathered units"] *= self.keeps
        before = self.held["gathered units"]
        for layer in telling:
            self._keep(layer, 1)
            self._keep_gathered(layer)
            self.held["gathered units"] = before + self.keeps * run.compute_bytes * layer * sizes.layer
            for place, unit in enumerate(self.units, 1 + layer * len(self.units)):
                self._gather("a layer's forward", unit, place)
                self.held["gathered units"] -= run.compute_bytes * unit * (not self.keeps)
        if not self.in_flight.forward:
            self.worst = Peak("", {})
        self._keep_gathered(layers)
        self._keep(layers, more=run.activations == "host")  # the last one's, until a layer's backward begins
        last = sizes.mlp if run.halves else sizes.layer
        if part.head:
            self._head(hidden, last)
        else:
            self.held["all-gather buffers"] = self.waiting = 0
            self.held["stage's output"] = 2 * hidden  # and its gradient
            self.held["activations"] = hidden  # the gradient that flows
        for layer in reversed(telling):
            self._keep(layer + 1)
            if self.keeps and not run.accumulates:  # else all stay until the last micro-batch
                self.held["gathered units"] = before + run.compute_bytes * (layer + 1) * sizes.layer
            if self.sums_whole:  # as in the last micro-batch, whose units are reduced one after the other
                self.held["whole gradients"] = self._whole(self.trained, layer + 1, head=False)
            self.held["gradients"] = self._reduced(layers - 1 - layer)
            self._layer(layer, hidden)
        self._keep(0)
        self.held["whole gradients"] = self.sums_whole * self._whole(self.trained, 0, head=False)
        self.held["gradients"] = self._reduced(layers)
        if part.embedding and self.trained.embedding:
            self._embedding_backward(root)
        return self.worst

    def _embedding_backward(self, root: int) -> None:
        run, sizes = self.run, self.sizes
        weight = run.compute_bytes * sizes.embedding
        self._see("the embedding's backward", weight_gradients=weight * (1 + self.llama.tied))
        self.held["weight gradients"] = self.held["activations"] = 0
        if run.tp > 1:  # DTensor makes the gradient of the whole vocabulary, before it keeps a part
            self.held["whole embedding's gradient"] = (run.tp + self.llama.tied) * weight
        self.held["gathered units"] += 0 if root or self.keeps else weight  # it is not gathered in the backward
        self._reduce("the embedding's gradient", sizes.embedding, sizes.embedding, sizes.embedding)

    def _head(self, hidden: float, last: int) -> None:
        """Walk through the head and the loss, while the units of the last layer are gathered."""
        run, sizes = self.run, self.sizes
        logits, loss = (size * run.tokens * self.llama.vocab for size in (run.compute_bytes, LOSS_BYTES))
        weight = run.compute_bytes * (self.trained.head or self.trained.embedding)
        if sizes.head:
            self._gather("the head's forward", sizes.head, len(self.order))
        self.held["activations"] = hidden * (4 if run.compute_bytes == 2 else 3) - hidden * run.adapter.trains
        if run.loss == "parts":
            logits = _logits_of_a_part(run, self.llama.vocab)
            of_hidden = LOSS_BYTES * run.tokens * self.llama.hidden  # the sum over parts
            whole = run.compute_bytes * run.tokens * self.llama.hidden * (run.tp > 1)
            self._see("the head's forward", logits=logits, activations=whole)
            self.waiting = 0
            self.held["all-gather buffers"] = self._coming(len(self.order), last)
            self._see("the head's backward", logits=logits, activations=whole + of_hidden, weight_gradients=weight)
        else:
            self._see("the head's forward", logits=logits)
            self.held["all-gather buffers"] = self.waiting = 0
            self._see("the loss", logits=(3 if run.tp == 1 else 4) * loss)  # torch's loss_parallel makes one more
            self.held["all-gather buffers"] = self._coming(len(self.order), last)
            self._see("the head's backward", logits=logits, activations=hidden, weight_gradients=weight)
        self.held["activations"] = hidden  # the gradient that flows
        if sizes.head:
            self._reduce("the head's gradient", sizes.head, self.trained.head, self.trained.head)
        else:
            self.held["weight gradients"] += weight

    def _layer(self, layer: int, hidden: float) -> None:
        """Walk through a layer's backward.

        With half-layer units, attention is gathered during the MLP's backward, and the MLP is reduced first.
        """
        run = self.run
        sizes = self.sizes
        self._keep_gathered(layer + 1)
        if not run.halves:
            self._regather(sizes.layer, self._coming(1 + layer, bool(layer) * sizes.layer))
            self._keep_gathered(layer)
            self.held["kept activations"] = self.kept[layer]
            for part, weights, more in self.moments:
                self._see(f"the backward of a layer's {part}", weight_gradients=weights, activations=more)
            self._reduce("a layer's gradient", sizes.layer, self.trained.layer, 0)
            return
        whole = not run.adapter.trains
        self._regather(sizes.mlp, self.run.compute_bytes * sizes.attention * self.several)
        self._regather(sizes.attention, 0)
        self._keep_gathered(layer)
        self.held["kept activations"] = self.kept[layer]
        for part, weights, more in self.moments:
            if part == "norm":
                self.held["activations"] = hidden + self.saved
                last = self.llama.hidden * self.llama.intermediate
                self._reduce("an MLP's gradient", sizes.mlp, self.trained.mlp, last * whole)
                self.held["activations"] = hidden
            elif part == "attention":
                self.held["all-gather buffers"] = self._coming(2 * layer, bool(layer) * sizes.mlp)
            of_mlp = run.compute_bytes * 3 * self.llama.hidden * self.llama.intermediate
            there = 0 if part == "MLP" else of_mlp * whole
            self._see(f"the backward of a layer's {part}", weight_gradients=weights - there, activations=more)
        last = self.llama.hidden * self.llama.heads * self.llama.head_dim
        self._reduce("an attention's gradient", sizes.attention, self.trained.attention, last * whole)

    def _keep(self, layers: int, more: int = 0) -> None:
        """Set what so many layers keep; ``more``: hidden states on their way."""
        n_inputs = self.inputs[layers] + more + BUFFERS * (self.run.activations == "host")
        self.held |= {"layer inputs": n_inputs * self.flow, "kept activations": self.kept[layers]}

    def _keep_gathered(self, layers: int) -> None:
        """Set the bytes that this rank keeps gathered of so many layers (``reshard_after_forward``)."""
        if self.run.kept_by:
            self.held["weights kept gathered"] = self.run.compute_bytes * layers * self.sizes.layer / self.run.kept_by

    def _gather(self, moment: str, unit: int, place: int) -> None:
        """Gather a unit in the forward: the previous unit's buffer is freed once this one was copied out.

        ``place``: of the unit in the forward, after the embedding's.
        """
        size = self.run.compute_bytes * unit
        self.held["gathered units"] += size
        ahead = self.run.compute_bytes * sum(self.order[place : place + self.run.prefetch])
        self.held["all-gather buffers"] = (size + (ahead if self.run.prefetch else self.waiting)) * self.several
        self._see(moment)
        self.waiting = size * self.several
        self.held["all-gather buffers"] = self.waiting + ahead * self.several

    def _coming(self, place: int, usual: int) -> float:
        """Bytes of the buffers of units that are gathered while the one of a place goes backward; ``usual``: elements without prefetch."""
        ahead = sum(self.order[max(0, place - 1 - self.run.prefetch) : place - 1])
        elements = ahead if self.run.prefetch else usual
        return self.run.compute_bytes * elements * self.several * (not self.keeps)

    def _regather(self, unit: int, coming: float) -> None:
        """Gather a prefetched unit in the backward; then the next prefetched buffers take so many bytes."""
        if self.keeps:
            return
        self.held["gathered units"] += self.run.compute_bytes * unit
        self._see("an all-gather of the backward")
        self.held["all-gather buffers"] = coming

    def _reduce(self, moment: str, unit: int, trained: int, last: int) -> None:
        """A unit's reduce-scatter, after its weights were freed; only the gradient of ``last`` elements outlives the copy.

        Its buffer stays until the next one. ``trained``: elements of the unit that have gradients.
        """
        run = self.run
        self.held["gathered units"] -= run.compute_bytes * unit * (not (self.keeps and run.accumulates))
        if self.sums_whole:
            self.held["whole gradients"] = max(0.0, self.held["whole gradients"] - run.gradient_bytes * trained)
        self.held["reduce-scatter buffers"] = run.gradient_bytes * trained
        self._see(moment, weight_gradients=run.compute_bytes * trained)
        # FSDP casts the sum to the weights' dtype, which the trainer drops.
        cast = run.compute_bytes * (run.offload == "optimizer")
        reduced = (run.gradient_bytes + cast) * trained / run.shards
        self._see(moment, weight_gradients=run.compute_bytes * last, gradients=reduced)

    def _whole(self, sizes: UnitSizes, layers: int, *, head: bool = True) -> float:
        """Bytes of gradients that are not reduced yet; with ``tp`` the embedding's is of the whole vocabulary."""
        return self.run.gradient_bytes * (self.run.tp * sizes.embedding + layers * sizes.layer + head * sizes.head)

    def _reduced(self, layers: int) -> float:
        """Bytes of the shards of gradients, once so many layers have theirs."""
        run, sizes = self.run, self.trained
        if self.sums_shards:
            return self.held["gradients"]
        return self.gradient_bytes * (sizes.head + layers * sizes.layer) / run.shards

    def _see(self, moment: str, **more: float) -> None:
        """Record this moment as the peak if it is the worst so far; keyword arguments are bytes held only now."""
        total = sum(self.held.values()) + sum(more.values())
        if total > self.worst.total:
            now = {name.replace("_", " "): size for name, size in more.items()}
            held = {name: self.held.get(name, 0.0) + now.get(name, 0.0) for name in {**self.held, **now}}
            self.worst = Peak(moment, {name: size for name, size in held.items() if size})


def _waiting(run: RunShape, part: Part) -> float:
    """Return the bytes of a micro-batch between its forward and its backward.

    These are the layers' inputs, and the output or what the loss keeps.
    """
    flow = run.flow_bytes
    kinds = run.recompute.counts((part.llama.layers,))
    inputs = flow + sum(
        count * (_kept(run, part, kind) + flow * _keeps_input(run, kind)) for kind, count in kinds.items()
    )
    logits = LOSS_BYTES * run.tokens * part.llama.vocab * (run.loss == "logits")
    return inputs + (logits + _norm_saved(run, part, ())) * part.head


def _keeps_input(run: RunShape, kind: Kind) -> bool:
    """Check whether a layer keeps its input on the device.

    Without checkpointing a norm keeps it in FP32, which is a copy unless the run is in FP32.
    """
    if kind == "none":
        return run.fused or run.compute_bytes == LOSS_BYTES
    return run.activations == "device"


def _kept(run: RunShape, part: Part, kind: Kind) -> float:
    """Return the bytes that a layer keeps for its backward, without its input."""
    llama, size = part.llama, run.compute_bytes * run.tokens
    queries, keys = (heads * llama.head_dim for heads in (llama.heads, llama.kv_heads))
    if kind == "full":
        return 0.0
    if kind == "none":
        exchanged = queries * (run.cp > 1)  # of attention, between heads and sequence
        product = not run.adapter.trains or "down_proj" in run.adapter.targets  # which no frozen matrix keeps
        wide = 2 if run.fused and not run.adapter.trains else 3 + product
        return _saved(run, part) + size * (wide * llama.intermediate + exchanged)
    sums = LOSS_BYTES * run.tokens * llama.heads  # of attention, in FP32
    added = sum(shape[0] for shape in adapter_shapes(part, run.adapter).values())  # what both factors make
    return size * (2 * queries + 2 * keys + llama.hidden + 2 * llama.intermediate + added) + sums


def _logits_of_a_part(run: RunShape, vocab: int) -> int:
    """Return the bytes of a vocabulary chunk's logits, or of their gradients, as computed and in FP32."""
    widened = LOSS_BYTES if run.compute_bytes < LOSS_BYTES else 0
    return (run.compute_bytes + widened) * run.tokens * min(vocab, LOSS_PART)


def _saved(run: RunShape, part: Part) -> float:
    """Return the bytes that a layer's recomputation leaves for its backward, without the MLP's.

    Recomputation ends before the last product (early stop).
    """
    llama, size = part.llama, run.compute_bytes * run.tokens
    projected = (llama.heads + llama.kv_heads) * llama.head_dim
    normed = (LOSS_BYTES * run.tokens + size) * projected if llama.family.query_norms else 0
    norms = _norm_saved(run, part, OF_ATTENTION) + _norm_saved(run, part, OF_MLP)
    narrow = size * run.adapter.rank * len(run.adapter.targets) * run.adapter.trains
    return norms + size * 2 * projected + normed + narrow


def _norm_saved(run: RunShape, part: Part, readers: tuple[str, ...]) -> float:
    """Bytes that a norm keeps, and what reads it: its input, in FP32, what it makes of it, and that times its weight, which ``tp`` gathers.

    One that is frozen or fused keeps its input alone, which for a layer's first is the layer's, if it is no copy. Frozen matrices
    (``readers``) keep what they read only where there are adapters beside.
    """
    whole = run.compute_bytes * run.tokens * part.llama.hidden
    own = (2 if _widens(run) else 0.5) + (not run.fused and not run.adapter.trains)
    read = not run.adapter.trains or not {*readers}.isdisjoint(run.adapter.targets)
    return whole * read + own * whole / run.tp


def _widens(run: RunShape) -> bool:
    """Check whether norms compute in FP32, on copies."""
    return run.compute_bytes == 2 and not run.fused


def _moments(run: RunShape, part: Part) -> list[tuple[str, float, float]]:
    """Return a layer's backward by product: bytes of weight gradients so far, and of everything else."""
    llama = part.llama
    size = run.compute_bytes * run.tokens
    saved = _saved(run, part)
    w = size * llama.hidden
    u = w / run.tp
    gathered = w * (run.tp > 1)
    g = size * llama.intermediate
    q = size * llama.heads * llama.head_dim
    k = size * llama.kv_heads * llama.head_dim
    weight, out = (run.compute_bytes * llama.hidden * n for n in (llama.intermediate, llama.heads * llama.head_dim))
    wide = _widens(run)
    rest = saved - (4 if wide else 3 - run.fused) * u
    if run.adapter.trains:
        rest = saved - _norm_saved(run, part, OF_MLP)
        weight = out = 0
    of_layer = UnitSizes.trained(part, run.adapter).layer
    return [
        ("MLP", weight, saved + gathered + 6 * g),
        ("MLP", 2 * weight, saved + w + 3 * g),
        ("MLP", 3 * weight, saved + 2 * w + g),
        ("norm", 3 * weight, saved + (8 if wide else 2) * u),
        ("attention", 3 * weight + out, rest + w + q + 2 * k),
        ("attention", run.compute_bytes * of_layer, (12 if wide else 5) * u),
    ]


@functools.lru_cache(256)
def _telling(kinds: tuple[Kind, ...]) -> list[int]:
    """Return the first two and the last two layers, and those next to a layer of another kind."""
    layers = range(len(kinds))
    changes = [layer for layer in layers[1:] if kinds[layer] != kinds[layer - 1]]
    return sorted({*layers[:2], *layers[-2:], *changes, *(layer - 1 for layer in changes)})
