"""Predict how long a step, a load and a save take. Pure.

A step is the compute and the communication of each FSDP unit, less what one hides of the other. T: tokens of a micro-batch on a GPU;
S: sequence length.

The form of the overlap is that of ``overlapped_s``; at which rates: ``hardware``.

Loading and saving are bound by disks and links, and hold host memory meanwhile.
"""

import dataclasses
import math
from collections.abc import Mapping

from llama405b.predict.hardware import Rates, TrainingSetup
from llama405b.predict.run_shape import StageSpec, UnitSizes
from llama405b.settings.axes import RecomputeKind
from llama405b.settings.schema import best_interval_s
from llama405b.spec.models import Llama

# Of what FP8 is faster than BF16 by the data sheet, with the casts and scales that torchao compiles into kernels: one H200, 16384 x 53248
# by 8192 tokens, forward and backward, 63.7 ms in BF16 and 36.2 in FP8; not compiled 80.3 (docs/measurements/gpu-bench.md).
FP8_SHARE, UNCOMPILED_FP8_SHARE = 0.88, 0.79
# The same of a whole layer of this trainer, which took 32 % less there; and the share that compiling saved (0.8 %) of the bytes it could.
FP8_LAYER_SHARE, COMPILED_BYTES_SHARE = 0.78, 0.28


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

    def scaled(self, products: float, attention: float, elementwise: float) -> "GpuWork":
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
    recomputation: Mapping[RecomputeKind, GpuWork]  # what checkpointing computes once more, in the backward

    def backward_s(self, kind: RecomputeKind) -> float:
        """Return the seconds of the backward, with recomputation."""
        return self.backward.total_s + self.recomputation[kind].total_s


def layer_work(setup: TrainingSetup, rates: Rates) -> LayerWork:
    """Return what a layer computes of a micro-batch.

    A backward has twice the products, or as many where they are frozen, and 2.5 times flash attention (arXiv:2307.08691). Non-reentrant
    checkpointing stops before a layer's last product, so that full recomputation is not a plain third.
    """
    weights_s = fp8_products_s if setup.fp8 else products_s
    products = weights_s(setup, rates, setup.shape.matrices)
    flops = 2 * setup.seq_len * setup.shape.width * setup.tokens  # of attention: the causal half of 4 S T width
    attained = setup.gpu.flops * rates.attention_share(setup.gpu.name, setup.attention)
    base = GpuWork(products, flops / attained, _elementwise_s(setup, rates))
    forward = base + adapter_work(setup, rates, 1, 2, 8)
    backward = base.scaled(2 - setup.is_adapter, 2.5, 2) + adapter_work(setup, rates, 2, 10, 4)
    last_product = GpuWork(weights_s(setup, rates, setup.shape.unrepeated_weights))
    recomputation: dict[RecomputeKind, GpuWork] = {
        "none": GpuWork(),
        "operators": forward.scaled(1 - setup.products_kept, 0, 1),
        "full": forward + last_product.scaled(-1, 0, 0),
    }
    return LayerWork(forward, backward, recomputation)


def adapter_work(
    setup: TrainingSetup, rates: Rates, products: int, bytes_per_input: int, bytes_per_output: int
) -> GpuWork:
    """Return the work of a layer's adapters: of small ranks bound by memory, from bytes per input and output feature, else by products.

    Forward, an input is read (2), and an output written, read and added to another (8). Backward, gradients of A and B read input (2)
    and output (2), and that of the input reads an output (2), is written and added to another (8).
    """
    inputs, outputs = setup.adapted_features
    traffic = (bytes_per_input * inputs + bytes_per_output * outputs) * setup.tokens
    memory_s = traffic / (setup.gpu.memory_bytes_per_s * rates.memory)
    compute_s = products_s(setup, rates, products * setup.adapter_rank * (inputs + outputs))
    return GpuWork(max(0.0, compute_s - memory_s), 0.0, memory_s)


def products_s(setup: TrainingSetup, rates: Rates, weights: float) -> float:
    """Return the time of products with so many weights, forward."""
    return 2 * weights * setup.tokens / (setup.gpu.flops * rates.matmul_share(setup.gpu.name))


def fp8_products_s(setup: TrainingSetup, rates: Rates, weights: float) -> float:
    """Return the time of products in FP8; in BF16 where the GPU has no FP8."""
    gpu = setup.gpu
    share = FP8_LAYER_SHARE if setup.is_this_trainer else FP8_SHARE
    faster = share * gpu.fp8_flops / gpu.flops if setup.compiled else UNCOMPILED_FP8_SHARE
    return products_s(setup, rates, weights) / (faster if gpu.fp8_flops else 1)


def head_work(setup: TrainingSetup, rates: Rates) -> tuple[GpuWork, GpuWork]:
    """Return what the head and the loss compute of a micro-batch, forward and backward.

    All logits at once take 12 bytes each in the forward, and twice that in the backward: BF16, an FP32 copy, softmax. In chunks, operator
    by operator, they take 28 and 38 (``model.head``), and the product once more.
    """
    product = products_s(setup, rates, setup.shape.head)
    trains = not setup.is_adapter
    logit = setup.shape.vocab * setup.tokens / (setup.gpu.memory_bytes_per_s * rates.memory)
    if setup.has_chunked_loss:
        return GpuWork(product, 0.0, 28 * logit), GpuWork((2 + trains) * product, 0.0, 38 * logit)
    return GpuWork(product, 0.0, 12 * logit), GpuWork((1 + trains) * product, 0.0, 24 * logit)


def fsdp_copies_s(setup: TrainingSetup, rates: Rates, unit: float) -> float:
    """Return the time of FSDP2's own copies of a unit of so many parameters, on the stream that computes.

    A gathered unit is read and written into its weights (``foreach_all_gather_copy_out``), in the forward and again in the
    backward; its gradients are read and written, in the dtype they are reduced in, before their reduce-scatter (``_chunk_cat``).
    """
    if setup.shards == 1 or not rates.copies:
        return 0.0
    gathered = 2 * setup.compute_bytes * (1 + setup.reshard)
    reduced = (setup.compute_bytes + setup.reduce_bytes) * setup.trained_share
    return unit * (gathered + reduced) / (setup.gpu.memory_bytes_per_s * rates.copies)


def compute_parts_s(
    setup: TrainingSetup, rates: Rates, unit: float, kinds: Mapping[RecomputeKind, int], has_head: bool
) -> Mapping[str, float]:
    """Return the compute time of a micro-batch's forward and backward, by kind; ``unit``: parameters that FSDP moves for a layer.

    Nothing is counted twice: the share of its FLOPs that a GPU attains was fitted to whole steps, so FSDP's copies are in the
    time of the products, and are taken out of that.
    """
    work = layer_work(setup, rates)
    pass_work, layers = work.forward + work.backward, sum(kinds.values())
    forward, backward = head_work(setup, rates)
    head = (forward + backward).scaled(has_head, has_head, has_head)
    products = layers * pass_work.products_s + head.products_s
    copies = min(layers * fsdp_copies_s(setup, rates, unit), products)
    return {
        "matrix products": products - copies,
        "attention": layers * pass_work.attention_s,
        "norms and activations": layers * pass_work.elementwise_s,
        "loss": head.elementwise_s,
        "FSDP's copies": copies,
        "recomputation": sum(count * work.recomputation[kind].total_s for kind, count in kinds.items()),
    }


def _elementwise_s(setup: TrainingSetup, rates: Rates) -> float:
    """Return the seconds of norms, rotary embedding, activation and residuals, op by op or fused."""
    h, f = setup.shape.hidden, setup.shape.intermediate
    if setup.compiled and setup.is_this_trainer:
        per_token = 80 * h + 10 * f - COMPILED_BYTES_SHARE * (60 * h + 4 * f)
    elif setup.compiled:
        per_token = 20 * h + 6 * f
    elif setup.fused:  # norms are, 8 h, between residuals; SiLU and its product are two kernels
        per_token = 20 * h + 10 * f
    elif setup.shape.gated:  # Hugging Face's and torchtitan's Llama: RMSNorm in FP32, rotary embedding, SiLU times up
        per_token = 80 * h + 10 * f
    else:  # MPT: LayerNorm in BF16, GELU
        per_token = 30 * h + 8 * f
    return per_token * setup.tokens / (setup.gpu.memory_bytes_per_s * rates.memory)


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


def step_time(setup: TrainingSetup, rates: Rates) -> StepTime:
    """Predict a step: layers overlapped with their communication, then head and loss.

    In a pipeline the slowest GPU counts.

    The GPUs of a pipeline wait (pp - 1) / chunks of the time that a micro-batch takes them (arXiv 2104.04473, section 2.2).
    """
    stages = {(*sorted(setup.layer_counts(stage).items()), stage == setup.pp - 1): stage for stage in range(setup.pp)}
    slowest = max(
        (_gpu_step_time(setup, rates, stage) for stage in stages.values()), key=lambda gpu_time: gpu_time.step_s
    )
    bubble = (setup.pp - 1) / setup.chunks / setup.accumulate
    return dataclasses.replace(slowest, bubble_s=bubble * (slowest.forward_s + slowest.backward_s))


def _gpu_step_time(setup: TrainingSetup, rates: Rates, stage: int) -> StepTime:
    """Predict what a GPU does in a step, without waiting for others of its pipeline; ``stage``: in that."""
    work, kinds, has_head = layer_work(setup, rates), setup.layer_counts(stage), stage == setup.pp - 1
    layers = sum(kinds.values())
    head_forward, head_backward = (head.total_s * has_head for head in head_work(setup, rates))
    unit = unit_parameters(setup)
    unit_bytes = setup.compute_bytes * unit / setup.units
    gather = setup.units * gather_s(setup, rates, unit_bytes)
    regather = (
        setup.units * ring_s(setup, rates, unit_bytes, setup.reshard_group_size) if setup.reshard_group_size else gather
    )
    scatter = setup.units * reduce_s(setup, rates, setup.reduce_bytes * setup.trained_share * unit / setup.units)
    gather /= setup.accumulate if setup.gathers_once else 1
    scatter /= setup.accumulate if setup.reduces_once else 1
    reduce = scatter + regather * setup.reshard
    up, both_ways = (host_copies_s(setup, rates, backward=is_backward) for is_backward in (False, True))
    overlap = overlapped_s if setup.prefetches else sequential_s
    forward_communication_s = layer_communication_s(setup, rates, FORWARD_COLLECTIVES)
    layer_communication = {
        kind: layer_communication_s(setup, rates, times) for kind, times in BACKWARD_COLLECTIVES.items()
    }
    backward_communication_s = sum(count * layer_communication[kind] for kind, count in kinds.items())
    one_forward = (
        layers * max(overlap(work.forward.total_s + forward_communication_s, gather, rates), up) + head_forward
    )
    one_backward = head_backward + sum(
        count * max(overlap(work.backward_s(kind) + layer_communication[kind], reduce, rates), both_ways)
        for kind, count in kinds.items()
    )
    one_forward = rates.whole * one_forward + layers * rates.delay_s / 3
    one_backward = rates.whole * one_backward + layers * rates.delay_s * 2 / 3
    stage_transfer_s = between_stages_s(setup, rates)
    parts = {name: setup.accumulate * s for name, s in compute_parts_s(setup, rates, unit, kinds, has_head).items()}
    return StepTime(
        forward_s=setup.accumulate * (one_forward + stage_transfer_s),
        backward_s=setup.accumulate * (one_backward + stage_transfer_s),
        compute_s=sum(parts.values()),
        communication_s=setup.accumulate
        * (layers * (gather + reduce + forward_communication_s) + backward_communication_s + 2 * stage_transfer_s),
        copies_s=setup.accumulate * layers * (up + both_ways),
        optimizer_s=_optimizer_s(setup, rates, one_forward),
        compute_parts_s=parts,
    )


def unit_parameters(setup: TrainingSetup) -> float:
    """Return the parameters moved per layer, with a share of embedding and head, divided by ``tp``."""
    return setup.shape.parameters / setup.shape.layers / setup.tp


# Within a layer: all-gathers and reduce-scatters of hidden states over ``tp``, and exchanges of heads over ``cp``. A backward has those
# of the recomputation, which ends before a layer's last reduce-scatter (docs/parallel.md has the counts).
FORWARD_COLLECTIVES = (2, 2, 1)
BACKWARD_COLLECTIVES: Mapping[RecomputeKind, tuple[int, int, int]] = {
    "none": FORWARD_COLLECTIVES,
    "operators": (4, 3, 2),
    "full": (4, 3, 2),
}


def layer_communication_s(setup: TrainingSetup, rates: Rates, counts: tuple[int, int, int]) -> float:
    """Return the time of the tp and cp collectives within a layer, which nothing hides."""
    gathers, scatters, exchanges = counts
    tokens = setup.micro_batch * setup.seq_len / setup.cp
    hidden = setup.compute_bytes * tokens * setup.shape.hidden
    ring_time_s = ring_s(setup, rates, hidden, setup.tp)
    heads = setup.compute_bytes * tokens * 2 * (setup.shape.width + setup.shape.kv_width) / setup.tp
    return (gathers + scatters / rates.scatter) * ring_time_s + exchanges * exchange_s(setup, rates, heads)


def exchange_s(setup: TrainingSetup, rates: Rates, n_bytes: float) -> float:
    """Return the time of an all-to-all of so many bytes over ``cp``."""
    bandwidth = setup.gpu.peers_bytes_per_s * rates.peers
    if setup.cp * setup.tp > setup.gpus_per_host:
        bandwidth = min(bandwidth, setup.nic_bytes_per_s * rates.network / setup.gpus_on_host)
    return n_bytes * (setup.cp - 1) / setup.cp / bandwidth


def between_stages_s(setup: TrainingSetup, rates: Rates) -> float:
    """Return the time to send a micro-batch's hidden states on, over the network if hosts are several."""
    if setup.pp == 1:
        return 0.0
    link = setup.gpu.peers_bytes_per_s * rates.peers
    if setup.hosts > 1:
        link = min(link, setup.nic_bytes_per_s * rates.network / setup.gpus_on_host)
    return setup.chunks * setup.compute_bytes * setup.tokens * setup.shape.hidden / link


def host_copies_s(setup: TrainingSetup, rates: Rates, *, backward: bool) -> float:
    """Return the time of a layer's simultaneous copies: weights up, gradients down, and its input.

    Both ways at once are slower than each alone, and all GPUs of a host share its memory.
    """
    shard_parameters = unit_parameters(setup) / setup.shards
    input_bytes = setup.offloads_inputs * setup.compute_bytes * setup.tokens * setup.shape.hidden
    link, ram = setup.gpu.host_bytes_per_s, setup.gpu.ram_bytes_per_s * rates.ram / setup.gpus_on_host
    up = shard_parameters * setup.copied_up + input_bytes * backward
    down = shard_parameters * setup.copied_down * setup.trained_share if backward else input_bytes
    return max(up / link, down / link, (up + down) / (rates.both_ways * link), (up + down) / ram)


def overlapped_s(compute: float, communication: float, rates: Rates) -> float:
    """Return the time of overlapped compute and communication: the longer, plus a share of the shorter."""
    return max(compute + rates.interference * min(compute, communication), communication)


def sequential_s(compute: float, communication: float, _: Rates) -> float:
    """Return the time of compute followed by communication."""
    return compute + communication


def ring_s(setup: TrainingSetup, rates: Rates, n_bytes: float, n: int, stride: int = 1) -> float:
    """Return the time of an all-gather or reduce-scatter of so many bytes in all, over NVLink and the hosts' links.

    ``n``: GPUs in the ring, each so many (``stride``) after the one before; the rings between them share a host's links.
    """
    local_bandwidth, rings = setup.gpu.peers_bytes_per_s * rates.peers, min(stride, setup.gpus_per_host)
    if n == 1:
        return 0.0
    if n * stride <= setup.gpus_per_host or setup.hosts == 1:
        return n_bytes * (n - 1) / n / local_bandwidth
    link = setup.nic_bytes_per_s * rates.network / rings
    return n_bytes * (n - 1) / n / min(local_bandwidth, link) + (n - 1) * rates.hop_s


def gather_s(setup: TrainingSetup, rates: Rates, n_bytes: float) -> float:
    """Return the time to gather so many bytes of weights from the GPUs that shard them."""
    return ring_s(setup, rates, n_bytes, setup.shards, setup.tp)


def reduce_s(setup: TrainingSetup, rates: Rates, n_bytes: float) -> float:
    """Return the time to sum so many bytes of gradients: a reduce-scatter over the shards, and with HSDP an all-reduce over the copies."""
    gpus_per_copy = setup.shards * setup.tp
    copies = setup.gpus // (gpus_per_copy * setup.pp)
    all_reduce_s = ring_s(setup, rates, n_bytes / setup.shards, copies, gpus_per_copy)
    return gather_s(setup, rates, n_bytes) / rates.scatter + 2 * all_reduce_s


def _optimizer_s(setup: TrainingSetup, rates: Rates, next_forward_s: float) -> float:
    """Return the exposed time of an update, bound by memory; on hosts the next forward may hide it.

    On a host, that forward's copies and the update share memory bandwidth; the norm is computed during the backward, except for the last
    unit's gradients.
    """
    if not setup.updates_on_host:
        per_gpu = (
            setup.update_bytes * setup.trained_share * setup.shape.parameters / (setup.shards * setup.tp * setup.pp)
        )
        products_s = setup.update_flops / (
            setup.shards * setup.pp * setup.gpu.flops * rates.matmul_share(setup.gpu.name)
        )
        return per_gpu / (setup.gpu.memory_bytes_per_s * rates.memory) + products_s
    parameters_per_host, ram = setup.shape.parameters / setup.hosts, setup.gpu.ram_bytes_per_s
    update, norm = (
        n_bytes * setup.trained_share * parameters_per_host / (ram * rates.update)
        for n_bytes in (setup.update_bytes, setup.norm_bytes)
    )
    copy_s = setup.copied_up * parameters_per_host / (ram * rates.ram)
    return norm / setup.shape.layers + max(0.0, update + copy_s - next_forward_s) if norm else update


WEIGHT_BYTES = 2  # of a weight in the files: BF16
SAVE_WAIT_SHARE = 0.1  # of what writing takes, training waits for a save beside it: 0.013 to 0.096 in docs/measurements


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


def loading_cost(llama: Llama, hosts: int, disk: float, nic: float) -> LoadingCost:
    """Predict it; ``disk``, ``nic``: bytes/s of a host. Two units are in memory at a time: one is read while the other is sent."""
    n_bytes, sizes = WEIGHT_BYTES * llama.parameters, UnitSizes.from_spec(StageSpec(llama))
    slowest = min(disk, nic) if hosts > 1 else disk
    return LoadingCost(
        n_bytes / slowest, n_bytes / hosts / disk, 2 * WEIGHT_BYTES * max(sizes.layer, sizes.embedding, sizes.head)
    )


def saving_cost(
    n_bytes: float,
    disk: float,
    step_s: float | None,
    mtbf_s: float,
    max_staged: float = math.inf,
    *,
    copies_all: bool = False,
) -> SavingCost:
    """Predict it; ``n_bytes``: a host's part; ``step_s``: of training; ``mtbf_s``: between failures of the run; ``max_staged``: for copies.

    ``copies_all``: the state is on GPUs, from where all is copied that there is room for.
    """
    write_s = n_bytes / disk
    unwritten_bytes = n_bytes * max(0.0, 1 - step_s / write_s) if step_s else 0.0
    wanted_bytes = n_bytes if copies_all else unwritten_bytes
    waits_s = SAVE_WAIT_SHARE * write_s + max(0.0, unwritten_bytes - max_staged) / disk
    # At least 1 s: the best interval for a save that costs nothing would be the shortest possible.
    interval_s = best_interval_s(max(1.0, waits_s), write_s, mtbf_s)
    return SavingCost(n_bytes, write_s, waits_s, wanted_bytes, min(wanted_bytes, max_staged), interval_s)
