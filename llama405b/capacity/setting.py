"""What is trained, on what, and how: all that a prediction takes. Pure; standard library and msgspec alone."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from llama405b.capacity.hardware import Gpu
from llama405b.contract.recompute import FULL, Kind, Recompute
from llama405b.contract.weights import Llama


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer. Counts of weights are of matrix products alone, without biases and norms."""

    layers: int
    hidden: int
    width: int  # of attention: heads times the size of a head
    kv_width: int
    intermediate: int
    gated: bool  # three matrices in the MLP, else two
    vocab: int
    parameters: int  # all, a tied head once
    layer_parameters: int
    ends_with_norm: bool = False  # a layer, and so its last product is computed again, too

    @classmethod
    @functools.lru_cache(64)
    def of(cls, llama: Llama) -> "Shape":
        """Return a Llama's."""
        layer = sum(math.prod(shape) for name, shape in llama.tensors().items() if ".layers.0." in name)
        width, kv_width = llama.heads * llama.head_dim, llama.kv_heads * llama.head_dim
        return cls(
            llama.layers, llama.hidden, width, kv_width, llama.intermediate, True, llama.vocab, llama.parameters, layer,
            llama.family.ends_with_norm,
        )  # fmt: skip

    @property
    def narrow(self) -> int:
        """Weights of the last product of a layer, if checkpointing does not compute it again."""
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
        return 2.0 * layers * (self.matrices - self.narrow + self.width * seq_len)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A shape on a cluster, with all that changes its time or memory."""

    shape: Shape
    gpu: Gpu
    gpus: int
    gpus_per_host: int
    nic_bytes_per_s: float  # of a host, one direction
    seq_len: int
    micro_batch: int = 1
    accumulate: int = 1
    reduce_bytes: int = 4  # per gradient
    recompute: Recompute = FULL
    products_kept: float = 1.0  # where that is of operators: as a share; torchtitan keeps every second
    reshard: bool = True  # parameters are gathered again in the backward
    compiled: bool = False
    triton: bool = False  # attention by the kernel of MPT's time
    update_bytes: float = 28.0  # read and written per parameter: AdamW on weight, gradient and two moments in FP32
    updates_on_host: bool = False
    # read per parameter of the last unit before an update that the next forward hides; 0: none does
    norm_bytes: float = 0.0
    copied_up: float = 0.0  # bytes per parameter from host memory, in each forward and backward
    copied_down: float = 0.0  # the same, to host memory, in each backward
    inputs_copied: bool = False  # each layer's input goes to host memory in the forward, and comes back in the backward
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
    kept_by: int = 0  # GPUs that keep a unit gathered between forward and backward; 0: all gather it again
    fused: bool = False  # norms
    fp8: bool = False  # the layers' products
    loss_of_parts: bool = False  # of some words' logits at a time, which the backward computes again
    # share of the parameters that take gradients; below 1 those are adapters, and matrices take none
    trained: float = 1.0
    adapted: tuple[int, int] = (0, 0)  # inputs and outputs of a layer's matrices that have adapters, each summed
    ours: bool = False  # this trainer's layers, one of which was measured

    @property
    def frozen(self) -> bool:
        """Whether matrices take no gradients, but adapters beside them."""
        return self.trained < 1

    @property
    def tokens(self) -> float:
        """Of a micro-batch, as many as a GPU computes alone: those of a sequence, and of each matrix, are split."""
        return self.micro_batch * self.seq_len / (self.cp * self.tp)

    @property
    def step_tokens(self) -> float:
        """Of a step, for each GPU."""
        return self.tokens * self.accumulate / self.pp

    @property
    def pp(self) -> int:
        """GPUs of a pipeline."""
        return max(1, len(self.stages) // self.chunks)

    def kinds(self, place: int) -> Mapping[Kind, int]:
        """How many layers a GPU of this place in the pipeline has, by what they compute again."""
        return self.recompute.counts(self.stages[place :: self.pp] or (self.shape.layers,))

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
