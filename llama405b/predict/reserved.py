"""Predict what torch's caching allocator reserves of a GPU in steps with FSDP2, pool by pool.

A pool is the address space of one stream (expandable segments); it grows at its end by whole segments. A block is placed in the smallest
free block that is large enough, the lowest of several; in the last one only if no other is, since that one can grow. Nothing is given
back while memory suffices. Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (get_free_block, try_allocate_expandable_block,
should_split).

A freed block serves only the stream on which it was allocated, so each stream's pool keeps what it once needed. FSDP2 gathers on a stream
of its own (two units, and the embedding), and reduces gradients on another, from which offloaded gradients go to the host. Everything else
is on the compute stream, with one micro-batch also gradients that stay (``parallel.fsdp``),
and there free blocks do not always suit the next request. So steps are walked through block by block, in the order of torch's own history
(blocks.toml); tests/data/reserved.csv has what torch reserved in 74 settings.

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

from llama405b.predict.memory import BUFFERS
from llama405b.predict.run_shape import Part, RunShape, adapter_shapes
from llama405b.settings.axes import Axes
from llama405b.settings.schema import LOSS_PART, TARGETS
from llama405b.spec.models import LLAMA, factors

MIB = 1 << 20
ROUND = 512  # bytes, of each block: kMinBlockSize
SMALL = MIB  # up to this, blocks are in a pool of their own: kSmallSize
SEGMENT, SMALL_SEGMENT = 20 * MIB, 2 * MIB  # by which pools grow: kLargeBuffer, kSmallBuffer
OUTSIDE = -1  # where small blocks begin: they are only counted


class Block(NamedTuple):
    """The position of an allocated block in its pool."""

    begin: int
    size: int  # bytes


class Pool:
    """The large blocks of one stream, in one expandable segment."""

    def __init__(self) -> None:
        self.end = 0  # of what is mapped
        self.small = self.most_small = 0
        self.free_sizes: list[tuple[int, int]] = []  # (size, begin), in order
        self.sizes: dict[int, int] = {}  # of free blocks, by where they begin
        self.begins: dict[int, int] = {}  # and by where they end

    @property
    def reserved(self) -> int:
        """Bytes that the pool has reserved."""
        return self.end + -(-self.most_small // SMALL_SEGMENT) * SMALL_SEGMENT

    def allocate(self, n_bytes: float) -> Block:
        """Allocate a block."""
        size = max(ROUND, -(-math.ceil(n_bytes) // ROUND) * ROUND)
        if size <= SMALL:
            self.small += size
            self.most_small = max(self.most_small, self.small)
            return Block(OUTSIDE, size)
        begin = self._place(size)
        free = self._take(begin)
        if free > size:
            self._give(begin + size, free - size)
        return Block(begin, size)

    def free(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        begin, size = block
        if begin == OUTSIDE:
            self.small -= size
            return
        if (before := self.begins.get(begin)) is not None:
            size += self._take(before)
            begin = before
        if begin + size in self.sizes:
            size += self._take(begin + size)
        self._give(begin, size)

    def _place(self, size: int) -> int:
        """Return the begin of the free block to use; the last one, which can grow, only if no other fits."""
        at = bisect.bisect_left(self.free_sizes, (size, -1))
        if at < len(self.free_sizes) and sum(self.free_sizes[at]) == self.end and at + 1 < len(self.free_sizes):
            at += 1
        if at < len(self.free_sizes):
            return self.free_sizes[at][1]
        last = self.begins.get(self.end, self.end)
        free = self._take(last) if last < self.end else 0
        grown = -(-(size - free) // SEGMENT) * SEGMENT
        self.end += grown
        self._give(last, free + grown)
        return last

    def _give(self, begin: int, size: int) -> None:
        bisect.insort(self.free_sizes, (size, begin))
        self.sizes[begin] = size
        self.begins[begin + size] = begin

    def _take(self, begin: int) -> int:
        size = self.sizes.pop(begin)
        del self.begins[begin + size]
        del self.free_sizes[bisect.bisect_left(self.free_sizes, (size, begin))]
        return size


TABLE = Path(__file__).with_name("blocks.toml")
WORKSPACE = 32 << 20  # of cuBLAS on Hopper (ATen/cuda/CublasHandlePool.cpp); elsewhere 8 MiB
SM_BLOCKS = 132 * 16  # of 128 threads, that an H100 runs at a time
STEPS = 2  # until pools grow no more


def reserved(run: RunShape) -> Mapping[str, int]:
    """Return the reserved bytes by pool; empty: not known."""
    others = (
        run.compiled,
        run.fused and run.adapter.trains,
        run.numerics == "fp8",
        run.keeps_weights,
        run.axes != Axes(run.world),
    )
    keeps_normed = run.llama.family.query_norms and "none" in run.recompute.of(run.llama.layers)
    others_adapted = run.adapter.trains and (
        {*run.adapter.targets} != {*TARGETS} or run.halves or not run.embedding_apart
    )
    if run.compute_bytes != 2 or any(others) or keeps_normed or others_adapted:
        return {}
    batch = run.micro_batch * run.world * (1 + run.accumulates)  # more micro-batches need no more than two
    return _reserved(
        RunShape(
            dataclasses.replace(run.llama, family=LLAMA, attention_bias=False, mlp_bias=False),  # vectors are small
            run.numerics,
            run.offload,
            run.world,
            run.seq_len,
            run.micro_batch,
            batch,
            wrap=run.wrap,
            loss=run.loss,
            recompute=run.recompute,
            activations=run.activations,
            prefetch=run.prefetch,
            kept_by=run.kept_by,
            fused=run.fused,
            adapter=dataclasses.replace(run.adapter, path=""),
        )
    )


class Op(NamedTuple):
    """An operation on a pool or on an FSDP unit."""

    verb: str
    name: str = ""
    value: int = 0  # bytes, or which block of the section


@functools.lru_cache(256)
def _reserved(run: RunShape) -> Mapping[str, int]:
    """Return the reserved bytes by pool, of a run reduced to what matters."""
    steps = _Steps(run)
    for _ in range(STEPS):
        # The first micro-batch of several allocates gradients, all later ones add to them: two show both.
        for _ in range(1 + run.accumulates):
            steps.micro_batch()
        steps.update()
    pools = {"computing": steps.computing, "gathering": steps.gathering, "reducing": steps.reducing}
    return {name: pool.reserved for name, pool in (pools | {"rounding gradients": steps.rounding}).items()}


class _Steps:
    """A walk through steps of a run, block by block."""

    def __init__(self, run: RunShape) -> None:
        self.run = run
        self.computing, self.gathering, self.reducing, self.rounding = Pool(), Pool(), Pool(), Pool()
        self.sections = _sections(run)
        self.units = _units(run)
        self.trained = {"layer": _added(run)} if run.adapter.trains else self.units
        self.weights: dict[str, list[list[Block]]] = {name: [] for name in self.units}  # of gathered units
        self.kept: dict[str, list[Block]] = {"input": [], "flow": [], "shared": [], "rotary": []}
        self.gathered: list[Block] = []  # what the forward's last unit was gathered into
        self.ahead: list[list[Block]] = []  # what units that come next were gathered into
        # What this rank keeps gathered of units, until their backward.
        self.parts: dict[str, list[list[Block]]] = {name: [] for name in self.units}
        layer = ["attention", "mlp"] if run.halves else ["layer"]
        self.order = ["table", *layer * run.llama.layers, *["head"] * (not run.llama.tied)]
        self.place = 0  # in that order, of the unit that comes next; in the backward, of the one that came last
        self.forward = True
        self.reduced: list[Block] = []  # what the last unit was reduced from
        self.gradients: list[Block] = []
        self.adds = self.has_workspace = False
        self._make("parameters", 1)
        self._make("moments", 2)
        self.on_host = run.activations == "host"
        self.leaving: Block | None = None  # the input that is copied to CPU memory
        for _ in range(BUFFERS * self.on_host):
            self.computing.allocate(run.flow_bytes)

    def micro_batch(self) -> None:
        """Walk through a forward and a backward."""
        kinds = ["" if kind == "full" else f"_{kind}" for kind in self.run.recompute.of(self.run.llama.layers)]
        self.place, self.forward = 0, True
        self._section("embedding")
        forwards = list[list[Block]]()
        for kind in kinds:
            if self.on_host and kind != "_none":
                self._let_go()
                self.leaving = self.kept["input"].pop() if forwards else None  # the first one's: see below
            forwards.append(self._section(f"forward{kind}"))
            if kind == "_none" and len(forwards) > 1 and not self.run.fused:
                # The first one's goes in the head, as transformers keeps it until then; a fused norm keeps its input.
                self.computing.free(self.kept["input"].pop(-2))
        self._section("head")
        self._turn()
        for kind, blocks in zip(reversed(kinds), reversed(forwards), strict=True):
            if kind != "_none":
                self._let_go()
            self._section(f"backward{kind}", blocks)
        self._section("end")
        _free(self.computing, self.reduced)
        self.adds = True

    def _let_go(self) -> None:
        """Free the layer input that was copied to CPU memory last."""
        if self.leaving:
            self.computing.free(self.leaving)
        self.leaving = None

    def update(self) -> None:
        """Walk through AdamW, and free the gradients."""
        _free(self.computing if self.run.lends_gradients else self.reducing, self.gradients)
        self.adds = False

    def _make(self, kind: str, count: int) -> None:
        """Allocate the lasting states of each parameter, in so many blocks."""
        run, size = self.run, self.run.shard_bytes[kind] / count
        weights, added = run.llama.tensors(), factors(run.llama, run.adapter)
        if kind == "parameters" and run.frozen_bytes:
            for shape in weights.values():
                self.computing.allocate(run.frozen_bytes * _shard(shape, run.world))
        for shape in (added or weights).values() if size else ():
            for _ in range(count):
                self.computing.allocate(size * _shard(shape, run.world))

    def _section(self, section: str, of_forward: Sequence[Block] = ()) -> list[Block]:
        """Walk through a section; returns its blocks. ``of_forward``: those of the same layer's forward."""
        blocks: list[Block] = []
        for verb, name, value in self.sections[section]:
            if verb == "allocate":
                blocks.append(self.computing.allocate(value))
            elif verb == "free":
                self.computing.free(blocks[value])
            elif verb == "free_of_forward":
                self.computing.free(of_forward[value])
            elif verb == "keep":
                self.kept[name].append(blocks[value])
            else:
                # The other verbs of blocks.toml are methods: gather, regather, drop, reduce, scatter, release, workspace.
                getattr(self, f"_{verb}")(name)
        return blocks

    def _release(self, name: str) -> None:
        """Free the block that was kept last."""
        self.computing.free(self.kept[name].pop())

    def _workspace(self, _: str) -> None:
        """Allocate cuBLAS's own memory, which stays, at the first product."""
        if not self.has_workspace:
            self.computing.allocate(WORKSPACE)
        self.has_workspace = True

    def _gather(self, unit: str) -> None:
        """Gather a unit in the forward; once its weights are copied out, free the previous buffer."""
        waiting, self.gathered = self.gathered, self.ahead.pop(0) if self.ahead else self._all_gather(unit)
        self._copy_out(unit)
        _free(self.gathering, waiting)
        self.place += 1
        last = self.place + self.run.prefetch
        self.ahead += [self._all_gather(each) for each in self.order[self.place + len(self.ahead) : last]]

    def _regather(self, unit: str) -> None:
        """Gather a unit in the backward; its buffer is freed at once."""
        self.place -= 1
        gathered = self.ahead.pop(0) if self.ahead else self._all_gather(unit)
        self._copy_out(unit)
        _free(self.gathering, gathered)
        if self.run.kept_by:
            _free(self.computing, self.parts[unit].pop())
        self._gather_before()

    def _turn(self) -> None:
        """Go from the forward to the backward; the head's unit stays gathered, and prefetches others."""
        _free(self.gathering, self.gathered)
        self.forward = False
        self.place = len(self.order) - (not self.run.llama.tied)
        if not self.run.llama.tied:
            self._gather_before()

    def _gather_before(self) -> None:
        """Prefetch in the backward; the embedding's weight is not needed there."""
        last = max(1, self.place - self.run.prefetch)
        self.ahead += [
            self._all_gather(self.order[each]) for each in range(self.place - len(self.ahead) - 1, last - 1, -1)
        ]

    def _all_gather(self, unit: str) -> list[Block]:
        """Return the buffer that a unit is gathered into; host or other-dtype shards are copied first."""
        run, shards = self.run, self.units[unit]
        if run.world == 1:
            return []
        is_kept = run.kept_by and not self.forward
        copies = [] if is_kept else [block for elements in shards for block in self._copies(elements, self.gathering)]
        gathered = [self.gathering.allocate(run.compute_bytes * run.world * sum(shards))]
        _free(self.gathering, copies)
        return gathered

    def _copies(self, elements: int, pool: Pool) -> list[Block]:
        """Return the blocks of a shard copied before its gather: from host memory, or to another dtype."""
        run = self.run
        kept = run.compute_bytes if run.offload == "optimizer" or run.adapter.trains else run.weight_bytes
        uploaded = [pool.allocate(kept * elements)] if run.offload == "all" else []
        if kept == run.compute_bytes:
            return uploaded
        rounded = pool.allocate(run.compute_bytes * elements)
        _free(pool, uploaded)
        return [rounded]

    def _copy_out(self, unit: str) -> None:
        """Allocate a unit's full weights.

        They come from the gathered buffer; on one rank from copies, each freed once the next exists.
        """
        run, weights = self.run, list[Block]()
        before: list[Block] = []
        for elements in self.units[unit]:
            own = self._copies(elements, self.computing) if run.world == 1 else []
            _free(self.computing, before)
            before = own
            weights.append(self.computing.allocate(run.compute_bytes * run.world * elements))
        _free(self.computing, before)
        self.weights[unit].append(weights)

    def _drop(self, unit: str) -> None:
        """Free a unit's weights; after a forward this rank may keep a slice of each."""
        weights, run = self.weights[unit].pop(), self.run
        if not (run.kept_by and self.forward) or unit in ("table", "head"):
            _free(self.computing, weights)
            return
        parts = list[Block]()
        for elements, block in zip(self.units[unit], weights, strict=True):
            parts.append(self.computing.allocate(run.compute_bytes * run.world * elements // run.kept_by))
            self.computing.free(block)
        self.parts[unit].append(parts)

    def _reduce(self, unit: str) -> None:
        """Copy a unit's gradients into a buffer, which lives until the next unit's."""
        _free(self.computing, self.reduced)
        self.reduced = [self.computing.allocate(self.run.gradient_bytes * self.run.world * sum(self.trained[unit]))]

    def _scatter(self, unit: str) -> None:
        """Allocate the rank's gradient shard of a unit; with offload it then leaves the GPU."""
        run, elements = self.run, sum(self.trained[unit])
        pool = self.computing if run.lends_gradients else self.reducing
        gradient = pool.allocate(run.gradient_bytes * elements)
        if run.offload == "optimizer":
            self.rounding.free(self.rounding.allocate(run.compute_bytes * elements))
        if run.offload == "none" and not self.adds:
            self.gradients.append(gradient)
        else:
            pool.free(gradient)


def _free(pool: Pool, blocks: list[Block]) -> None:
    """Free blocks, and forget them."""
    for block in blocks:
        pool.free(block)
    blocks.clear()


def _shard(shape: Sequence[int], world: int) -> int:
    """Return how many elements of a parameter a rank has; FSDP2 shards the first dimension, and pads it."""
    return math.ceil(shape[0] / world) * math.prod(shape[1:])


def _units(run: RunShape) -> dict[str, list[int]]:
    """Return the elements that a rank has of each parameter of a unit; ``table`` is the embedding's."""
    llama = run.llama
    shapes = dataclasses.replace(llama, layers=1).tensors()
    of = {name.split(".")[-2]: _shard(shape, run.world) for name, shape in shapes.items()}
    attention = [of[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    mlp = [of[name] for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [of[name] for name in ("input_layernorm", "post_attention_layernorm")]
    return {
        "attention": attention,
        "mlp": mlp,
        "layer": [*attention, *mlp, *norms, *_added(run)],
        "table": [of["embed_tokens"], *[of["norm"]] * llama.tied],
        "head": [of["embed_tokens"], of["norm"]],
    }


def _added(run: RunShape) -> list[int]:
    """Return the elements that a rank has of each of a layer's adapters."""
    return [_shard(shape, run.world) for shape in adapter_shapes(Part(run.llama), run.adapter).values()]


def _sections(run: RunShape) -> dict[str, list[Op]]:
    """Return the operations of each section of a step."""
    table = _table()
    found = dict(table["whole"])
    if run.halves:
        found |= table["halves"]
    if run.llama.tied:
        found |= table["tied"]
    elif not run.embedding_apart:
        found |= table["root"]
    if run.fused:
        found |= (
            table["fused"]
            | (table["fused_halves"] if run.halves else {})
            | (table["fused_tied"] if run.llama.tied else {})
        )
    if run.adapter.trains:
        found = table["lora"] | (table["lora_tied"] if run.llama.tied else {})
    words = {name: text.split() for name, text in found.items()}
    on_host = run.activations == "host"
    for name in [each for each in words if on_host and each in ("backward", "backward_operators")]:
        words[name] = [word for word in words[name] if word != "-input"]
    if on_host or (run.recompute.of(run.llama.layers)[0] == "none" and not run.fused):
        words["head"].insert(words["head"].index("-input"), "-input")  # the first layer's, beside the last one's output
    if run.loss == "parts":
        words["head"] = _head_of_parts(words["head"], run.llama.vocab)
    return {name: [_op(word, run) for word in section] for name, section in words.items()}


def _head_of_parts(words: Sequence[str], vocab: int) -> list[str]:
    """Return what the head does if it computes the loss of some words at a time (``model.head``), in place of all logits."""
    sizes = [min(LOSS_PART, vocab - start) for start in range(0, vocab, LOSS_PART)]
    before = list(words[: words.index("2TV")])
    made = count = sum(not word.startswith("-") and ":" not in word for word in before)
    found = list(before)
    for size in sizes:  # logits, and in FP32
        found += [f"{2 * size}T", f"{4 * size}T", f"-{count + 1}", f"-{count + 2}"]
        count += 2
    trains = "2hV" in words
    of_hidden, of_weight = count + 1, count + 2
    found += ["4Th", *["2hV"] * trains]
    count += 1 + trains
    for size in sizes:  # the same, their gradient, and that of the hidden states
        found += [f"{2 * size}T", f"{4 * size}T", f"-{count + 1}", f"{2 * size}T", f"-{count + 2}"]
        found += ["2Th", f"-{count + 4}", f"-{count + 3}"]
        count += 4
    found += ["2Th", f"-{of_hidden}"]
    hidden = made + 7 + trains  # of all logits, by the numbers that the rest has, after its gradient is freed
    numbers = {made + 7: of_weight, hidden: count + 1}
    rest = words[words.index(f"-{made + 6}") + 1 :]
    if not trains:
        rest = [f"-{made}", *rest]  # what the head reads, which no gradient of a frozen weight keeps
    return found + [_renumbered(word, numbers, hidden, count + 1) for word in rest]


def _renumbered(word: str, numbers: Mapping[int, int], last: int, now: int) -> str:
    """Return a word with the new number of the block that it names, of those that come after ``last``, which is ``now``."""
    named = re.fullmatch(r"(-|\w+:)(\d+)", word)
    if not named:
        return word
    old = int(named[2])
    return f"{named[1]}{numbers.get(old, old + (now - last) * (old > last))}"


def _op(word: str, run: RunShape) -> Op:
    """Parse a word of blocks.toml for a run."""
    verb, _, name = word.partition(":")
    if name.isdecimal():
        return Op("keep", verb, int(name) - 1)
    if name:
        return Op(verb, name)
    if word.startswith("-f") and word[2:].isdecimal():
        return Op("free_of_forward", value=int(word[2:]) - 1)
    if word.startswith("-"):
        return Op("free", value=int(word[1:]) - 1) if word[1:].isdecimal() else Op("release", word[1:])
    return Op("allocate", value=_bytes(word, run))


def _bytes(word: str, run: RunShape) -> int:
    """Return the bytes of a block: a number times sizes, each of a letter."""
    llama = run.llama
    if word == "sum":
        return _sum_bytes(llama.hidden, run.tokens)
    q, k = (heads * llama.head_dim for heads in (llama.heads, llama.kv_heads))
    sizes = {
        "T": run.tokens,
        "h": llama.hidden,
        "f": llama.intermediate,
        "q": q,
        "k": k,
        "a": llama.heads,
        "V": llama.vocab,
        "S": run.seq_len,
        "d": llama.head_dim,
    }
    number = word.rstrip("".join(sizes))
    return math.ceil(float(number) * math.prod(sizes[letter] for letter in word[len(number) :]))


def _sum_bytes(hidden: int, tokens: int) -> int:
    """Return the room that a sum over tokens takes: 128 partial sums of each block of threads (ATen/native/cuda/Reduce.cuh)."""
    blocks = min(math.ceil(SM_BLOCKS * 128 / hidden), math.ceil(tokens / 64))
    return 4 * hidden * 128 * blocks


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    with TABLE.open("rb") as file:
        return tomllib.load(file)
