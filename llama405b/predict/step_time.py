"""Predict how long a step, a load and a save take. Pure.

A step is the compute and the communication of each FSDP unit, less what one hides of the other. T: tokens of a micro-batch on a GPU;
S: sequence length.

The form of the overlap is that of ``hidden_s``; at which rates: ``hardware``.

Loading and saving are bound by disks and links, and hold host memory meanwhile.
"""

import dataclasses
import math
from collections.abc import Mapping

from llama405b.predict.hardware import Rates, Setting
from llama405b.predict.run_shape import Part, UnitSizes
from llama405b.settings.axes import Kind
from llama405b.settings.schema import best_interval
from llama405b.spec.models import Llama

# Of what FP8 is faster than BF16 by the data sheet, with the casts and scales that torchao compiles into kernels: one H200, 16384 x 53248
# by 8192 tokens, forward and backward, 63.7 ms in BF16 and 36.2 in FP8; not compiled 80.3 (docs/measurements/gpu-bench.md).
FP8_SHARE, NOT_COMPILED = 0.88, 0.79
# The same of a whole layer of this trainer, which took 32 % less there; and the share that compiling saved (0.8 %) of the bytes it could.
FP8_OF_LAYER, COMPILED_OF_BYTES = 0.78, 0.28


@dataclasses.dataclass(frozen=True, slots=True)
class GpuWork:
    """Seconds of a GPU's compute time, by kind of work."""

    products_s: float = 0.0  # matrix products
    attention_s: float = 0.0
    elementwise_s: float = 0.0  # norms, rotary embedding, activation, residuals

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.products_s + self.attention_s + self.elementwise_s

    def times(self, products: float, attention: float, elementwise: float) -> "GpuWork":
        """Return each kind of work times a factor."""
        return GpuWork(products * self.products_s, attention * self.attention_s, elementwise * self.elementwise_s)

    def __add__(self, other: "GpuWork") -> "GpuWork":
        """Return the sum, kind by kind."""
        return GpuWork(
            self.products_s + other.products_s,
            self.attention_s + other.attention_s,
            self.elementwise_s + other.elementwise_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one layer and micro-batch."""

    forward: GpuWork
    backward: GpuWork
    again: Mapping[Kind, GpuWork]  # what checkpointing computes once more, in the backward

    def backward_s(self, kind: Kind) -> float:
        """Return the seconds of the backward, with recomputation."""
        return self.backward.total_s + self.again[kind].total_s


def layer_work(setting: Setting, rates: Rates) -> LayerWork:
    """Return what a layer computes of a micro-batch.

    A backward has twice the products, or as many where they are frozen, and 2.5 times flash attention (arXiv:2307.08691). Non-reentrant
    checkpointing stops before a layer's last product, so that full recomputation is not a plain third.
    """
    layer = fp8_products_s if setting.fp8 else products_s
    products = layer(setting, rates, setting.shape.matrices)
    flops = 2 * setting.seq_len * setting.shape.width * setting.tokens  # of attention: the causal half of 4 S T width
    attained = setting.gpu.flops * rates.attention_of(setting.gpu.name) * (rates.triton if setting.triton else 1)
    usual = GpuWork(products, flops / attained, _elementwise_s(setting, rates))
    forward = usual + adapters_s(setting, rates, 2, 8)
    backward = usual.times(2 - setting.frozen, 2.5, 2) + adapters_s(setting, rates, 10, 4)
    last = GpuWork(layer(setting, rates, setting.shape.narrow))
    again: dict[Kind, GpuWork] = {
        "none": GpuWork(),
        "operators": forward.times(1 - setting.products_kept, 0, 1),
        "full": forward + last.times(-1, 0, 0),
    }
    return LayerWork(forward, backward, again)


def adapters_s(setting: Setting, rates: Rates, of_input: int, of_output: int) -> GpuWork:
    """Return the work of a layer's adapters, bound by memory, from bytes per input and output feature.

    Forward, an input is read (2), and an output written, read and added to another (8). Backward, gradients of A and B read input (2)
    and output (2), and that of the input reads an output (2), is written and added to another (8).
    """
    inputs, outputs = setting.adapted
    traffic = (of_input * inputs + of_output * outputs) * setting.tokens
    return GpuWork(elementwise_s=traffic / (setting.gpu.memory_bytes_per_s * rates.memory))


def products_s(setting: Setting, rates: Rates, weights: float) -> float:
    """Return the time of products with so many weights, forward."""
    return 2 * weights * setting.tokens / (setting.gpu.flops * rates.matmul_of(setting.gpu.name))


def fp8_products_s(setting: Setting, rates: Rates, weights: float) -> float:
    """Return the time of products in FP8; in BF16 where the GPU has no FP8."""
    gpu = setting.gpu
    share = FP8_OF_LAYER if setting.ours else FP8_SHARE
    faster = share * gpu.fp8_flops / gpu.flops if setting.compiled else NOT_COMPILED
    return products_s(setting, rates, weights) / (faster if gpu.fp8_flops else 1)


def head_s(setting: Setting, rates: Rates) -> tuple[GpuWork, GpuWork]:
    """Return what the head and the loss compute of a micro-batch, forward and backward.

    All logits at once take 12 bytes each in the forward, and twice that in the backward: BF16, an FP32 copy, softmax. In chunks, operator
    by operator, they take 28 and 38 (``model.head``), and the product once more.
    """
    product = products_s(setting, rates, setting.shape.head)
    trains = not setting.frozen
    logit = setting.shape.vocab * setting.tokens / (setting.gpu.memory_bytes_per_s * rates.memory)
    if setting.loss_of_parts:
        return GpuWork(product, 0.0, 28 * logit), GpuWork((2 + trains) * product, 0.0, 38 * logit)
    return GpuWork(product, 0.0, 12 * logit), GpuWork((1 + trains) * product, 0.0, 24 * logit)


def fsdp_copies_s(setting: Setting, rates: Rates, unit: float) -> float:
    """Return the time of FSDP2's own copies of a unit of so many parameters, on the stream that computes.

    A gathered unit is read and written into its weights (``foreach_all_gather_copy_out``), in the forward and again in the
    backward; its gradients are read and written, in the dtype they are reduced in, before their reduce-scatter (``_chunk_cat``).
    """
    if setting.shards == 1 or not rates.copies:
        return 0.0
    gathered = 2 * setting.compute_bytes * (1 + setting.reshard)
    reduced = (setting.compute_bytes + setting.reduce_bytes) * setting.trained
    return unit * (gathered + reduced) / (setting.gpu.memory_bytes_per_s * rates.copies)


def parts_s(
    setting: Setting, rates: Rates, unit: float, kinds: Mapping[Kind, int], has_head: bool
) -> Mapping[str, float]:
    """Return the compute time of a micro-batch's forward and backward, by kind; ``unit``: parameters that FSDP moves for a layer.

    Nothing is counted twice: the share of its FLOPs that a GPU attains was fitted to whole steps, so FSDP's copies are in the
    time of the products, and are taken out of that.
    """
    work = layer_work(setting, rates)
    once, layers = work.forward + work.backward, sum(kinds.values())
    forward, backward = head_s(setting, rates)
    head = (forward + backward).times(has_head, has_head, has_head)
    products = layers * once.products_s + head.products_s
    copies = min(layers * fsdp_copies_s(setting, rates, unit), products)
    return {
        "matrix products": products - copies,
        "attention": layers * once.attention_s,
        "norms and activations": layers * once.elementwise_s,
        "loss": head.elementwise_s,
        "FSDP's copies": copies,
        "recomputation": sum(count * work.again[kind].total_s for kind, count in kinds.items()),
    }


def _elementwise_s(setting: Setting, rates: Rates) -> float:
    """Return the seconds of norms, rotary embedding, activation and residuals, op by op or fused."""
    h, f = setting.shape.hidden, setting.shape.intermediate
    if setting.compiled and setting.ours:
        per_token = 80 * h + 10 * f - COMPILED_OF_BYTES * (60 * h + 4 * f)
    elif setting.compiled:
        per_token = 20 * h + 6 * f
    elif setting.fused:  # norms are, 8 h, between residuals; SiLU and its product are two kernels
        per_token = 20 * h + 10 * f
    elif setting.shape.gated:  # Hugging Face's and torchtitan's Llama: RMSNorm in FP32, rotary embedding, SiLU times up
        per_token = 80 * h + 10 * f
    else:  # MPT: LayerNorm in BF16, GELU
        per_token = 30 * h + 8 * f
    return per_token * setting.tokens / (setting.gpu.memory_bytes_per_s * rates.memory)


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, over all its micro-batches."""

    forward_s: float
    backward_s: float  # with what is computed again
    optimizer_s: float
    data_s: float = 0.0  # waiting for data
    compute_s: float | None = None  # of forward and backward; None: measured as a whole, as is what follows
    communication_s: float = 0.0  # of both; what is not hidden is in the first two
    bubble_s: float = 0.0  # a pipeline's GPUs wait for each other
    copies_s: float = 0.0  # between GPU and host memory; the same
    compute_parts_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of ``compute_s``, by what it is

    @property
    def exposed_s(self) -> float | None:
        """Seconds of communication and copies that nothing hides."""
        if self.compute_s is None:
            return None
        return max(0.0, self.forward_s + self.backward_s - self.compute_s)

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.data_s + self.forward_s + self.backward_s + self.bubble_s + self.optimizer_s


def step_time(setting: Setting, rates: Rates) -> StepTime:
    """Predict a step: layers overlapped with their communication, then head and loss.

    In a pipeline the slowest GPU counts.

    The GPUs of a pipeline wait (pp - 1) / chunks of the time that a micro-batch takes them (arXiv 2104.04473, section 2.2).
    """
    parts = {(*sorted(setting.kinds(place).items()), place == setting.pp - 1): place for place in range(setting.pp)}
    found = max((_of_gpu(setting, rates, place) for place in parts.values()), key=lambda each: each.step_s)
    bubble = (setting.pp - 1) / setting.chunks / setting.accumulate
    return dataclasses.replace(found, bubble_s=bubble * (found.forward_s + found.backward_s))


def _of_gpu(setting: Setting, rates: Rates, place: int) -> StepTime:
    """Predict what a GPU does in a step, without waiting for others of its pipeline; ``place``: in that."""
    work, kinds, has_head = layer_work(setting, rates), setting.kinds(place), place == setting.pp - 1
    layers = sum(kinds.values())
    head_forward, head_backward = (each.total_s * has_head for each in head_s(setting, rates))
    unit = unit_parameters(setting)
    of_unit = setting.compute_bytes * unit / setting.units
    gather = setting.units * gather_s(setting, rates, of_unit)
    again = setting.units * ring_s(setting, rates, of_unit, setting.kept_by) if setting.kept_by else gather
    scatter = setting.units * reduce_s(setting, rates, setting.reduce_bytes * setting.trained * unit / setting.units)
    gather /= setting.accumulate if setting.gathers_once else 1
    scatter /= setting.accumulate if setting.reduces_once else 1
    reduce = scatter + again * setting.reshard
    up, both = (host_copies_s(setting, rates, backward=each) for each in (False, True))
    beside = hidden_s if setting.prefetches else in_turn_s
    forward = within_layer_s(setting, rates, FORWARD)
    within = {kind: within_layer_s(setting, rates, times) for kind, times in BACKWARD.items()}
    backward = sum(count * within[kind] for kind, count in kinds.items())
    one_forward = layers * max(beside(work.forward.total_s + forward, gather, rates), up) + head_forward
    one_backward = head_backward + sum(
        count * max(beside(work.backward_s(kind) + within[kind], reduce, rates), both) for kind, count in kinds.items()
    )
    one_forward = rates.whole * one_forward + layers * rates.delay_s / 3
    one_backward = rates.whole * one_backward + layers * rates.delay_s * 2 / 3
    handed = between_stages_s(setting, rates)
    parts = {name: setting.accumulate * s for name, s in parts_s(setting, rates, unit, kinds, has_head).items()}
    return StepTime(
        forward_s=setting.accumulate * (one_forward + handed),
        backward_s=setting.accumulate * (one_backward + handed),
        compute_s=sum(parts.values()),
        communication_s=setting.accumulate * (layers * (gather + reduce + forward) + backward + 2 * handed),
        copies_s=setting.accumulate * layers * (up + both),
        optimizer_s=_optimizer_s(setting, rates, one_forward),
        compute_parts_s=parts,
    )


def unit_parameters(setting: Setting) -> float:
    """Return the parameters moved per layer, with a share of embedding and head, divided by ``tp``."""
    return setting.shape.parameters / setting.shape.layers / setting.tp


# Within a layer: all-gathers and reduce-scatters of hidden states over ``tp``, and exchanges of heads over ``cp``. A backward has those
# of the recomputation, which ends before a layer's last reduce-scatter (docs/parallel.md has the counts).
FORWARD = (2, 2, 1)
BACKWARD: Mapping[Kind, tuple[int, int, int]] = {"none": FORWARD, "operators": (4, 3, 2), "full": (4, 3, 2)}


def within_layer_s(setting: Setting, rates: Rates, times: tuple[int, int, int]) -> float:
    """Return the time of the tp and cp collectives within a layer, which nothing hides."""
    gathers, scatters, exchanges = times
    tokens = setting.micro_batch * setting.seq_len / setting.cp
    hidden = setting.compute_bytes * tokens * setting.shape.hidden
    whole = ring_s(setting, rates, hidden, setting.tp)
    heads = setting.compute_bytes * tokens * 2 * (setting.shape.width + setting.shape.kv_width) / setting.tp
    return (gathers + scatters / rates.scatter) * whole + exchanges * exchange_s(setting, rates, heads)


def exchange_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time of an all-to-all of so many bytes over ``cp``."""
    within = setting.gpu.peers_bytes_per_s * rates.peers
    if setting.cp * setting.tp > setting.gpus_per_host:
        within = min(within, setting.nic_bytes_per_s * rates.network / setting.gpus_on_host)
    return n_bytes * (setting.cp - 1) / setting.cp / within


def between_stages_s(setting: Setting, rates: Rates) -> float:
    """Return the time to send a micro-batch's hidden states on, over the network if hosts are several."""
    if setting.pp == 1:
        return 0.0
    link = setting.gpu.peers_bytes_per_s * rates.peers
    if setting.hosts > 1:
        link = min(link, setting.nic_bytes_per_s * rates.network / setting.gpus_on_host)
    return setting.chunks * setting.compute_bytes * setting.tokens * setting.shape.hidden / link


def host_copies_s(setting: Setting, rates: Rates, *, backward: bool) -> float:
    """Return the time of a layer's simultaneous copies: weights up, gradients down, and its input.

    Both ways at once are slower than each alone, and all GPUs of a host share its memory.
    """
    share = unit_parameters(setting) / setting.shards
    entry = setting.inputs_copied * setting.compute_bytes * setting.tokens * setting.shape.hidden
    link, ram = setting.gpu.host_bytes_per_s, setting.gpu.ram_bytes_per_s * rates.ram / setting.gpus_on_host
    up = share * setting.copied_up + entry * backward
    down = share * setting.copied_down * setting.trained if backward else entry
    return max(up / link, down / link, (up + down) / (rates.both_ways * link), (up + down) / ram)


def hidden_s(compute: float, communication: float, rates: Rates) -> float:
    """Return the time of overlapped compute and communication: the longer, plus a share of the shorter."""
    return max(compute + rates.interference * min(compute, communication), communication)


def in_turn_s(compute: float, communication: float, _: Rates) -> float:
    """Return the time of compute followed by communication."""
    return compute + communication


def ring_s(setting: Setting, rates: Rates, n_bytes: float, n: int, stride: int = 1) -> float:
    """Return the time of an all-gather or reduce-scatter of so many bytes in all, over NVLink and the hosts' links.

    ``n``: GPUs in the ring, each so many (``stride``) after the one before; the rings between them share a host's links.
    """
    within, rings = setting.gpu.peers_bytes_per_s * rates.peers, min(stride, setting.gpus_per_host)
    if n == 1:
        return 0.0
    if n * stride <= setting.gpus_per_host or setting.hosts == 1:
        return n_bytes * (n - 1) / n / within
    link = setting.nic_bytes_per_s * rates.network / rings
    return n_bytes * (n - 1) / n / min(within, link) + (n - 1) * rates.hop_s


def gather_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time to gather so many bytes of weights from the GPUs that shard them."""
    return ring_s(setting, rates, n_bytes, setting.shards, setting.tp)


def reduce_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time to sum so many bytes of gradients: a reduce-scatter over the shards, and with HSDP an all-reduce over the copies."""
    of_a_copy = setting.shards * setting.tp
    copies = setting.gpus // (of_a_copy * setting.pp)
    between = ring_s(setting, rates, n_bytes / setting.shards, copies, of_a_copy)
    return gather_s(setting, rates, n_bytes) / rates.scatter + 2 * between


def _optimizer_s(setting: Setting, rates: Rates, next_forward_s: float) -> float:
    """Return the exposed time of an update, bound by memory; on hosts the next forward may hide it.

    On a host, that forward's copies and the update share memory bandwidth; the norm is computed during the backward, except for the last
    unit's gradients.
    """
    if not setting.updates_on_host:
        per_gpu = (
            setting.update_bytes
            * setting.trained
            * setting.shape.parameters
            / (setting.shards * setting.tp * setting.pp)
        )
        return per_gpu / (setting.gpu.memory_bytes_per_s * rates.memory)
    held, ram = setting.shape.parameters / setting.hosts, setting.gpu.ram_bytes_per_s
    update, norm = (
        n_bytes * setting.trained * held / (ram * rates.update)
        for n_bytes in (setting.update_bytes, setting.norm_bytes)
    )
    copied = setting.copied_up * held / (ram * rates.ram)
    return norm / setting.shape.layers + max(0.0, update + copied - next_forward_s) if norm else update


BYTES = 2  # of a weight in the files: BF16
WAITS = 0.1  # of what writing takes, training waits for a save beside it: 0.013 to 0.096 in docs/measurements


@dataclasses.dataclass(frozen=True, slots=True)
class LoadingCost:
    """The cost of loading weights before the first step."""

    rank0_s: float  # the first host reads and sends everything
    local_s: float  # every host reads its own part
    host_bytes: float  # of memory on the first host while it sends, beside the shards


@dataclasses.dataclass(frozen=True, slots=True)
class SavingCost:
    """The cost of a checkpoint, per host."""

    n_bytes: float
    write_s: float  # beside training
    waits_s: float  # of which training waits
    wanted_bytes: float  # what copies would take: of what is not written when the next update comes, or of all
    staged_bytes: float  # of them, what they take; the update waits for what is neither written nor copied
    best_interval_s: float  # between saves that lose the least (``checkpoint.every = auto``)


def loading(llama: Llama, hosts: int, disk: float, nic: float) -> LoadingCost:
    """Predict it; ``disk``, ``nic``: bytes/s of a host. Two units are in memory at a time: one is read while the other is sent."""
    n_bytes, pieces = BYTES * llama.parameters, UnitSizes.of(Part(llama))
    slowest = min(disk, nic) if hosts > 1 else disk
    return LoadingCost(
        n_bytes / slowest, n_bytes / hosts / disk, 2 * BYTES * max(pieces.layer, pieces.embedding, pieces.head)
    )


def saving(
    n_bytes: float, disk: float, step_s: float | None, mtbf_s: float, room: float = math.inf, *, at_once: bool = False
) -> SavingCost:
    """Predict it; ``n_bytes``: a host's part; ``step_s``: of training; ``mtbf_s``: between failures of the run; ``room``: for copies.

    ``at_once``: the state is on GPUs, from where all is copied that there is room for.
    """
    write_s = n_bytes / disk
    unwritten = n_bytes * max(0.0, 1 - step_s / write_s) if step_s else 0.0
    wanted = n_bytes if at_once else unwritten
    waits_s = WAITS * write_s + max(0.0, unwritten - room) / disk
    # At least 1 s: the best interval for a save that costs nothing would be the shortest possible.
    interval_s = best_interval(max(1.0, waits_s), write_s, mtbf_s)
    return SavingCost(n_bytes, write_s, waits_s, wanted, min(wanted, room), interval_s)
