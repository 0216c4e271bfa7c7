"""What the model is given of packed documents, so that none sees another.

transformers makes a block mask for sdpa and eager where positions restart. With flash-attn it would do so only for one sequence
at a time, after looking at every layer (which waits for the device): the kernels are told where documents end instead.

Shape suffixes: B sequences, S positions, T positions attended to.
"""

from typing import Any

import torch
from torch import Tensor

from llama405b.model.batch import Batch
from llama405b.model.kernels import KERNELS


def model_inputs(batch: Batch, attention: str, *, is_split: bool = False) -> dict[str, Any]:
    """Return the model's arguments for a batch; ``attention``: its implementation.

    ``is_split``: a rank's hidden states are a part of the sequence, from which transformers would take positions and mask.
    """
    inputs: dict[str, Any] = {"input_ids": batch.ids_BS}
    positions_BS = batch.positions_BS
    if positions_BS is None and (is_split or attention in KERNELS):  # of one shape: compiled layers then have one graph
        positions_BS = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device).expand_as(batch.ids_BS)
    if positions_BS is not None:
        inputs["position_ids"] = positions_BS
    if attention in KERNELS:
        found = batch.document_ends
        inputs |= {"cu_seq_lens_q": found.ends, "cu_seq_lens_k": found.ends}
        inputs |= {"max_length_q": found.longest, "max_length_k": found.longest}
    elif is_split and positions_BS is not None and (batch.positions_BS is not None or attention == "eager"):
        mask_B1ST = document_mask(positions_BS)
        inputs["attention_mask"] = mask_B1ST if attention == "sdpa" else _added(mask_B1ST)
    return inputs


def document_mask(positions_BS: Tensor) -> Tensor:
    """Return which positions each position attends to, (B, 1, S, T): those before it in its document; each 0 begins one."""
    document_BS = (positions_BS == 0).cumsum(-1)
    same_BST = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BST.tril()[:, None]


def _added(mask_B1ST: Tensor) -> Tensor:
    """Return what eager attention adds to its scores."""
    return torch.zeros(mask_B1ST.shape, device=mask_B1ST.device).masked_fill(
        ~mask_B1ST, torch.finfo(torch.bfloat16).min
    )


def mask_bytes(attention: str, n_sequences: int, length: int) -> int:
    """Return the size of the mask that keeps documents apart, (B, 1, S, S) of a byte each; 0 if there is none."""
    return 0 if attention in KERNELS else n_sequences * length * length
