"""Hardware as data: GPUs by their data sheets, and the rates that a step attains.

Defines the inputs of a step time prediction. GPUs come from ``hardware.toml`` and from a file of the user. Rates are fitted to published
measurements, by ``scripts/fit_plan.py`` only, or assumed as priors. Imports the standard library and msgspec only.
"""

import dataclasses
import functools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from llama405b.contract.errors import UserError, did_you_mean, reason_of
from llama405b.settings.axes import FULL_RECOMPUTE, Recompute, RecomputeKind
from llama405b.spec.models import Llama

HARDWARE_FILE = Path(__file__).with_name("hardware.toml")
GIB = 1 << 30
MEMORY_TOLERANCE = 0.1
DEFAULT_GPU = "h100-80"
DEFAULT_RAM_GB_S = 614.4  # GB/s of a host's memory: two sockets with eight channels of DDR5-4800
MAX_NUMBER = 1e9  # of any number in the file


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as its data sheet has it; B/s in one direction."""

    name: str
    memory_bytes: float
    flops: float  # dense, BF16, per second
    memory_bytes_per_s: float
    peers_bytes_per_s: float  # to the other GPUs of its host
    host_bytes_per_s: float  # to host memory
    ram_bytes_per_s: float  # of its host's memory, all sockets
    product: str = ""  # what nvidia-smi's name of it contains
    per_host: int = 8
    fp8_flops: float = 0.0  # dense; 0: it has none

    @classmethod
    def for_cpu(cls, memory_bytes: float) -> "Gpu":
        """Return a stand-in for a GPU where ranks train on CPUs, which no data sheet describes."""
        # Infinite rates: no term of a data sheet bounds a CPU, only a calibration does.
        return cls("cpu", memory_bytes, *(math.inf,) * 5)

    @property
    def is_cpu(self) -> bool:
        """Whether this stands in for a CPU."""
        return math.isinf(self.flops)


def read_gpus(path: Path | None = None) -> dict[str, Gpu]:
    """Return the GPUs of the table, and of a user's file in the same format, by name.

    Raises:
        UserError: The file cannot be read, or lacks a number.
    """
    return _parse_gpus(HARDWARE_FILE) | (_parse_gpus(path) if path else {})


def find_gpu(name: str, gpus: dict[str, Gpu], option: str = "--gpu") -> Gpu:
    """Return a GPU by name; ``h100``, without memory size, means the default kind or the only one. ``option``: where it was named.

    Raises:
        UserError: It is not in the table, or several are of that name.
    """
    kinds = [kind for kind in gpus if kind.partition("-")[0] == name.lower()]
    for kind in (name, name.lower(), DEFAULT_GPU if DEFAULT_GPU in kinds else "", *kinds[: len(kinds) == 1]):
        if kind in gpus:
            return gpus[kind]
    if kinds:
        raise UserError(f"{option}: {name!r} is ambiguous; use {' or '.join(kinds)}")
    raise UserError(
        f"{option}: {name!r} is not known{did_you_mean(name, gpus)}; use one of {', '.join(gpus)}, or add it with --hardware"
    )


def match_gpu(name: str, memory_bytes: float, gpus: dict[str, Gpu]) -> Gpu | None:
    """Return the GPU with nvidia-smi's name and about this much memory, of which torch sees no more; None: it is not in the table."""
    products = {word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word}
    candidates = [gpu for gpu in gpus.values() if gpu.product.upper() in products]
    matches = [gpu for gpu in candidates if abs(gpu.memory_bytes / memory_bytes - 1) < MEMORY_TOLERANCE]
    if not matches:
        return None
    gpu = min(matches, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return dataclasses.replace(gpu, memory_bytes=min(gpu.memory_bytes, memory_bytes))


def _positive_number(gpu: dict[str, object], key: str) -> float:
    value = float(str(gpu[key]))
    if not 0 < value <= MAX_NUMBER:
        raise ValueError(f"{key} is {value:g}")
    return value


def _parse_gpus(file: Path) -> dict[str, Gpu]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        return {
            name: Gpu(
                name, _positive_number(gpu, "memory_gib") * GIB, _positive_number(gpu, "tflops") * 1e12, _positive_number(gpu,
                "hbm_gb_s") * 1e9, _positive_number(gpu, "nvlink_gb_s") * 1e9, _positive_number(gpu, "pcie_gb_s") * 1e9,
                _positive_number({"ram_gb_s": DEFAULT_RAM_GB_S} | gpu, "ram_gb_s") * 1e9, str(gpu.get("product", "")),
                max(1, round(_positive_number({"gpus_per_host": 8} | gpu, "gpus_per_host"))),
                _positive_number(gpu, "fp8_tflops") * 1e12 if "fp8_tflops" in gpu else 0.0,
            )
            for name, gpu in table["gpu"].items()
        }  # fmt: skip
    except OSError as error:
        raise UserError(f"--hardware: {file}: cannot be read ({reason_of(error)}); correct the path") from None
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(f"--hardware: {file}: {error}; write [gpu.NAME] with the fields of {HARDWARE_FILE}") from None


COEFFICIENTS_FILE = Path(__file__).with_name("coefficients.json")
NEAREST_GPU = {
    "h200-141": "h100-80",
    "b200-180": "h100-80",
    "gb200-186": "h100-80",
    "l40s-48": "a100-80",
}  # not measured yet


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """The share of each data sheet rate that is attained, and rates that no data sheet has."""

    matmul: Mapping[str, float]  # by GPU: matrix products, of its FLOPs
    interference: float  # of the shorter of compute and communication, the share that delays the longer
    network: float  # of the hosts' links
    hop_s: float  # of a ring's step from rank to rank
    triton: float  # of attention, with MPT's early Triton kernel, of FlashAttention 2
    attention: Mapping[str, float]  # by GPU, with FlashAttention 2; a prior
    # of attention, with FlashAttention 3 or 4, of FlashAttention 2: 0.65 of an H200's FLOPs explains published runs of 64K tokens and more
    flash3: float = 1.625
    memory: float = 0.75  # of the GPU's memory, by elementwise work; a prior
    peers: float = 0.75  # of NVLink; a prior
    scatter: float = 1.0  # a reduce-scatter's rate, of an all-gather's; a prior
    # of a host's memory, by AdamW; a prior: Lambda's 405B run, 4 s on 8 hosts with 614 GB/s each
    update: float = 0.3255
    ram: float = 0.75  # of a host's memory, by copies of all its GPUs at once; a prior
    both_ways: float = 1.4  # copies up and down at once, of one way; a prior: 35 of 25 GB/s (docs/plan-accuracy.md)
    # of the GPU's memory, by FSDP's copies; a prior; 0: they are not in the rate of matrix products
    copies: float = 0.9
    whole: float = 1.0  # forward and backward, measured, of what the rates above give
    # of a layer and micro-batch, that nothing hides, measured: launches, hooks, the rest of communication
    delay_s: float = 0.0

    @classmethod
    @functools.cache
    def read(cls) -> "Rates":
        """Read the fitted coefficients."""
        return cls(**json.loads(COEFFICIENTS_FILE.read_text()))

    def matmul_share(self, gpu: str) -> float:
        """Return the attained share of matrix products; for a GPU that was not measured, its nearest kin's."""
        return self.matmul.get(gpu) or self.matmul[NEAREST_GPU.get(gpu, "h100-80")]

    def attention_share(self, gpu: str, kernel: str = "") -> float:
        """As ``matmul_share``; ``kernel``: as in settings. Any that is not named here is taken to be like FlashAttention 2."""
        share = self.attention.get(gpu) or self.attention[NEAREST_GPU.get(gpu, "h100-80")]
        return share * {"triton": self.triton, "flash_attention_3": self.flash3, "flash_attention_4": self.flash3}.get(
            kernel, 1.0
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. Counts of weights are of matrix products alone, without biases and norms."""

    layers: int
    hidden: int
    width: int  # of attention: heads times the size of a head
    kv_width: int
    intermediate: int
    gated: bool  # three matrices in the MLP, else two
    vocab: int
    parameters: int  # all, a tied head once
    ends_with_norm: bool = False  # a layer, and so its last product is computed again, too

    @classmethod
    @functools.lru_cache(64)
    def from_llama(cls, llama: Llama) -> "ModelShape":
        """Return the shape of a Llama."""
        width, kv_width = llama.heads * llama.head_dim, llama.kv_heads * llama.head_dim
        return cls(
            llama.layers, llama.hidden, width, kv_width, llama.intermediate, True, llama.vocab, llama.parameters,
            llama.family.ends_with_norm,
        )  # fmt: skip

    @property
    def unrepeated_weights(self) -> int:
        """Weights of a layer's last product, which checkpointing does not compute again (early stop); else 0."""
        return 0 if self.ends_with_norm else self.hidden * self.intermediate

    @property
    def matrices(self) -> int:
        """Weights of a layer's products."""
        attention = self.hidden * (2 * self.width + 2 * self.kv_width)
        return attention + (2 + self.gated) * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.vocab * self.hidden

    def model_flops(self, seq_len: int) -> float:
        """Return the FLOPs of training on one token: six per weight of a product, and causal attention (``Llama.flops_per_token``)."""
        return 6.0 * (self.layers * (self.matrices + self.width * seq_len) + self.head)

    def recomputed_flops(self, seq_len: int, layers: int) -> float:
        """Return what checkpointing computes again for a token: the forward of so many layers, up to the last product (early stop)."""
        return 2.0 * layers * (self.matrices - self.unrepeated_weights + self.width * seq_len)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A model on a cluster, with everything that changes the time of a step."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    gpus_per_host: int
    nic_bytes_per_s: float  # of a host, one direction
    seq_len: int
    micro_batch: int = 1
    accumulate: int = 1
    reduce_bytes: int = 4  # per gradient
    recompute: Recompute = FULL_RECOMPUTE
    products_kept: float = 1.0  # where that is of operators: as a share; torchtitan keeps every second
    reshard: bool = True  # parameters are gathered again in the backward
    compiled: bool = False
    attention: str = ""  # its kernel
    update_bytes: float = 28.0  # read and written per parameter: AdamW on weight, gradient and two moments in FP32
    update_flops: float = 0.0  # of all matrices, each on one GPU
    updates_on_host: bool = False
    # read per parameter of the last unit before an update that the next forward hides; 0: none does
    norm_bytes: float = 0.0
    copied_up: float = 0.0  # bytes per parameter from host memory, in each forward and backward
    copied_down: float = 0.0  # the same, to host memory, in each backward
    offloads_inputs: bool = (
        False  # each layer's input goes to host memory in the forward, and comes back in the backward
    )
    units: int = 1  # of FSDP in a layer
    # GPUs among which FSDP shards what they all compute; 0: all that the axes leave; fewer: HSDP; 1: DDP
    sharded_over: int = 0
    tp: int = 1  # GPUs that split each matrix, neighbors
    cp: int = 1  # GPUs that split each sequence; FSDP shards over them, too
    stages: tuple[int, ...] = ()  # layers of each pipeline stage, the last of which has the head; (): no pipeline
    chunks: int = 1  # of those stages, on each GPU of a pipeline
    prefetches: bool = True  # a unit is gathered while the one before computes, and reduced while the next does
    compute_bytes: int = 2  # of a gathered weight: BF16
    gathers_once: bool = False  # in a step, not in each of its micro-batches
    reduces_once: bool = False
    reshard_group_size: int = 0  # GPUs that keep a unit gathered between forward and backward; 0: all gather it again
    fused: bool = False  # norms
    fp8: bool = False  # the layers' products
    has_chunked_loss: bool = False  # of some words' logits at a time, which the backward computes again
    # share of the parameters that take gradients; below 1 those are adapters, and matrices take none
    trained_share: float = 1.0
    adapted_features: tuple[int, int] = (
        0,
        0,
    )  # inputs and outputs of a layer's matrices that have adapters, each summed
    adapter_rank: int = 0
    is_this_trainer: bool = False  # this trainer's layers, one of which was measured

    @property
    def is_adapter(self) -> bool:
        """Whether only adapters take gradients, and matrices none."""
        return self.trained_share < 1

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch per GPU, after ``cp`` splits sequences and ``tp`` splits matrices."""
        return self.micro_batch * self.seq_len / (self.cp * self.tp)

    @property
    def step_tokens(self) -> float:
        """Tokens of a step per GPU."""
        return self.tokens * self.accumulate / self.pp

    @property
    def pp(self) -> int:
        """GPUs of a pipeline."""
        return max(1, len(self.stages) // self.chunks)

    def layer_counts(self, stage: int) -> Mapping[RecomputeKind, int]:
        """Return the layers of a GPU at this place in the pipeline, counted by kind of recomputation."""
        return self.recompute.count_kinds(self.stages[stage :: self.pp] or (self.shape.layers,))

    @property
    def hosts(self) -> int:
        """Hosts, the last of which may have fewer GPUs."""
        return math.ceil(self.gpus / self.gpus_per_host)

    @property
    def gpus_on_host(self) -> int:
        """GPUs of a host that is full, or of all there are."""
        return min(self.gpus, self.gpus_per_host)

    @property
    def shards(self) -> int:
        """GPUs among which FSDP shards what they all compute."""
        return self.sharded_over or self.gpus // (self.tp * self.pp)
