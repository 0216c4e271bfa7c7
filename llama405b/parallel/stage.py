"""A pipeline stage: some of transformers' decoder layers, with the embedding or the head; parameters keep their names in the file."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel


class Stage(nn.Module):
    """The stages of one rank: with the interleaved schedule several, each a chunk of its layers."""

    def __init__(self, whole: PreTrainedModel, chunks: Sequence[Sequence[int]], *, first: bool, last: bool) -> None:
        """Take what is this rank's of a whole model, which is on the meta device. ``chunks``: the layers of each stage.

        ``first``, ``last``: whether the first chunk begins with the embedding, and the last one ends with the head.
        """
        super().__init__()
        self.config = whole.config
        self.chunks = chunks
        self.model = nn.Module()
        self.model.embed_tokens = whole.model.embed_tokens if first else None
        # The layers' numbers are names; a list would begin at 0.
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for chunk in chunks for i in chunk})
        self.model.norm = whole.model.norm if last else None
        self.model.rotary_emb = whole.model.rotary_emb
        self.lm_head = whole.lm_head if last else None

    def forward(self, x: Tensor, chunk: int, position_ids: Tensor, **more: Any) -> Tensor:
        """Return what a chunk makes of its input: of token ids or hidden states, hidden states or logits.

        ``more``: of each layer, see ``model_inputs``.
        """
        hidden_BSh = self.model.embed_tokens(x) if chunk == 0 and self.model.embed_tokens is not None else x
        mask = more.pop("attention_mask", None)
        around = self.model.rotary_emb(hidden_BSh, position_ids)
        for i in self.chunks[chunk]:
            layer = self.model.layers[str(i)]
            hidden_BSh = layer(
                hidden_BSh,
                attention_mask=mask,
                position_embeddings=around,
                position_ids=position_ids,
                use_cache=False,
                **more,
            )
        if chunk == len(self.chunks) - 1 and self.lm_head is not None:
            hidden_BSh = self.lm_head(self.model.norm(hidden_BSh))
        return hidden_BSh

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of hidden states, once FSDP has sharded it."""
        assert isinstance(self, FSDPModule)
        return fully_shard.state(self)._mp_policy.param_dtype or next(self.parameters()).dtype
