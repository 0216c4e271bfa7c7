"""The dense decoders of transformers that can be trained: a Llama's, and what others have that it has not. Pure.

All have ``model.layers`` of attention (``self_attn``: q, k, v and o projections) and a gated MLP, with the names of a Llama's.
"""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family of models, by what its layers have."""

    prefix: str  # of transformers' classes, such as LlamaForCausalLM
    biases: Literal["asked", "qkv", "none"] = "asked"  # of attention; asked: of all projections if config.json says so
    query_norms: Literal["", "head", "all"] = ""  # of queries and keys: of each head, or of all heads together
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    ends_with_norm: bool = False  # a layer: norms follow attention and the MLP, instead of being before them
    window: int | None = None  # of attention, where config.json does not say
    window_asked: bool = False  # only if use_sliding_window is true

    @property
    def architecture(self) -> str:
        """Transformers' class of the whole model."""
        return f"{self.prefix}ForCausalLM"


FAMILIES = {  # by model_type
    "llama": Family("Llama"),
    "mistral": Family("Mistral", biases="none", window=4096),
    "qwen2": Family("Qwen2", biases="qkv", window_asked=True),
    "qwen3": Family("Qwen3", query_norms="head", window_asked=True),
    "olmo2": Family(
        "Olmo2",
        query_norms="all",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        ends_with_norm=True,
    ),
}
LLAMA = FAMILIES["llama"]
