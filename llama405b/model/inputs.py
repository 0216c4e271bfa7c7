"""What the model is given of packed documents, so that none sees another.

transformers makes a block mask for sdpa and eager where positions restart. With flash-attn it would do so only for one sequence
at a time, after looking at every layer (which waits for the device): the kernels are told where documents end instead.
"""

from typing import Any

from llama405b.model.batch import Batch
from llama405b.model.kernels import KERNELS


def model_inputs(batch: Batch, attention: str) -> dict[str, Any]:
    """Return the model's arguments for a batch; ``attention``: its implementation."""
    inputs: dict[str, Any] = {"input_ids": batch.ids_BS}
    if batch.positions_BS is not None:
        inputs["position_ids"] = batch.positions_BS
    if attention in KERNELS:
        found = batch.document_ends
        inputs |= {"cu_seq_lens_q": found.ends, "cu_seq_lens_k": found.ends}
        inputs |= {"max_length_q": found.longest, "max_length_k": found.longest}
    return inputs


def mask_bytes(attention: str, n_sequences: int, length: int) -> int:
    """Return the size of the mask that keeps documents apart, (B, 1, S, S) of a byte each; 0 if there is none."""
    return 0 if attention in KERNELS else n_sequences * length * length
