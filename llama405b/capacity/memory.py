"""What a GPU's memory holds at the worst moment of a step with FSDP2 and activation checkpointing. Pure.

A step is walked through, unit by unit, as FSDP2 and autograd allocate and free; what a unit holds was read, allocation by allocation,
from torch's FSDPMemTracker on the trainer's own modules (tests/unit/capacity/test_tracked.py compares the two). Attention is a kernel
that needs no mask. Neither CUDA's and NCCL's own memory nor what fragments is in it.

T: tokens of a micro-batch; h: hidden size; f: intermediate size; V: vocabulary.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from llama405b.contract.weights import EMBEDDING, HEAD, Llama

NORMS = "norms in FP32"  # their masters, and what their moments take more
LOSS_BYTES = 4  # of a logit in FP32: its copy, its log-softmax and each of two gradients


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What decides about the memory of a GPU."""

    llama: Llama
    world: int
    tokens: int  # of a micro-batch
    compute: int  # bytes of an activation, and of a weight that was gathered
    reduce: int  # bytes of a gradient, as it is reduced
    kept: Mapping[str, float]  # bytes per parameter of the shards that stay: parameters, gradients, moments
    halves: bool  # attention and MLP are units of their own, instead of the decoder layer
    embedding_apart: bool = True  # the embedding is a unit
    norms: float = 0.0  # more bytes per parameter of a norm
    sums: bool = False  # gradients of earlier micro-batches are there from the start


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The worst moment."""

    moment: str
    held: Mapping[str, float]  # bytes, by what they are

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.held.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Parameters by what FSDP gathers in one piece; numbers of elements."""

    attention: int
    mlp: int
    norms: int  # of a layer
    embedding: int
    head: int  # with the last norm; 0: the embedding is the head

    @classmethod
    def of(cls, llama: Llama) -> "Pieces":
        """Count a Llama's."""
        sizes = {name: math.prod(shape) for name, shape in llama.tensors().items()}
        layer = {name: size for name, size in sizes.items() if name.startswith("model.layers.0.")}
        norm = sizes["model.norm.weight"]
        return cls(
            attention=sum(size for name, size in layer.items() if ".self_attn." in name),
            mlp=sum(size for name, size in layer.items() if ".mlp." in name),
            norms=sum(size for name, size in layer.items() if "norm" in name),
            embedding=sizes[EMBEDDING] + llama.tied * norm,
            head=0 if llama.tied else sizes[HEAD] + norm,
        )

    @property
    def layer(self) -> int:
        """Of a decoder layer."""
        return self.attention + self.mlp + self.norms


def norm_elements(llama: Llama, world: int) -> int:
    """Return how many elements a rank keeps of all norms."""
    return (2 * llama.layers + 1) * math.ceil(llama.hidden / world)


def shard_elements(llama: Llama, world: int) -> int:
    """Return how many elements a rank keeps of all parameters: FSDP2 shards the first dimension, and pads it."""

    def of(names: Iterable[str]) -> int:
        return sum(math.ceil(shapes[name][0] / world) * math.prod(shapes[name][1:]) for name in names)

    shapes = dataclasses.replace(llama, layers=1).tensors()
    layer = [name for name in shapes if name.startswith("model.layers.")]
    return of(shapes.keys() - set(layer)) + llama.layers * of(layer)


def peak(job: Job) -> Peak:
    """Return the worst moment of a step."""
    return _Step(job).walk()


class _Step:
    """A step, as far as it was walked, and its worst moment so far."""

    def __init__(self, job: Job) -> None:
        self.job, self.pieces = job, Pieces.of(job.llama)
        shards = shard_elements(job.llama, job.world)
        self.held: dict[str, float] = collections.defaultdict(float)
        self.held |= {name: shards * size for name, size in job.kept.items() if name != "gradients"}
        self.held[NORMS] = job.norms * norm_elements(job.llama, job.world)
        self.gradient_bytes = job.kept["gradients"]
        if job.sums:
            self.held["gradients"] += shards * self.gradient_bytes
        self.saved, self.moments = _saved(job), _moments(job)
        self.several = job.world > 1  # one rank gathers nothing
        self.worst = Peak("", {})
        self.waiting = 0.0  # of the forward: the buffer of the last all-gather

    def walk(self) -> Peak:
        """Walk through it; layers between the second and the second but last change nothing that these do not show."""
        job = self.job
        pieces = self.pieces
        layers = self.job.llama.layers
        hidden = job.compute * job.tokens * job.llama.hidden
        root = pieces.embedding if job.llama.tied or not job.embedding_apart else 0
        if root:
            self._gather("the embedding's forward", root)
        else:
            self._gather("the embedding's forward", pieces.embedding)
            self.held["gathered units"] = 0
        for layer in _ends(range(layers)):
            self.held["layer inputs"] = (layer + 1) * hidden
            for unit in (pieces.attention, pieces.mlp) if job.halves else (pieces.layer,):
                self._gather("a layer's forward", unit)
                self.held["gathered units"] -= job.compute * unit
        last = pieces.mlp if job.halves else pieces.layer
        self._head(hidden, last)
        for layer in _ends(range(layers)[::-1]):
            self.held["layer inputs"] = (layer + 1) * hidden
            self.held["gradients"] = self._reduced(layers - 1 - layer)
            self._layer(layer, hidden)
        self.held["layer inputs"] = 0
        self.held["gradients"] = self._reduced(layers)
        weight = job.compute * pieces.embedding
        self._see("the embedding's backward", weight_gradients=weight * (1 + job.llama.tied))
        self.held["weight gradients"] = self.held["activations"] = 0
        self.held["gathered units"] += 0 if root else weight  # it is not gathered in the backward
        self._reduce("the embedding's gradient", pieces.embedding, pieces.embedding)
        return self.worst

    def _head(self, hidden: float, last: int) -> None:
        """The head and the loss; the units of the last layer are gathered meanwhile."""
        job, pieces = self.job, self.pieces
        logits, loss = (size * job.tokens * job.llama.vocab for size in (job.compute, LOSS_BYTES))
        if pieces.head:
            self._gather("the head's forward", pieces.head)
        self.held["activations"] = hidden * (4 if job.compute == 2 else 3)
        self._see("the head's forward", logits=logits)
        self.held["all-gather buffers"] = self.waiting = 0
        self._see("the loss", logits=3 * loss)
        self.held["all-gather buffers"] = job.compute * last * self.several
        weight = job.compute * (pieces.head or pieces.embedding)
        self._see("the head's backward", logits=logits, activations=hidden, weight_gradients=weight)
        self.held["activations"] = hidden  # the gradient that flows
        if pieces.head:
            self._reduce("the head's gradient", pieces.head, pieces.head)
        else:
            self.held["weight gradients"] += weight

    def _layer(self, layer: int, hidden: float) -> None:
        """A layer's backward. With halves, attention is gathered during the MLP's, whose unit is reduced before attention's."""
        job = self.job
        pieces = self.pieces
        following = self.job.compute * bool(layer)
        if not job.halves:
            self._regather(pieces.layer, following * pieces.layer)
            for part, weights, more in self.moments:
                self._see(f"the backward of a layer's {part}", weight_gradients=weights, activations=more)
            self._reduce("a layer's gradient", pieces.layer, 0)
            return
        self._regather(pieces.mlp, job.compute * pieces.attention)
        self._regather(pieces.attention, 0)
        for part, weights, more in self.moments:
            if part == "norm":
                self.held["activations"] = hidden + self.saved
                self._reduce("an MLP's gradient", pieces.mlp, job.llama.hidden * job.llama.intermediate)
                self.held["activations"] = hidden
            elif part == "attention":
                self.held["all-gather buffers"] = following * pieces.mlp * self.several
            there = 0 if part == "MLP" else job.compute * 3 * job.llama.hidden * job.llama.intermediate
            self._see(f"the backward of a layer's {part}", weight_gradients=weights - there, activations=more)
        self._reduce(
            "an attention's gradient", pieces.attention, job.llama.hidden * job.llama.heads * job.llama.head_dim
        )

    def _gather(self, moment: str, unit: int) -> None:
        """A unit's all-gather in the forward: the buffer of the one before goes when this one was copied out."""
        size = self.job.compute * unit
        self.held["gathered units"] += size
        self.held["all-gather buffers"] = self.waiting + size * self.several
        self._see(moment)
        self.held["all-gather buffers"] = self.waiting = size * self.several

    def _regather(self, unit: int, following: float) -> None:
        """The same in the backward, where it was prefetched; then the following unit's begins, of so many bytes."""
        self.held["gathered units"] += self.job.compute * unit
        self._see("an all-gather of the backward")
        self.held["all-gather buffers"] = following * self.several

    def _reduce(self, moment: str, unit: int, last: int) -> None:
        """A unit's reduce-scatter, after its weights were freed; only the gradient of ``last`` elements outlives the copy.

        Its buffer stays until the next one.
        """
        job = self.job
        self.held["gathered units"] -= job.compute * unit
        self.held["reduce-scatter buffers"] = job.reduce * unit
        self._see(moment, weight_gradients=job.compute * unit)
        self._see(moment, weight_gradients=job.compute * last, gradients=job.reduce * unit / job.world)

    def _reduced(self, layers: int) -> float:
        """Bytes of the shards of gradients, once so many layers have theirs."""
        job, pieces = self.job, self.pieces
        if job.sums:
            return self.held["gradients"]
        return self.gradient_bytes * (pieces.head + layers * pieces.layer) / job.world

    def _see(self, moment: str, **more: float) -> None:
        """Remember this moment, with what is there only now, if it is the worst."""
        total = sum(self.held.values()) + sum(more.values())
        if total > self.worst.total:
            now = {name.replace("_", " "): size for name, size in more.items()}
            held = {name: self.held.get(name, 0.0) + now.get(name, 0.0) for name in {**self.held, **now}}
            self.worst = Peak(moment, {name: size for name, size in held.items() if size})


def _saved(job: Job) -> float:
    """Bytes that a layer's recomputation leaves for its backward, beside the MLP's: it ends before the last product (early stop)."""
    llama, size = job.llama, job.compute * job.tokens
    norms = (
        8 if job.compute == 2 else 5
    )  # each keeps its input, in FP32, what it makes of it, and that times its weight
    return size * (norms * llama.hidden + 2 * (llama.heads + llama.kv_heads) * llama.head_dim)


def _moments(job: Job) -> list[tuple[str, float, float]]:
    """A layer's backward, product by product: bytes of its weights' gradients so far, and of what else it holds."""
    llama = job.llama
    size = job.compute * job.tokens
    saved = _saved(job)
    u = size * llama.hidden
    g = size * llama.intermediate
    q = size * llama.heads * llama.head_dim
    k = size * llama.kv_heads * llama.head_dim
    weight, out = (job.compute * llama.hidden * n for n in (llama.intermediate, llama.heads * llama.head_dim))
    wide = job.compute == 2
    rest = saved - (4 if wide else 3) * u
    return [
        ("MLP", weight, saved + 6 * g),
        ("MLP", 2 * weight, saved + u + 3 * g),
        ("MLP", 3 * weight, saved + 2 * u + g),
        ("norm", 3 * weight, saved + (8 if wide else 2) * u),
        ("attention", 3 * weight + out, rest + u + q + 2 * k),
        ("attention", job.compute * Pieces.of(llama).layer, (12 if wide else 5) * u),
    ]


def _ends(layers: Sequence[int]) -> list[int]:
    return sorted({*layers[:2], *layers[-2:]}, key=layers.index)
