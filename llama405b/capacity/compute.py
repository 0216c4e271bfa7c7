"""What a GPU computes in a step, by what it is: seconds. Pure.

T: tokens of a micro-batch on a GPU; S: sequence length. Sources: ``step_time``.
"""

import dataclasses
from collections.abc import Mapping

from llama405b.capacity.coefficients import Rates
from llama405b.capacity.setting import Setting
from llama405b.contract.recompute import Kind

# Of what FP8 is faster than BF16 by the data sheet, with the casts and scales that torchao compiles into kernels: one H200, 16384 x 53248
# by 8192 tokens, forward and backward, 63.7 ms in BF16 and 36.2 in FP8; not compiled 80.3 (docs/measurements/gpu-bench.md).
FP8_SHARE, NOT_COMPILED = 0.88, 0.79
# The same of a whole layer of this trainer, which took 32 % less there; and the share that compiling saved (0.8 %) of the bytes it could.
FP8_OF_LAYER, COMPILED_OF_BYTES = 0.78, 0.28


@dataclasses.dataclass(frozen=True, slots=True)
class GpuWork:
    """Seconds of a GPU's time."""

    products_s: float = 0.0  # matrix products
    attention_s: float = 0.0
    elementwise_s: float = 0.0  # norms, rotary embedding, activation, residuals

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.products_s + self.attention_s + self.elementwise_s

    def times(self, products: float, attention: float, elementwise: float) -> "GpuWork":
        """Return so much of each."""
        return GpuWork(products * self.products_s, attention * self.attention_s, elementwise * self.elementwise_s)

    def __add__(self, other: "GpuWork") -> "GpuWork":
        """Return both."""
        return GpuWork(
            self.products_s + other.products_s,
            self.attention_s + other.attention_s,
            self.elementwise_s + other.elementwise_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWork:
    """Of a layer and a micro-batch."""

    forward: GpuWork
    backward: GpuWork
    again: Mapping[Kind, GpuWork]  # what checkpointing computes once more, in the backward

    def backward_s(self, kind: Kind) -> float:
        """With what is computed again."""
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
    """Return what a layer's adapters take, so many bytes of each feature that their matrices read, and make: memory bounds them.

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
    """Return the same in FP8; in BF16 where the GPU has none."""
    gpu = setting.gpu
    share = FP8_OF_LAYER if setting.ours else FP8_SHARE
    faster = share * gpu.fp8_flops / gpu.flops if setting.compiled else NOT_COMPILED
    return products_s(setting, rates, weights) / (faster if gpu.fp8_flops else 1)


def head_s(setting: Setting, rates: Rates) -> tuple[GpuWork, GpuWork]:
    """Return what the head and the loss compute of a micro-batch, forward and backward.

    Of all logits 12 bytes each in the forward, and twice that in the backward: in BF16, a copy in FP32, softmax. Of parts, operator by
    operator, 28 and 38 (``model.head``), and the product once more.
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
    """Return what a micro-batch's forward and backward compute, by what it is; ``unit``: parameters that FSDP moves for a layer.

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
    """Norms, rotary embedding, activation, residuals: bytes of a token and layer, counted op by op, or fused."""
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
