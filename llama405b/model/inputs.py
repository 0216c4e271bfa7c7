"""What the model is given of packed documents, so that none sees another.

transformers makes a block mask for sdpa and eager where positions restart. With flash-attn it would do so only for one sequence
at a time, after looking at every layer (which waits for the device): the kernels are told where documents end instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llama405b.model.batch import Batch
from llama405b.model.kernels import KERNELS


def model_inputs(batch: Batch, attention: str) -> dict[str, Any]:
    """Return the model's arguments for a batch; ``attention``: its implementation."""
    inputs: dict[str, Any] = {"input_ids": batch.ids_BS}
    if batch.positions_BS is not None:
        inputs["position_ids"] = batch.positions_BS
    if attention in KERNELS:
        ends, longest = _ends(batch)
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return inputs


def mask_bytes(attention: str, n_sequences: int, length: int) -> int:
    """Return the size of the mask that keeps documents apart, (B, 1, S, S) of a byte each; 0 if there is none."""
    return 0 if attention in KERNELS else n_sequences * length * length


def _ends(batch: Batch) -> tuple[Tensor, int]:
    """Where documents end in the flattened batch, after a 0 (int32), and the length of the longest."""
    n_sequences, length = batch.ids_BS.shape
    if batch.positions_BS is None:
        ends = torch.arange(0, n_sequences * length + 1, length, dtype=torch.int32, device=batch.ids_BS.device)
        return ends, length
    begins = (batch.positions_BS.flatten() == 0).nonzero().flatten().int()
    ends = F.pad(begins, (0, 1), value=n_sequences * length)
    return ends, int(ends.diff().max())
