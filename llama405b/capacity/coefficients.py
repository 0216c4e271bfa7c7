"""Which rates a step attains: fitted, by ``scripts/fit_plan.py`` alone, from published measurements; or assumed, as priors. Pure."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

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
        """Read the coefficients."""
        return cls(**json.loads(COEFFICIENTS.read_text()))

    def matmul_of(self, gpu: str) -> float:
        """Of a GPU that nobody measured: that of its nearest kin."""
        return self.matmul.get(gpu) or self.matmul[NEAREST.get(gpu, "h100-80")]

    def attention_of(self, gpu: str) -> float:
        """As ``matmul_of``."""
        return self.attention.get(gpu) or self.attention[NEAREST.get(gpu, "h100-80")]
