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
    FP32_NORMS,
    PredictedRun,
    StageSpec,
    UnitSizes,
    layer_adapter_shapes,
    norm_elements,
    trained_elements,
)
from llama405b.settings.axes import RecomputeKind
from llama405b.settings.schema import VOCAB_CHUNK
from llama405b.spec.rules import InFlight

INPUT_BUFFERS = 2  # on the device, for layers' inputs that come back from CPU memory (model.host_inputs)
ATTENTION_INPUTS, MLP_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)  # what reads the norm before each
LOSS_BYTES = 4  # of a logit in FP32: its copy, its log-softmax and each of two gradients


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a step at which a GPU holds most."""

    moment: str
    bytes_by_kind: Mapping[str, float]  # bytes, by what they are

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.bytes_by_kind.values())


def find_peak(run: PredictedRun) -> Peak:
    """Return the worst moment of a step over all ranks."""
    return max((find_stage_peak(run, stage) for stage in range(run.pp)), key=lambda candidate: candidate.total)


def find_stage_peak(run: PredictedRun, stage: int) -> Peak:
    """Return the worst moment of a step of the ranks at this place along ``pp``."""
    walks = [_MemoryWalk(run, stage, in_flight) for in_flight in run.in_flight(stage)]
    return max((memory_walk.walk() for memory_walk in walks), key=lambda candidate: candidate.total)


class _MemoryWalk:
    """A walk of one micro-batch through one stage of a rank's model, with the worst moment so far."""

    def __init__(self, run: PredictedRun, stage: int, in_flight: InFlight) -> None:
        """``in_flight``: what else the rank has begun."""
        specs = run.stage_specs(stage)
        spec = specs[in_flight.virtual_stage]
        self.run, self.spec, self.llama = run, spec, spec.llama
        self.sizes, self.trained_sizes = (
            UnitSizes.from_spec(spec, run.adapter),
            UnitSizes.from_trained(spec, run.adapter),
        )
        self.in_flight = in_flight
        elements_by_chunk = [trained_elements(chunk_spec, run.shards, run.adapter) for chunk_spec in specs]
        n_trained = sum(elements_by_chunk)
        self.live_bytes: dict[str, float] = collections.defaultdict(float)
        self.live_bytes |= {name: n_trained * size for name, size in run.shard_bytes.items() if name != "gradients"}
        self.live_bytes["parameters"] += run.frozen_bytes * run.stage_elements(stage)
        self.live_bytes[FP32_NORMS] = run.norm_bytes * sum(
            norm_elements(chunk_spec, run.shards) for chunk_spec in specs
        )
        self.hidden_bytes = run.hidden_bytes
        waiting_by_chunk = zip(in_flight.waiting, specs, strict=True)
        self.live_bytes["micro-batches in flight"] = sum(
            count * _in_flight_bytes(run, chunk_spec) for count, chunk_spec in waiting_by_chunk
        )
        self.gradient_bytes = run.shard_bytes["gradients"]
        adds_to_grads = in_flight.had_backward[in_flight.virtual_stage]  # gradients of earlier micro-batches are there
        self.sums_shards = adds_to_grads and run.reduces_each
        self.sums_full = adds_to_grads and not run.reduces_each
        if run.reduces_each:
            elements_with_grads = sum(
                size for size, has_grads in zip(elements_by_chunk, in_flight.had_backward, strict=True) if has_grads
            )
            self.live_bytes["gradients"] += elements_with_grads * self.gradient_bytes
        if self.sums_full:
            self.live_bytes["whole gradients"] = sum(
                self._unreduced_grad_bytes(UnitSizes.from_trained(chunk_spec, run.adapter), chunk_spec.llama.layers)
                for chunk_spec in specs
            )
        self.keeps_weights = run.keeps_weights
        self.saved_bytes, self.backward_phases = _saved_bytes(run, spec), _backward_phases(run, spec)
        self.kinds = run.recompute.layer_kinds(spec.llama.layers)
        self.input_counts = [0, *itertools.accumulate(_keeps_input(run, kind) for kind in self.kinds)]
        bytes_by_kind = {kind: _kept_bytes(run, spec, kind) for kind in {*self.kinds}}
        self.kept_bytes = [0.0, *itertools.accumulate(map(bytes_by_kind.__getitem__, self.kinds))]  # by so many layers
        self.is_sharded = run.shards > 1  # one rank gathers nothing
        self.units = (self.sizes.attention, self.sizes.mlp) if run.has_sublayer_units else (self.sizes.layer,)
        self.order = [
            *self.units * spec.llama.layers,
            self.sizes.head,
        ]  # as a forward gathers them, after the embedding
        if run.pp > 1 and any(
            in_flight.had_backward
        ):  # only after a step's last backward does FSDP free the last buffer
            last_unit = self.sizes.embedding or (self.sizes.attention if run.has_sublayer_units else self.sizes.layer)
            self.live_bytes["reduce-scatter buffers"] = run.gradient_bytes * last_unit
        self.peak = Peak("", {})
        self.last_gather_bytes = 0.0  # of the forward: the buffer of the last all-gather

    def walk(self) -> Peak:
        """Walk through the step and return its worst moment.

        Of identical layers only the first two and the last are walked: the others show nothing more.
        """
        run, spec, sizes, hidden = self.run, self.spec, self.sizes, self.hidden_bytes
        layers, layers_to_walk = self.llama.layers, _layers_to_walk(self.kinds, run.prefetch)
        root = sizes.embedding if spec.llama.tied or not run.fsdp_embedding else 0
        if root:
            self._gather("the embedding's forward", root, 0)
        elif spec.has_embedding:
            self._gather("the embedding's forward", sizes.embedding, 0)
            self.live_bytes["gathered units"] *= self.keeps_weights
        gathered_bytes = self.live_bytes["gathered units"]
        n_wide = 3 + run.adapter.is_enabled  # what the MLP has at once, beside its input and the residual
        mlp_bytes = run.compute_bytes * run.tokens * n_wide * spec.llama.intermediate + 2 * hidden
        for layer in layers_to_walk:
            self._set_kept_layers(layer, 1)
            self._set_kept_gathered(layer)
            self.live_bytes["gathered units"] = (
                gathered_bytes + self.keeps_weights * run.compute_bytes * layer * sizes.layer
            )
            for place, unit in enumerate(self.units, 1 + layer * len(self.units)):
                self._gather("a layer's forward", unit, place)
                self._record_moment("a layer's forward", activations=mlp_bytes)
                self.live_bytes["gathered units"] -= run.compute_bytes * unit * (not self.keeps_weights)
        if not self.in_flight.after_forward:
            self.peak = Peak("", {})
        self._set_kept_gathered(layers)
        self._set_kept_layers(
            layers, n_extra=run.activations == "host"
        )  # the last one's, until a layer's backward begins
        last_unit = sizes.mlp if run.has_sublayer_units else sizes.layer
        if spec.has_head:
            self._walk_head(hidden, last_unit)
        else:
            self.live_bytes["all-gather buffers"] = self.last_gather_bytes = 0
            self.live_bytes["stage's output"] = 2 * hidden  # and its gradient
            self.live_bytes["activations"] = hidden  # the gradient that flows
        for layer in reversed(layers_to_walk):
            self._set_kept_layers(layer + 1)
            if self.keeps_weights and not run.accumulates:  # else all stay until the last micro-batch
                self.live_bytes["gathered units"] = gathered_bytes + run.compute_bytes * (layer + 1) * sizes.layer
            if self.sums_full:  # as in the last micro-batch, whose units are reduced one after the other
                self.live_bytes["whole gradients"] = self._unreduced_grad_bytes(
                    self.trained_sizes, layer + 1, head=False
                )
            self.live_bytes["gradients"] = self._grad_shard_bytes(layers - 1 - layer)
            self._walk_layer_backward(layer, hidden)
        self._set_kept_layers(0)
        self.live_bytes["whole gradients"] = self.sums_full * self._unreduced_grad_bytes(
            self.trained_sizes, 0, head=False
        )
        self.live_bytes["gradients"] = self._grad_shard_bytes(layers)
        if spec.has_embedding and self.trained_sizes.embedding:
            self._walk_embedding_backward(root)
        return self.peak

    def _walk_embedding_backward(self, root: int) -> None:
        run, sizes = self.run, self.sizes
        weight_bytes = run.compute_bytes * sizes.embedding
        self._record_moment("the embedding's backward", weight_gradients=weight_bytes * (1 + self.llama.tied))
        self.live_bytes["weight gradients"] = self.live_bytes["activations"] = 0
        self.live_bytes["gathered units"] += (
            0 if root or self.keeps_weights else weight_bytes
        )  # it is not gathered in the backward
        self._reduce("the embedding's gradient", sizes.embedding, sizes.embedding, sizes.embedding)

    def _walk_head(self, hidden: float, last_unit: int) -> None:
        """Walk through the head and the loss, while the units of the last layer are gathered."""
        run, sizes = self.run, self.sizes
        logits, loss = (size * run.tokens * self.llama.vocab for size in (run.compute_bytes, LOSS_BYTES))
        weight_bytes = run.compute_bytes * (self.trained_sizes.head or self.trained_sizes.embedding)
        if sizes.head:
            self._gather("the head's forward", sizes.head, len(self.order))
        self.live_bytes["activations"] = hidden * (4 if run.compute_bytes == 2 else 3) - hidden * run.adapter.is_enabled
        # Between the layers a rank has a part of the sequence, and all of it in the head.
        self.live_bytes["activations"] += run.compute_bytes * run.tokens * self.llama.hidden * (run.tp > 1)
        if run.loss == "chunked":
            logits = _logits_chunk_bytes(run, self.llama.vocab)
            hidden_grad_bytes = LOSS_BYTES * run.tokens * self.llama.hidden  # the sum over parts
            self._record_moment("the head's forward", logits=logits)
            self.last_gather_bytes = 0
            self.live_bytes["all-gather buffers"] = self._prefetched_bytes(len(self.order), last_unit)
            self._record_moment(
                "the head's backward",
                logits=logits,
                activations=hidden_grad_bytes,
                weight_gradients=weight_bytes,
            )
        else:
            self._record_moment("the head's forward", logits=logits)
            self.live_bytes["all-gather buffers"] = self.last_gather_bytes = 0
            self._record_moment("the loss", logits=3 * loss)
            self.live_bytes["all-gather buffers"] = self._prefetched_bytes(len(self.order), last_unit)
            self._record_moment("the head's backward", logits=logits, activations=hidden, weight_gradients=weight_bytes)
        self.live_bytes["activations"] = hidden  # the gradient that flows
        if sizes.head:
            self._reduce("the head's gradient", sizes.head, self.trained_sizes.head, self.trained_sizes.head)
        else:
            self.live_bytes["weight gradients"] += weight_bytes

    def _walk_layer_backward(self, layer: int, hidden: float) -> None:
        """Walk through a layer's backward.

        With half-layer units, attention is gathered during the MLP's backward, and the MLP is reduced first.
        """
        run = self.run
        sizes = self.sizes
        self._set_kept_gathered(layer + 1)
        if not run.has_sublayer_units:
            self._regather(sizes.layer, self._prefetched_bytes(1 + layer, bool(layer) * sizes.layer))
            self._set_kept_gathered(layer)
            self.live_bytes["kept activations"] = self.kept_bytes[layer]
            for phase, weight_grads, activation_bytes in self.backward_phases:
                self._record_moment(
                    f"the backward of a layer's {phase}", weight_gradients=weight_grads, activations=activation_bytes
                )
            self._reduce("a layer's gradient", sizes.layer, self.trained_sizes.layer, 0)
            return
        trains_weights = not run.adapter.is_enabled
        self._regather(sizes.mlp, self.run.compute_bytes * sizes.attention * self.is_sharded)
        self._regather(sizes.attention, 0)
        self._set_kept_gathered(layer)
        self.live_bytes["kept activations"] = self.kept_bytes[layer]
        for phase, weight_grads, activation_bytes in self.backward_phases:
            if phase == "norm":
                self.live_bytes["activations"] = hidden + self.saved_bytes
                last_product = self.llama.hidden * self.llama.intermediate
                self._reduce("an MLP's gradient", sizes.mlp, self.trained_sizes.mlp, last_product * trains_weights)
                self.live_bytes["activations"] = hidden
            elif phase == "attention":
                self.live_bytes["all-gather buffers"] = self._prefetched_bytes(2 * layer, bool(layer) * sizes.mlp)
            mlp_grads = run.compute_bytes * 3 * self.llama.hidden * self.llama.intermediate
            freed_bytes = 0 if phase == "MLP" else mlp_grads * trains_weights
            self._record_moment(
                f"the backward of a layer's {phase}",
                weight_gradients=weight_grads - freed_bytes,
                activations=activation_bytes,
            )
        last_product = self.llama.hidden * self.llama.heads * self.llama.head_dim
        self._reduce(
            "an attention's gradient", sizes.attention, self.trained_sizes.attention, last_product * trains_weights
        )

    def _set_kept_layers(self, layers: int, n_extra: int = 0) -> None:
        """Set what so many layers keep; ``n_extra``: hidden states on their way."""
        n_inputs = self.input_counts[layers] + n_extra + INPUT_BUFFERS * (self.run.activations == "host")
        self.live_bytes |= {"layer inputs": n_inputs * self.hidden_bytes, "kept activations": self.kept_bytes[layers]}

    def _set_kept_gathered(self, layers: int) -> None:
        """Set the bytes that this rank keeps gathered of so many layers (``reshard_after_forward``)."""
        if self.run.kept_by:
            self.live_bytes["weights kept gathered"] = (
                self.run.compute_bytes * layers * self.sizes.layer / self.run.kept_by
            )

    def _gather(self, moment: str, unit: int, place: int) -> None:
        """Gather a unit in the forward: the previous unit's buffer is freed once this one was copied out.

        ``place``: of the unit in the forward, after the embedding's.
        """
        size = self.run.compute_bytes * unit
        self.live_bytes["gathered units"] += size
        prefetched_bytes = self.run.compute_bytes * sum(self.order[place : place + self.run.prefetch])
        self.live_bytes["all-gather buffers"] = (
            size + (prefetched_bytes if self.run.prefetch else self.last_gather_bytes)
        ) * self.is_sharded
        self._record_moment(moment)
        self.last_gather_bytes = size * self.is_sharded
        self.live_bytes["all-gather buffers"] = self.last_gather_bytes + prefetched_bytes * self.is_sharded

    def _prefetched_bytes(self, place: int, n_default: int) -> float:
        """Bytes of the units gathered while the one of a place goes backward; ``n_default``: elements without prefetch."""
        n_prefetched = sum(self.order[max(0, place - 1 - self.run.prefetch) : place - 1])
        elements = n_prefetched if self.run.prefetch else n_default
        return self.run.compute_bytes * elements * self.is_sharded * (not self.keeps_weights)

    def _regather(self, unit: int, prefetched_bytes: float) -> None:
        """Gather a prefetched unit in the backward; then the next prefetched buffers take so many bytes."""
        if self.keeps_weights:
            return
        self.live_bytes["gathered units"] += self.run.compute_bytes * unit
        self._record_moment("an all-gather of the backward")
        self.live_bytes["all-gather buffers"] = prefetched_bytes

    def _reduce(self, moment: str, unit: int, trained: int, n_surviving: int) -> None:
        """A unit's reduce-scatter, after its weights were freed; only the gradient of ``n_surviving`` elements outlives the copy.

        Its buffer stays until the next one. ``trained_sizes``: elements of the unit that have gradients.
        """
        run = self.run
        self.live_bytes["gathered units"] -= run.compute_bytes * unit * (not (self.keeps_weights and run.accumulates))
        if self.sums_full:
            self.live_bytes["whole gradients"] = max(
                0.0, self.live_bytes["whole gradients"] - run.gradient_bytes * trained
            )
        self.live_bytes["reduce-scatter buffers"] = run.gradient_bytes * trained
        self._record_moment(moment, weight_gradients=run.compute_bytes * trained)
        # FSDP casts the sum to the weights' dtype, which the trainer drops.
        cast_bytes = run.compute_bytes * (run.offload == "optimizer")
        reduced_bytes = (run.gradient_bytes + cast_bytes) * trained / run.shards
        self._record_moment(moment, weight_gradients=run.compute_bytes * n_surviving, gradients=reduced_bytes)

    def _unreduced_grad_bytes(self, sizes: UnitSizes, layers: int, *, head: bool = True) -> float:
        """Bytes of gradients that are not reduced yet."""
        return self.run.gradient_bytes * (sizes.embedding + layers * sizes.layer + head * sizes.head)

    def _grad_shard_bytes(self, layers: int) -> float:
        """Bytes of the shards of gradients, once so many layers have theirs."""
        run, sizes = self.run, self.trained_sizes
        if self.sums_shards:
            return self.live_bytes["gradients"]
        return self.gradient_bytes * (sizes.head + layers * sizes.layer) / run.shards

    def _record_moment(self, moment: str, **extra: float) -> None:
        """Record this moment as the peak if it is the worst so far; keyword arguments are bytes held only now."""
        total = sum(self.live_bytes.values()) + sum(extra.values())
        if total > self.peak.total:
            extra_by_kind = {name.replace("_", " "): size for name, size in extra.items()}
            bytes_by_kind = {
                name: self.live_bytes.get(name, 0.0) + extra_by_kind.get(name, 0.0)
                for name in {**self.live_bytes, **extra_by_kind}
            }
            self.peak = Peak(moment, {name: size for name, size in bytes_by_kind.items() if size})


def _in_flight_bytes(run: PredictedRun, spec: StageSpec) -> float:
    """Return the bytes of a micro-batch between its forward and its backward.

    These are the layers' inputs, and the output or what the loss keeps.
    """
    hidden_bytes = run.hidden_bytes
    kinds = run.recompute.count_kinds((spec.llama.layers,))
    input_bytes = hidden_bytes + sum(
        count * (_kept_bytes(run, spec, kind) + hidden_bytes * _keeps_input(run, kind)) for kind, count in kinds.items()
    )
    logits_bytes = LOSS_BYTES * run.tokens * spec.llama.vocab * (run.loss == "full")
    return input_bytes + (logits_bytes + _norm_saved_bytes(run, spec, ())) * spec.has_head


def _keeps_input(run: PredictedRun, kind: RecomputeKind) -> bool:
    """Check whether a layer keeps its input on the device.

    Without checkpointing a norm keeps it in FP32, which is a copy unless the run is in FP32.
    """
    if kind == "none":
        return run.fused or run.compute_bytes == LOSS_BYTES
    return run.activations == "device"


def _kept_bytes(run: PredictedRun, spec: StageSpec, kind: RecomputeKind) -> float:
    """Return the bytes that a layer keeps for its backward, without its input."""
    llama, size = spec.llama, run.compute_bytes * run.tokens
    queries, keys = (heads * llama.head_dim for heads in (llama.heads, llama.kv_heads))
    if kind == "full":
        return 0.0
    if kind == "none":
        exchanged_features = queries * (run.cp > 1)  # of attention, between heads and sequence
        keeps_product = not run.adapter.is_enabled or "down_proj" in run.adapter.targets  # which no frozen matrix keeps
        wide = 2 if run.fused and not run.adapter.is_enabled else 3 + keeps_product
        return _saved_bytes(run, spec) + size * (wide * llama.intermediate + exchanged_features)
    sums = LOSS_BYTES * run.tokens * llama.heads  # of attention, in FP32
    adapter_outputs = sum(
        shape[0] for shape in layer_adapter_shapes(spec, run.adapter).values()
    )  # what both factors make
    return size * (2 * queries + 2 * keys + llama.hidden + 2 * llama.intermediate + adapter_outputs) + sums


def _logits_chunk_bytes(run: PredictedRun, vocab: int) -> int:
    """Return the bytes of a vocabulary chunk's logits, or of their gradients, as computed and in FP32."""
    widened_bytes = LOSS_BYTES if run.compute_bytes < LOSS_BYTES else 0
    return (run.compute_bytes + widened_bytes) * run.tokens * min(vocab, VOCAB_CHUNK)


def _saved_bytes(run: PredictedRun, spec: StageSpec) -> float:
    """Return the bytes that a layer's recomputation leaves for its backward, without the MLP's.

    Recomputation ends before the last product (early stop).
    """
    llama, size = spec.llama, run.compute_bytes * run.tokens
    projected = (llama.heads + llama.kv_heads) * llama.head_dim
    # A norm of queries and keys keeps its input in FP32, and what it makes of it before its weight; one that is fused, its input alone.
    normed = (size + LOSS_BYTES * run.tokens * (not run.fused)) * projected * bool(llama.family.query_norms)
    norms = _norm_saved_bytes(run, spec, ATTENTION_INPUTS) + _norm_saved_bytes(run, spec, MLP_INPUTS)
    # Norms between a block and the residual: their input is no other's.
    after_blocks = (len(llama.family.norms) - 2) * size * llama.hidden / run.tp
    norms += after_blocks * (_norm_factor(run, spec) + (not _widens_norms(run)) / 2)
    narrow = size * run.adapter.rank * len(llama.family.matrices(run.adapter.targets)) * run.adapter.is_enabled
    # Of a fused matrix, the values are a view of queries, keys and values.
    fused = size * projected * ("qkv_proj" in llama.family.attention)
    return norms + size * 2 * projected + normed + fused + narrow


def _norm_saved_bytes(run: PredictedRun, spec: StageSpec, readers: tuple[str, ...]) -> float:
    """Bytes that a norm keeps, and what reads it: its input, in FP32, what it makes of it, and that times its weight, which ``tp`` gathers.

    One that is frozen or fused keeps its input alone, which for a layer's first is the layer's, if it is no copy. Frozen matrices
    (``readers``) keep what they read only where there are adapters beside.
    """
    full_bytes = run.compute_bytes * run.tokens * spec.llama.hidden
    keeps_output = not run.adapter.is_enabled or not {*readers}.isdisjoint(run.adapter.targets)
    return full_bytes * keeps_output + _norm_factor(run, spec) * full_bytes / run.tp


def _norm_factor(run: PredictedRun, spec: StageSpec) -> float:
    """Return what a norm keeps beside its output, in hidden states: its input, and what it makes of it before its weight."""
    before_weight = 2 if _widens_norms(run) and spec.llama.family.multiplies_fp32 else 1
    return (2 if _widens_norms(run) else 0.5) + before_weight * (not run.fused and not run.adapter.is_enabled)


def _widens_norms(run: PredictedRun) -> bool:
    """Check whether norms compute in FP32, on copies."""
    return run.compute_bytes == 2 and not run.fused


def _backward_phases(run: PredictedRun, spec: StageSpec) -> list[tuple[str, float, float]]:
    """Return a layer's backward by product: bytes of weight gradients so far, and of everything else."""
    llama = spec.llama
    size = run.compute_bytes * run.tokens
    saved = _saved_bytes(run, spec)
    w = size * llama.hidden
    u = w / run.tp
    g = size * llama.intermediate
    q = size * llama.heads * llama.head_dim
    k = size * llama.kv_heads * llama.head_dim
    weight, out = (run.compute_bytes * llama.hidden * n for n in (llama.intermediate, llama.heads * llama.head_dim))
    widens = _widens_norms(run)
    attention_saved = saved - (4 if widens else 3 - run.fused) * u
    if run.adapter.is_enabled:
        attention_saved = saved - _norm_saved_bytes(run, spec, MLP_INPUTS)
        weight = out = 0
    layer_elements = UnitSizes.from_trained(spec, run.adapter).layer
    return [
        ("MLP", weight, saved + 6 * g),
        ("MLP", 2 * weight, saved + w + 3 * g),
        ("MLP", 3 * weight, saved + 2 * w + g),
        ("norm", 3 * weight, saved + (8 if widens else 2) * u),
        ("attention", 3 * weight + out, attention_saved + w + q + 2 * k),
        ("attention", run.compute_bytes * layer_elements, (12 if widens else 5) * u),
    ]


@functools.lru_cache(256)
def _layers_to_walk(kinds: tuple[RecomputeKind, ...], prefetch: int) -> list[int]:
    """Return the first two layers, the last two and those that prefetch these, and those next to a layer of another kind."""
    layers = range(len(kinds))
    changes = [layer for layer in layers[1:] if kinds[layer] != kinds[layer - 1]]
    return sorted({*layers[:2], *layers[-2 - prefetch :], *changes, *(layer - 1 for layer in changes)})
