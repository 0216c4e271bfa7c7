"""Whether attention on this device computes what it should, before the first step.

Knows transformers' Llama and batches; not ranks or files.

Shape suffixes: B sequences, S positions, V vocabulary.
"""

import copy

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from llama405b.batch import Batch
from llama405b.contract.errors import UserError
from llama405b.model.packed import model_inputs

LENGTHS = (48, 16, 64)  # of the documents
VOCABULARY = 256
KEY_HEADS, MOST_SHARING = 2, 8  # heads that share each
MOST = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # difference of logits, whose standard deviation is about 1
TINY = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "tie_word_embeddings": False,
} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def check_attention(
    config: LlamaConfig, attention: str, device: torch.device, dtype: torch.dtype, *, isolated: bool
) -> float:
    """Compare packed documents through one small layer with heads of the model's size, with the same documents alone through sdpa.

    ``isolated``: whether documents that share a sequence do not see each other; else it is compared with one text.

    Returns the largest difference of the logits.

    Raises:
        UserError: It is larger than rounding explains: the backend does not keep documents apart, or is broken here.
    """
    small, each = copy.deepcopy(config), min(MOST_SHARING, config.num_attention_heads // config.num_key_value_heads)
    heads = {"num_key_value_heads": KEY_HEADS, "num_attention_heads": KEY_HEADS * each}
    small.update(TINY | heads | {"hidden_size": config.head_dim * KEY_HEADS * each})
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)), generator=generator).to(device)
    positions_BS = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        small._attn_implementation = attention
        model = LlamaForCausalLM(small).to(device, dtype).eval()
        torch.nn.init.normal_(model.lm_head.weight, std=small.hidden_size**-0.5)
        packed_BSV = _logits(model, Batch(ids_BS, ids_BS, positions_BS if isolated else None))
        model.set_attn_implementation("sdpa")
        parts = ids_BS.split(LENGTHS, 1) if isolated else [ids_BS]
        alone_BSV = torch.cat([_logits(model, Batch(part, part)) for part in parts], 1)
    difference = float((packed_BSV - alone_BSV).abs().max())
    if not difference <= MOST[dtype]:
        kept = "packed documents see each other" if isolated else "it does not compute what sdpa does"
        raise UserError(
            f"--model.attention: with {attention} on {device.type} {kept} (logits differ by {difference:.2g}); use sdpa"
        )
    return difference


def _logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    logits: Tensor = model(**model_inputs(batch, model.config._attn_implementation), use_cache=False).logits.float()
    return logits
