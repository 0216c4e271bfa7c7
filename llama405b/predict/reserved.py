"""Predict what torch's caching allocator reserves of a GPU in steps with FSDP2, pool by pool.

A pool is the address space of one stream (expandable segments); it grows at its end by whole segments. A block is placed in the smallest
free block that is large enough, the lowest of several; in the last one only if no other is, since that one can grow. Nothing is given
back while memory suffices. Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (get_free_block, try_allocate_expandable_block,
should_split).

A freed block serves only the stream on which it was allocated, so each stream's pool keeps what it once needed. FSDP2 gathers on a stream
of its own (two units, and the embedding), and reduces gradients on another, from which offloaded gradients go to the host. Everything else
is on the compute stream, with one micro-batch also gradients that stay (``parallel.fsdp``),
and there free blocks do not always suit the next request. So steps are walked through block by block, in the order of torch's own history
(blocks.toml); tests/data/reserved.csv has what torch reserved in 131 settings.

Known only for BF16 computation, as FP32 attention is another kernel, and for layers that are neither compiled nor in FP8. The sequences of
a micro-batch count as one with as many tokens. The memory of NCCL and CUDA is not included, nor what loading, evaluations and saves leave.
"""

import bisect
import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llama405b.predict.memory import INPUT_BUFFERS
from llama405b.predict.run_shape import PredictedRun, StageSpec, layer_adapter_shapes
from llama405b.settings.axes import FULL_RECOMPUTE
from llama405b.settings.choices import OPTIMIZERS
from llama405b.settings.schema import ADAPTER_TARGETS, VOCAB_CHUNK
from llama405b.spec.adapters import lora_shapes
from llama405b.spec.models import LLAMA

MIB = 1 << 20
BLOCK_MULTIPLE = 512  # bytes, of each block: kMinBlockSize
MAX_SMALL_BLOCK = MIB  # up to this, blocks are in a pool of their own: kSmallSize
SEGMENT, SMALL_SEGMENT = 20 * MIB, 2 * MIB  # by which pools grow: kLargeBuffer, kSmallBuffer
SMALL_BLOCK_BEGIN = -1  # where small blocks begin: they are only counted


CachedBlock = tuple[int, int]  # where an allocated block begins in its pool, and its bytes


class Pool:
    """The large blocks of one stream, in one expandable segment."""

    def __init__(self) -> None:
        self.end = 0  # of what is mapped
        self.small_bytes = self.max_small_bytes = 0
        self.free_sizes: list[tuple[int, int]] = []  # (size, begin), in order
        self.sizes: dict[int, int] = {}  # of free blocks, by where they begin
        self.begins: dict[int, int] = {}  # and by where they end

    @property
    def reserved(self) -> int:
        """Bytes that the pool has reserved."""
        return self.end + -(-self.max_small_bytes // SMALL_SEGMENT) * SMALL_SEGMENT

    def allocate(self, n_bytes: float) -> CachedBlock:
        """Allocate a block."""
        size = max(BLOCK_MULTIPLE, int(-(-n_bytes // BLOCK_MULTIPLE)) * BLOCK_MULTIPLE)
        if size <= MAX_SMALL_BLOCK:
            self.small_bytes += size
            self.max_small_bytes = max(self.max_small_bytes, self.small_bytes)
            return SMALL_BLOCK_BEGIN, size
        free_sizes = self.free_sizes
        index = bisect.bisect_left(free_sizes, (size, -1))
        if index == len(free_sizes):
            index = self._grow(size)
        elif sum(free_sizes[index]) == self.end and index + 1 < len(free_sizes):
            index += 1  # the last one can grow, and serves only if no other fits
        free, begin = free_sizes.pop(index)
        del self.sizes[begin], self.begins[begin + free]
        if free > size:
            self._add_free(begin + size, free - size)
        return begin, size

    def free(self, block: CachedBlock) -> None:
        """Free a block, and merge it with free neighbours."""
        begin, size = block
        if begin == SMALL_BLOCK_BEGIN:
            self.small_bytes -= size
            return
        if (previous := self.begins.get(begin)) is not None:
            size += self._remove_free(previous)
            begin = previous
        if begin + size in self.sizes:
            size += self._remove_free(begin + size)
        self._add_free(begin, size)

    def _grow(self, size: int) -> int:
        """Map more, so that the last free block is large enough; return its index."""
        begin = self.begins.get(self.end, self.end)
        free = self._remove_free(begin) if begin < self.end else 0
        grown = -(-(size - free) // SEGMENT) * SEGMENT
        self.end += grown
        self._add_free(begin, free + grown)
        return bisect.bisect_left(self.free_sizes, (free + grown, begin))

    def _add_free(self, begin: int, size: int) -> None:
        bisect.insort(self.free_sizes, (size, begin))
        self.sizes[begin] = size
        self.begins[begin + size] = begin

    def _remove_free(self, begin: int) -> int:
        size = self.sizes.pop(begin)
        del self.begins[begin + size]
        del self.free_sizes[bisect.bisect_left(self.free_sizes, (size, begin))]
        return size


BLOCKS_FILE = Path(__file__).with_name("blocks.toml")
WORKSPACE = 32 << 20  # of cuBLAS on Hopper (ATen/cuda/CublasHandlePool.cpp); elsewhere 8 MiB
SM_BLOCKS = 132 * 16  # of 128 threads, that an H100 runs at a time
LORA_TABLES = {  # of blocks.toml, by the matrices that have adapters
    "lora_q_v": {"q_proj", "v_proj"},
    "lora_attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "lora": {*ADAPTER_TARGETS},
}
N_STEPS = 2  # until pools grow no more


def predict_reserved(run: PredictedRun) -> Mapping[str, int]:
    """Return the reserved bytes by pool; empty: not known."""
    unsupported = (
        run.compiled,
        run.fused and run.adapter.is_enabled,
        run.numerics == "fp8",
        run.accumulates and not run.reduces_each,
        run.pp > 1 or (run.tp > 1 and (run.cp > 1 or run.llama.tied)),
        run.is_split and (run.has_sublayer_units or run.adapter.is_enabled),
        run.is_split and (not run.fsdp_embedding or run.llama.kv_heads % (run.tp * run.cp) != 0),
        bool(OPTIMIZERS[run.optimizer].rest),
        run.llama.family.mlp != LLAMA.mlp,
        len(run.llama.family.norms) > len(LLAMA.norms),
    )
    keeps_normed = run.llama.family.query_norms and "none" in run.recompute.layer_kinds(run.llama.layers)
    # Beside other matrices, what a layer keeps of their adapters is not known.
    knows_kept = {*run.adapter.targets} in LORA_TABLES.values() or run.recompute == FULL_RECOMPUTE
    has_tied_halves = run.llama.tied and run.has_sublayer_units
    unsupported_adapter = run.adapter.is_enabled and (not (run.fsdp_embedding and knows_kept) or has_tied_halves)
    if run.compute_bytes != 2 or any(unsupported) or keeps_normed or unsupported_adapter:
        return {}
    # Each copy of the model is as if it were alone, but for sums of micro-batches; more of these need no more than two.
    copies, dp_shard = (1, 0) if run.axes.dp_replicate == 1 or not run.accumulates else (2, run.axes.dp_shard)
    [spec] = run.stage_specs(0)
    llama = dataclasses.replace(spec.llama, family=LLAMA, attention_bias=False, mlp_bias=False)  # vectors are small
    world = copies * run.shards * run.tp
    batch = run.micro_batch * copies * run.axes.dp_shard * (1 + run.accumulates)
    adapter = dataclasses.replace(run.adapter, path="")
    return _walk_pools(
        dataclasses.replace(run, llama=llama, world=world, global_batch=batch, dp_shard=dp_shard, adapter=adapter)
    )


class PoolOp(NamedTuple):
    """An operation on a pool or on an FSDP unit."""

    verb: str
    name: str = ""
    value: int = 0  # bytes, or which block of the section


@functools.lru_cache(256)
def _walk_pools(run: PredictedRun) -> Mapping[str, int]:
    """Return the reserved bytes by pool, of a run reduced to what matters; its model is a rank's part of it."""
    steps = _PoolWalk(run)
    for _ in range(N_STEPS):
        # The first micro-batch of several allocates gradients, all later ones add to them: two show both.
        for number in range(1 + run.accumulates):
            steps.micro_batch(is_last=number == run.accumulates)
        steps.update()
    pools = {"computing": steps.computing, "gathering": steps.gathering, "reducing": steps.reducing}
    return {name: pool.reserved for name, pool in (pools | {"rounding gradients": steps.rounding}).items()}


class _PoolWalk:
    """A walk through steps of a run, block by block."""

    def __init__(self, run: PredictedRun) -> None:
        self.run, self.shards = run, run.shards
        self.computing, self.gathering, self.reducing, self.rounding = Pool(), Pool(), Pool(), Pool()
        self.sections = _build_sections(run)
        self.units = _unit_elements(run)
        self.trained = _adapter_elements(run) if run.adapter.is_enabled else self.units
        self.weights: dict[str, list[list[CachedBlock]]] = {name: [] for name in self.units}  # of gathered units
        self.kept_blocks = {name: list[CachedBlock]() for name in ("input", "flow", "shared", "rotary", "first")}
        self.gather_buffer: list[CachedBlock] = []  # what the forward's last unit was gathered into
        self.prefetched: list[list[CachedBlock]] = []  # what units that come next were gathered into
        # What this rank keeps gathered of units, until their backward.
        self.kept_parts: dict[str, list[list[CachedBlock]]] = {name: [] for name in self.units}
        layer = ["attention", "mlp"] if run.has_sublayer_units else ["layer"]
        self.order = ["table", *layer * run.llama.layers, *["head"] * (not run.llama.tied)]
        self.position = 0  # in that order, of the unit that comes next; in the backward, of the one that came last
        self.forward = self.is_last = True
        self.keeps_gathered = False  # of ZeRO-2, whether an earlier micro-batch has gathered all units
        self.reduce_buffer: list[CachedBlock] = []  # what the last unit was reduced from
        self.gradients: list[CachedBlock] = []
        self.sums_up = run.axes.dp_replicate > 1 and run.accumulates  # gradients over copies of the model, at the end
        self.partial_sums: list[CachedBlock] = []  # what the first micro-batch's were reduced to, over the shards alone
        self.adds_gradients = self.has_workspace = False
        self._allocate_states("parameters", 1)
        self._allocate_states("moments", round(run.n_moments))
        self.inputs_on_host = run.activations == "host"
        self.offloading_input: CachedBlock | None = None  # the input that is copied to CPU memory
        for _ in range(INPUT_BUFFERS * self.inputs_on_host):
            self.computing.allocate(run.hidden_bytes)

    def micro_batch(self, *, is_last: bool = True) -> None:
        """Walk through a forward and a backward; ``is_last``: of the step."""
        self.is_last = is_last
        kinds = ["" if kind == "full" else f"_{kind}" for kind in self.run.recompute.layer_kinds(self.run.llama.layers)]
        self.position, self.forward = 0, True
        self._walk_section("embedding")
        forwards = list[list[CachedBlock]]()
        for kind in kinds:
            if self.inputs_on_host and kind != "_none":
                self._free_offloaded_input()
                self.offloading_input = (
                    self.kept_blocks["input"].pop() if forwards else None
                )  # the first one's: see below
            forwards.append(self._walk_section(f"forward{kind}"))
            if kind == "_none" and len(forwards) > 1 and not self.run.fused:
                # The first one's goes in the head, as transformers keeps it until then; a fused norm keeps its input.
                self.computing.free(self.kept_blocks["input"].pop(-2))
        self._walk_section("head")
        self._start_backward()
        for kind, blocks in zip(reversed(kinds), reversed(forwards), strict=True):
            if kind != "_none":
                self._free_offloaded_input()
            self._walk_section(f"backward{kind}", blocks)
        self._walk_section("end")
        self._free_table()  # of adapters, whose embedding has no gradient
        _free_blocks(self.computing, self.reduce_buffer)
        self.adds_gradients, self.keeps_gathered = True, self.run.keeps_weights and not is_last

    def _free_offloaded_input(self) -> None:
        """Free the layer input that was copied to CPU memory last."""
        if self.offloading_input:
            self.computing.free(self.offloading_input)
        self.offloading_input = None

    def update(self) -> None:
        """Walk through AdamW, and free the gradients."""
        _free_blocks(self.computing if self.run.reuses_gradient_memory else self.reducing, self.gradients)
        self.adds_gradients = False

    def _allocate_states(self, kind: str, count: int) -> None:
        """Allocate the lasting states of each parameter, in so many blocks."""
        run, size = self.run, self.run.shard_bytes[kind] / count
        weights, factor_shapes = run.llama.tensors(), lora_shapes(run.llama, run.adapter)
        if kind == "parameters" and run.frozen_bytes:
            for shape in weights.values():
                self.computing.allocate(run.frozen_bytes * _shard_elements(shape, self.shards))
        for shape in (factor_shapes or weights).values() if size else ():
            for _ in range(count):
                self.computing.allocate(size * _shard_elements(shape, self.shards))

    def _walk_section(self, section: str, forward_blocks: Sequence[CachedBlock] = ()) -> list[CachedBlock]:
        """Walk through a section; returns its blocks. ``forward_blocks``: those of the same layer's forward."""
        blocks: list[CachedBlock] = []
        for verb, name, value in self.sections[section]:
            if verb == "allocate":
                blocks.append(self.computing.allocate(value))
            elif verb == "free":
                self.computing.free(blocks[value])
            elif verb == "free_of_forward":
                self.computing.free(forward_blocks[value])
            elif verb == "keep":
                self.kept_blocks[name].append(blocks[value])
            else:
                # The other verbs of blocks.toml are methods: gather, regather, drop, reduce, scatter, release, workspace.
                getattr(self, f"_{verb}")(name)
        return blocks

    def _release(self, name: str) -> None:
        """Free the block that was kept last, if there is one."""
        if self.kept_blocks[name]:
            self.computing.free(self.kept_blocks[name].pop())

    def _workspace(self, _: str) -> None:
        """Allocate cuBLAS's own memory, which stays, at the first product."""
        if not self.has_workspace:
            self.computing.allocate(WORKSPACE)
        self.has_workspace = True

    def _gather(self, unit: str) -> None:
        """Gather a unit in the forward; once its weights are copied out, free the previous buffer."""
        self.position += 1
        if self.keeps_gathered:
            return
        previous_buffer, self.gather_buffer = (
            self.gather_buffer,
            self.prefetched.pop(0) if self.prefetched else self._all_gather(unit),
        )
        self._copy_out(unit)
        _free_blocks(self.gathering, previous_buffer)
        end = self.position + self.run.prefetch
        self.prefetched += [
            self._all_gather(next_unit) for next_unit in self.order[self.position + len(self.prefetched) : end]
        ]

    def _regather(self, unit: str) -> None:
        """Gather a unit in the backward; its buffer is freed at once."""
        self.position -= 1
        if self.run.keeps_weights:
            return
        gathered = self.prefetched.pop(0) if self.prefetched else self._all_gather(unit)
        self._copy_out(unit)
        _free_blocks(self.gathering, gathered)
        if self.run.kept_by:
            _free_blocks(self.computing, self.kept_parts[unit].pop())
        self._prefetch_backward()

    def _start_backward(self) -> None:
        """Go from the forward to the backward; the head's unit stays gathered, and prefetches others."""
        _free_blocks(self.gathering, self.gather_buffer)
        self.forward = False
        self.position = len(self.order) - (not self.run.llama.tied)
        if not (self.run.llama.tied or self.run.keeps_weights):
            self._prefetch_backward()

    def _prefetch_backward(self) -> None:
        """Prefetch in the backward; the embedding's weight is not needed there."""
        lowest = max(1, self.position - self.run.prefetch)
        self.prefetched += [
            self._all_gather(self.order[index])
            for index in range(self.position - len(self.prefetched) - 1, lowest - 1, -1)
        ]

    def _all_gather(self, unit: str) -> list[CachedBlock]:
        """Return the buffer that a unit is gathered into; host or other-dtype shards are copied first."""
        run, shards = self.run, self.units[unit]
        if self.shards == 1:
            return []
        is_kept = run.kept_by and not self.forward
        copies = (
            [] if is_kept else [block for elements in shards for block in self._copy_shard(elements, self.gathering)]
        )
        gathered = [self.gathering.allocate(run.compute_bytes * self.shards * sum(shards))]
        _free_blocks(self.gathering, copies)
        return gathered

    def _copy_shard(self, elements: int, pool: Pool) -> list[CachedBlock]:
        """Return the blocks of a shard copied before its gather: from host memory, or to another dtype."""
        run = self.run
        shard_bytes = run.compute_bytes if run.offload == "optimizer" or run.adapter.is_enabled else run.weight_bytes
        uploaded = [pool.allocate(shard_bytes * elements)] if run.offload == "all" else []
        if shard_bytes == run.compute_bytes:
            return uploaded
        rounded = pool.allocate(run.compute_bytes * elements)
        _free_blocks(pool, uploaded)
        return [rounded]

    def _copy_out(self, unit: str) -> None:
        """Allocate a unit's full weights.

        They come from the gathered buffer; on one rank from copies, each freed once the next exists.
        """
        run, weights = self.run, list[CachedBlock]()
        previous: list[CachedBlock] = []
        for elements in self.units[unit]:
            copies = self._copy_shard(elements, self.computing) if self.shards == 1 else []
            _free_blocks(self.computing, previous)
            previous = copies
            weights.append(self.computing.allocate(run.compute_bytes * self.shards * elements))
        _free_blocks(self.computing, previous)
        self.weights[unit].append(weights)

    def _drop(self, unit: str) -> None:
        """Free a unit's weights; after a forward this rank may keep a slice of each, or all until a step's last backward."""
        if self.run.keeps_weights and not (self.is_last and (unit == "head" or not self.forward)):
            return
        weights, run = self.weights[unit].pop(), self.run
        if not (run.kept_by and self.forward) or unit in ("table", "head"):
            _free_blocks(self.computing, weights)
            return
        parts = list[CachedBlock]()
        for elements, block in zip(self.units[unit], weights, strict=True):
            parts.append(self.computing.allocate(run.compute_bytes * self.shards * elements // run.kept_by))
            self.computing.free(block)
        self.kept_parts[unit].append(parts)

    def _reduce(self, unit: str) -> None:
        """Copy a unit's gradients into a buffer, which lives until the next unit's."""
        _free_blocks(self.computing, self.reduce_buffer)
        if unit == "table":
            self._free_table()
        self.reduce_buffer = [self.computing.allocate(self.run.gradient_bytes * self.shards * sum(self.trained[unit]))]

    def _free_table(self) -> None:
        """Free the embedding's weights, which ZeRO-2 keeps until a step's last backward."""
        while self.is_last and self.weights["table"]:
            _free_blocks(self.computing, self.weights["table"].pop())

    def _scatter(self, unit: str) -> None:
        """Allocate the rank's gradient shard of a unit; with offload it then leaves the GPU."""
        run, elements = self.run, sum(self.trained[unit])
        pool = self.computing if run.reuses_gradient_memory else self.reducing
        gradient = pool.allocate(run.gradient_bytes * elements)
        if self.sums_up and not self.adds_gradients:
            self.partial_sums.append(gradient)
            return
        if self.sums_up:
            pool.free(self.partial_sums.pop(0))
        if run.offload == "optimizer":
            self.rounding.free(self.rounding.allocate(run.compute_bytes * elements))
        if run.offload == "none" and (self.sums_up or not self.adds_gradients):
            self.gradients.append(gradient)
        else:
            pool.free(gradient)


def _free_blocks(pool: Pool, blocks: list[CachedBlock]) -> None:
    """Free blocks, and forget them."""
    for block in blocks:
        pool.free(block)
    blocks.clear()


def _shard_elements(shape: Sequence[int], world: int) -> int:
    """Return how many elements of a parameter a rank has; FSDP2 shards the first dimension, and pads it."""
    return math.ceil(shape[0] / world) * math.prod(shape[1:])


def _unit_elements(run: PredictedRun) -> dict[str, list[int]]:
    """Return the elements that a rank has of each parameter of a unit; ``table`` is the embedding's."""
    llama = run.llama
    shapes = dataclasses.replace(llama, layers=1).tensors()
    elements = {name.split(".")[-2]: _shard_elements(shape, run.shards) for name, shape in shapes.items()}
    adapters = _adapter_elements(run)
    attention = [elements[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    mlp = [elements[name] for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [elements[name] for name in ("input_layernorm", "post_attention_layernorm")]
    return {
        "attention": [*attention, *adapters["attention"]],
        "mlp": [*mlp, *adapters["mlp"]],
        "layer": [*attention, *mlp, *norms, *adapters["layer"]],
        "table": [elements["embed_tokens"], *[elements["norm"]] * llama.tied],
        "head": [elements["embed_tokens"], elements["norm"]],
    }


def _adapter_elements(run: PredictedRun) -> dict[str, list[int]]:
    """Return the elements that a rank has of each of a layer's adapters, by unit."""
    shapes = layer_adapter_shapes(StageSpec(run.llama), run.adapter)
    elements = {name: _shard_elements(shape, run.shards) for name, shape in shapes.items()}
    mlp = [n for name, n in elements.items() if ".mlp." in name]
    return {
        "attention": [n for name, n in elements.items() if ".mlp." not in name],
        "mlp": mlp,
        "layer": [*elements.values()],
    }


def _build_sections(run: PredictedRun) -> dict[str, list[PoolOp]]:
    """Return the operations of each section of a step."""
    table = _read_blocks()
    sections = dict(table["whole"])
    if run.has_sublayer_units:
        sections |= table["halves"]
    if run.llama.tied:
        sections |= table["tied"]
    elif not run.fsdp_embedding:
        sections |= table["root"]
    if run.tp > 1:
        sections |= table["tp_fused" if run.fused else "tp"]
    elif run.fused:
        sections |= (
            table["fused"]
            | (table["fused_halves"] if run.has_sublayer_units else {})
            | (table["fused_tied"] if run.llama.tied else {})
        )
    if run.cp > 1:
        sections |= table["cp_fused" if run.fused else "cp"]
    if run.adapter.is_enabled:
        kind = _lora_table(run)
        sections = table["lora"] | table[kind] | (table["lora_tied"] if run.llama.tied else {})
        sections |= table[f"{kind}_halves"] if run.has_sublayer_units else {}
    words_by_section = {name: text.split() for name, text in sections.items()}
    on_host = run.activations == "host"
    for name in [key for key in words_by_section if on_host and key in ("backward", "backward_operators")]:
        words_by_section[name] = [word for word in words_by_section[name] if word != "-input"]
    if on_host or (run.recompute.layer_kinds(run.llama.layers)[0] == "none" and not run.fused):
        words_by_section["head"].insert(
            words_by_section["head"].index("-input"), "-input"
        )  # the first layer's, beside the last one's output
    if run.loss == "chunked":
        words_by_section["head"] = _chunk_head(words_by_section["head"], run.llama.vocab)
    return {name: [_parse_op(word, run) for word in section] for name, section in words_by_section.items()}


def _lora_table(run: PredictedRun) -> str:
    """Return the table of the fewest matrices with adapters that has those of a run."""
    return next(name for name, targets in LORA_TABLES.items() if targets.issuperset(run.adapter.targets))


def _chunk_head(words: Sequence[str], vocab: int) -> list[str]:
    """Return what the head does if it computes the loss of some words at a time (``model.head``), in place of all logits."""
    sizes = [min(VOCAB_CHUNK, vocab - start) for start in range(0, vocab, VOCAB_CHUNK)]
    first_logits = words.index("2TV")
    prefix, after_forward = list(words[:first_logits]), words[first_logits + 1 : words.index("4TV")]
    n_before = count = sum(not word.startswith("-") and ":" not in word for word in prefix)
    result = list(prefix)
    for size in sizes:  # logits, and in FP32
        result += [f"{2 * size}T", f"{4 * size}T", f"-{count + 1}", f"-{count + 2}"]
        count += 2
    trains = "2hV" in words
    result += after_forward if trains else []
    hidden_grad, weight_grad = count + 1, count + 2
    result += ["4Th", *["2hV"] * trains]
    count += 1 + trains
    for size in sizes:  # the same, their gradient, and that of the hidden states
        result += [f"{2 * size}T", f"{4 * size}T", f"-{count + 1}", f"{2 * size}T", f"-{count + 2}"]
        result += ["2Th", f"-{count + 4}", f"-{count + 3}"]
        count += 4
    result += ["2Th", f"-{hidden_grad}"]
    hidden = n_before + 7 + trains  # of all logits, by the numbers that the rest has, after its gradient is freed
    numbers = {n_before + 7: weight_grad, hidden: count + 1}
    suffix = words[words.index(f"-{n_before + 6}") + 1 :]
    if not trains:
        suffix = [f"-{n_before}", *suffix]  # what the head reads, which no gradient of a frozen weight keeps
    return result + [_renumber(word, numbers, hidden, count + 1) for word in suffix]


def _renumber(word: str, numbers: Mapping[int, int], after: int, new_number: int) -> str:
    """Return a word with the new number of the block that it names, of those that come after ``after``, which is ``new_number``."""
    match = re.fullmatch(r"(-|\w+:)(\d+)", word)
    if not match:
        return word
    number = int(match[2])
    return f"{match[1]}{numbers.get(number, number + (new_number - after) * (number > after))}"


def _parse_op(word: str, run: PredictedRun) -> PoolOp:
    """Parse a word of blocks.toml for a run."""
    verb, _, name = word.partition(":")
    if name.isdecimal():
        return PoolOp("keep", verb, int(name) - 1)
    if name:
        return PoolOp(verb, name)
    if word.startswith("-f") and word[2:].isdecimal():
        return PoolOp("free_of_forward", value=int(word[2:]) - 1)
    if word.startswith("-"):
        return PoolOp("free", value=int(word[1:]) - 1) if word[1:].isdecimal() else PoolOp("release", word[1:])
    return PoolOp("allocate", value=_parse_bytes(word, run))


def _parse_bytes(word: str, run: PredictedRun) -> int:
    """Return the bytes of a block: a number times sizes, each of a letter."""
    llama = run.llama
    if word == "sum":
        return _sum_bytes(llama.hidden, run.tokens // run.tp)
    q, k = (heads * llama.head_dim for heads in (llama.heads, llama.kv_heads))
    sizes = {
        "T": run.tokens,
        "t": run.tokens // run.tp,
        "h": llama.hidden,
        "f": llama.intermediate,
        "q": q,
        "k": k,
        "a": llama.heads,
        "V": llama.vocab,
        "W": llama.vocab * run.tp,
        "S": run.seq_len // run.cp,
        "d": llama.head_dim,
    }
    number = word.rstrip("".join(sizes))
    return math.ceil(float(number) * math.prod(sizes[letter] for letter in word[len(number) :]))


def _sum_bytes(hidden: int, tokens: int) -> int:
    """Return the room that a sum over tokens takes: 128 partial sums of each block of threads (ATen/native/cuda/Reduce.cuh)."""
    blocks = min(math.ceil(SM_BLOCKS * 128 / hidden), math.ceil(tokens / 64))
    return 4 * hidden * 128 * blocks


@functools.cache
def _read_blocks() -> dict[str, dict[str, str]]:
    with BLOCKS_FILE.open("rb") as file:
        return tomllib.load(file)
