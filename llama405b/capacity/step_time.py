"""How long a step takes: compute and communication of each unit of FSDP, and how much of one hides the other. Pure.

T: tokens of a micro-batch on a GPU; S: sequence length. The form of the overlap is that of ``hidden_s``; the rates are in
``coefficients.json``, which ``scripts/fit_plan.py`` alone writes, from published measurements.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from llama405b.capacity.setting import Setting

COEFFICIENTS = Path(__file__).with_name("coefficients.json")
NEAREST = {
    "h200-141": "h100-80",
    "b200-180": "h100-80",
    "gb200-186": "h100-80",
    "l40s-48": "a100-80",
}  # not measured yet


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What share of a data sheet's rate is attained, and what no data sheet tells."""

    matmul: Mapping[str, float]  # by GPU: matrix products, of its FLOPs
    interference: float  # of the shorter of compute and communication, the share that delays the longer
    network: float  # of the hosts' links
    hop_s: float  # of a ring's step from rank to rank
    triton: float  # of attention, with MPT's early Triton kernel
    attention: Mapping[str, float]  # by GPU; a prior
    memory: float = 0.75  # of the GPU's memory, by elementwise work; a prior
    peers: float = 0.75  # of NVLink; a prior
    scatter: float = 1.0  # a reduce-scatter's rate, of an all-gather's; a prior
    host_bytes_per_s: float = (
        200e9  # of one host's memory, as AdamW attains: Lambda's published 405B run, 4 s on 8 hosts
    )
    whole: float = 1.0  # forward and backward, measured, of what the rates above give
    delay_s: float = (
        0.0  # of a layer and micro-batch, that nothing hides, measured: launches, hooks, the rest of communication
    )

    @classmethod
    def read(cls) -> "Rates":
        """Read the coefficients."""
        return cls(**json.loads(COEFFICIENTS.read_text()))

    def matmul_of(self, gpu: str) -> float:
        """Of a GPU that nobody measured: that of its nearest kin."""
        return self.matmul.get(gpu) or self.matmul[NEAREST.get(gpu, "h100-80")]

    def attention_of(self, gpu: str) -> float:
        """As ``matmul_of``."""
        return self.attention.get(gpu) or self.attention[NEAREST.get(gpu, "h100-80")]


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, over all its micro-batches."""

    forward_s: float
    backward_s: float  # with what is computed again
    optimizer_s: float
    data_s: float = 0.0  # waiting for data
    compute_s: float | None = None  # of forward and backward; None: measured as a whole, as is what follows
    communication_s: float = 0.0  # of both; what is not hidden is in the first two
    copies_s: float = 0.0  # between GPU and host memory; the same

    @property
    def exposed_s(self) -> float | None:
        """Of communication and copies, what nothing hides."""
        if self.compute_s is None:
            return None
        return max(0.0, self.forward_s + self.backward_s - self.compute_s)

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s


def step_time(setting: Setting, rates: Rates) -> StepTime:
    """Predict a step: every layer beside the communication of its units, then the head and the loss."""
    shape, layers = setting.shape, setting.shape.layers
    forward, backward = layer_s(setting, rates)
    head, logits = _products_s(setting, rates, shape.head), _logits_s(setting, rates)
    rest = (shape.parameters - layers * shape.layer_parameters) / layers  # embedding and head, beside each layer
    unit = shape.layer_parameters + rest
    gather = setting.units * ring_s(setting, rates, setting.compute_bytes * unit / setting.units, setting.shards)
    scatter = setting.units * reduce_s(setting, rates, setting.reduce_bytes * unit / setting.units)
    reduce = scatter + gather * setting.reshard
    copied = unit / setting.shards / setting.gpu.host_bytes_per_s
    beside = hidden_s if setting.prefetches else in_turn_s
    one_forward = layers * max(beside(forward, gather, rates), setting.copied_forward * copied) + head + logits
    one_backward = layers * max(beside(backward, reduce, rates), setting.copied_backward * copied)
    one_backward += 2 * (head + logits)
    one_forward = rates.whole * one_forward + layers * rates.delay_s / 3
    one_backward = rates.whole * one_backward + layers * rates.delay_s * 2 / 3
    return StepTime(
        forward_s=setting.accumulate * one_forward,
        backward_s=setting.accumulate * one_backward,
        compute_s=setting.accumulate * (layers * (forward + backward) + 3 * (head + logits)),
        communication_s=setting.accumulate * layers * (gather + reduce),
        copies_s=setting.accumulate * layers * copied * (setting.copied_forward + setting.copied_backward),
        optimizer_s=_optimizer_s(setting, rates, one_forward),
    )


def layer_s(setting: Setting, rates: Rates) -> tuple[float, float]:
    """Return what a layer computes of a micro-batch: forward; and backward with what checkpointing computes again.

    A backward has twice the products, and 2.5 times flash attention (arXiv:2307.08691). Non-reentrant checkpointing stops before a
    layer's last product, so that full recomputation is not a plain third.
    """
    shape, elementwise = setting.shape, _elementwise_s(setting, rates)
    products, attention = _products_s(setting, rates, shape.matrices), _attention_s(setting, rates)
    forward = products + attention + elementwise
    again = {
        "none": 0.0,
        "op": products / 2 + elementwise,
        "layer": (forward - _products_s(setting, rates, shape.narrow)) / 2,
        "full": forward - _products_s(setting, rates, shape.narrow),
    }[setting.checkpointing]
    return forward, 2 * products + 2.5 * attention + 2 * elementwise + again


def hidden_s(compute: float, communication: float, rates: Rates) -> float:
    """Return how long compute and communication take beside each other: the longer, and a share of the shorter."""
    return max(compute + rates.interference * min(compute, communication), communication)


def in_turn_s(compute: float, communication: float, _: Rates) -> float:
    """Return how long they take one after the other."""
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


def reduce_s(setting: Setting, rates: Rates, n_bytes: float) -> float:
    """Return the time to sum so many bytes of gradients: a reduce-scatter over the shards, and with HSDP an all-reduce over the copies."""
    copies = setting.gpus // setting.shards
    between = ring_s(setting, rates, n_bytes / setting.shards, copies, setting.shards)
    return ring_s(setting, rates, n_bytes, setting.shards) / rates.scatter + 2 * between


def _products_s(setting: Setting, rates: Rates, weights: float) -> float:
    return 2 * weights * setting.tokens / (setting.gpu.flops * rates.matmul_of(setting.gpu.name))


def _attention_s(setting: Setting, rates: Rates) -> float:
    flops = 2 * setting.seq_len * setting.shape.width * setting.tokens  # the causal half of 4 S T width
    return flops / (setting.gpu.flops * rates.attention_of(setting.gpu.name) * (rates.triton if setting.triton else 1))


def _elementwise_s(setting: Setting, rates: Rates) -> float:
    """Norms, rotary embedding, activation, residuals: bytes of a token and layer, counted op by op; fused if compiled."""
    h, f = setting.shape.hidden, setting.shape.intermediate
    if setting.compiled:
        per_token = 20 * h + 6 * f
    elif setting.shape.gated:  # Hugging Face's and torchtitan's Llama: RMSNorm in FP32, rotary embedding, SiLU times up
        per_token = 80 * h + 10 * f
    else:  # MPT: LayerNorm in BF16, GELU
        per_token = 30 * h + 8 * f
    return per_token * setting.tokens / (setting.gpu.memory_bytes_per_s * rates.memory)


def _logits_s(setting: Setting, rates: Rates) -> float:
    """The loss: BF16 logits, an FP32 copy, softmax; 12 bytes a logit, forward."""
    return 12 * setting.shape.vocab * setting.tokens / (setting.gpu.memory_bytes_per_s * rates.memory)


def _optimizer_s(setting: Setting, rates: Rates, next_forward_s: float) -> float:
    """What an update takes of a step: bound by memory, on the GPU or in the host, where the next forward may hide it."""
    if not setting.updates_on_host:
        per_gpu = setting.update_bytes * setting.shape.parameters / setting.shards
        return per_gpu / (setting.gpu.memory_bytes_per_s * rates.memory)
    per_byte = setting.shape.parameters / setting.hosts / rates.host_bytes_per_s
    update, norm = setting.update_bytes * per_byte, setting.norm_bytes * per_byte
    return norm + max(0.0, update - norm - next_forward_s) if norm else update
