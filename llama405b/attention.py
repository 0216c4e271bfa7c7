"""Choose attention, the same on all ranks, and check on each that it computes what it should.

Knows ranks and the model's attention; not files.
"""

from typing import NamedTuple

import torch
from transformers import LlamaConfig

from llama405b import ranks
from llama405b.contract.errors import UserError
from llama405b.contract.schema import COMPUTE_BYTES, Config
from llama405b.model.checked import BrokenError, check_attention
from llama405b.model.kernels import candidates, lack
from llama405b.model.packed import mask_bytes
from llama405b.ranks import Ranks

LARGE_MASK_GIB = 1.0


class Attention(NamedTuple):
    """What computes attention, and what to say of it."""

    name: str
    why: str
    checked: list[str]


def choose_attention(config: Config, hf_config: LlamaConfig, me: Ranks) -> Attention:
    """Choose the first implementation that runs, and computes what sdpa does, on every rank.

    Raises:
        UserError: On every rank, if the configured one lacks something, or computes something else, on any.
    """
    dtype = {4: torch.float32, 2: torch.bfloat16}[COMPUTE_BYTES[config.parallel.numerics]]
    isolated = config.data.packing == "isolated"

    def tried(name: str) -> tuple[float, str]:
        if why := lack(name, me.device, dtype):
            return 0.0, why
        try:
            return check_attention(hf_config, name, me.device, dtype, isolated=isolated), ""
        except BrokenError as error:
            return 0.0, str(error)

    *others, last = candidates(config.model.attention)
    lacks = dict[str, None]()
    for name in others:
        difference, why = tried(name)
        if not (found := list(filter(None, ranks.agreed(why)))):
            return Attention(name, "; ".join([*lacks, "the first that runs here"]), _told(config, name, difference))
        lacks[found[0]] = None
    with ranks.refusing_together():
        difference, why = tried(last)
        if why:
            raise UserError(f"--model.attention: {why}; use sdpa")
    return Attention(last, "; ".join(lacks) or "as configured", _told(config, last, difference))


def _told(config: Config, name: str, difference: float) -> list[str]:
    isolated = config.data.packing == "isolated"
    apart = "packed documents are kept apart; " if isolated else ""
    lines = [f"attention was checked on this device: {apart}logits differ by {difference:.1g} from those of sdpa"]
    mask_gib = mask_bytes(name, config.training.micro_batch_size, config.data.seq_len) / 2**30
    if isolated and mask_gib >= LARGE_MASK_GIB:
        lines.append(
            f"where documents share a sequence, {name} needs a mask of {mask_gib:.1f} GiB; flash-attn and varlen need none"
        )
    return lines
