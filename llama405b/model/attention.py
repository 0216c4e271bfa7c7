"""Choose attention, the same on all ranks, and check on each, before the first step, that it computes what it should.

Knows transformers' Llama, batches and ranks; not files.

Shape suffixes: B sequences, S positions, V vocabulary.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config
from llama405b.distributed import collectives
from llama405b.distributed.ranks import Rank
from llama405b.model.batch import Batch
from llama405b.model.inputs import mask_bytes, model_inputs
from llama405b.model.kernels import candidates, lack
from llama405b.model.llama import compute_dtype, head_dim, with_layers

LARGE_MASK_GIB = 1.0
LENGTHS = (48, 16, 64)  # of the documents
VOCABULARY = 256
KEY_HEADS, MOST_SHARING = 2, 8  # heads that share each
MOST = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # difference of logits, whose standard deviation is about 1
TINY = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "tie_word_embeddings": False,
} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


class Attention(NamedTuple):
    """What computes attention, and what to say of it."""

    name: str
    why: str
    checked: list[str]


def choose_attention(config: Config, hf_config: PreTrainedConfig, me: Rank) -> Attention:
    """Choose the first implementation that runs, and computes what sdpa does, on every rank.

    Raises:
        UserError: On every rank, if the configured one lacks something, or computes something else, on any.
    """
    dtype = compute_dtype(config.parallel.numerics)
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
        if not (found := list(filter(None, collectives.all_gather_objects(why)))):
            return Attention(name, "; ".join([*lacks, "the first that runs here"]), _told(config, name, difference))
        lacks[found[0]] = None
    with collectives.raise_on_all_ranks():
        difference, why = tried(last)
        if why:
            raise UserError(f"--model.attention: {why}; use sdpa")
    return Attention(last, "; ".join(lacks) or "as configured", _told(config, last, difference))


def _told(config: Config, name: str, difference: float) -> list[str]:
    isolated = config.data.packing == "isolated"
    what = "packed documents are kept apart" if isolated else "it computes what sdpa does"
    lines = [f"attention verified on this device: {what} (logits within {difference:.1g})"]
    mask_gib = mask_bytes(name, config.training.micro_batch_size, config.data.seq_len) / 2**30
    if isolated and mask_gib >= LARGE_MASK_GIB:
        lines.append(
            f"where documents share a sequence, {name} needs a mask of {mask_gib:.1f} GiB; flash-attn and varlen need none"
        )
    return lines


class BrokenError(Exception):
    """Attention does not compute what it should."""


def check_attention(
    config: PreTrainedConfig, attention: str, device: torch.device, dtype: torch.dtype, *, isolated: bool
) -> float:
    """Compare packed documents through one small layer with heads of the model's size, with the same documents alone through sdpa.

    ``isolated``: whether documents that share a sequence do not attend to each other; else it is compared with one text.

    Returns the largest difference of the logits.

    Raises:
        UserError: The model computes NaN without packing, too.
        BrokenError: They, or the gradients, differ by more than rounding explains, or the backend fails: it does not keep documents
            apart, or is broken here.
    """
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)), generator=generator).to(device)
    positions_BS = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_small(config)).to(device, dtype).eval()
        torch.nn.init.normal_(model.lm_head.weight, std=model.config.hidden_size**-0.5)
        parts = ids_BS.split(LENGTHS, 1) if isolated else [ids_BS]
        alone_BSV, right = _computed(model, [Batch(part, part) for part in parts])
        if not (alone_BSV.isfinite().all() and right.isfinite().all()):
            raise UserError(
                "config.json: one small layer of this model computes NaN, whatever computes attention; check rope_scaling and "
                "rms_norm_eps there, or download it again"
            )
        with _refusing(attention, device):
            model.set_attn_implementation(attention)
            packed_BSV, found = _computed(model, [Batch(ids_BS, ids_BS, positions_BS if isolated else None)])
    difference = float((packed_BSV - alone_BSV).abs().max())
    bent = float((found - right).norm() / right.norm())
    if difference <= MOST[dtype] and bent <= MOST[dtype]:
        return difference
    fault = "packed documents attend to each other" if isolated else "it does not compute what sdpa does"
    found_out = f"logits differ by {difference:.2g}, gradients by {100 * bent:.2g}%"
    raise BrokenError(f"with {attention} on {device.type} {fault} ({found_out})")


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """A model of one layer, with heads of the size of this one's."""
    small, each = copy.deepcopy(config), min(MOST_SHARING, config.num_attention_heads // config.num_key_value_heads)
    heads = {"num_key_value_heads": KEY_HEADS, "num_attention_heads": KEY_HEADS * each}
    small.update(TINY | heads | {"hidden_size": head_dim(config) * KEY_HEADS * each})
    with_layers(small, 1)._attn_implementation = "sdpa"
    return small


def _computed(model: PreTrainedModel, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """The logits of batches, one after the other, and the gradients of attention's weights, flat."""
    logits_BSV: Tensor = torch.cat([
        model(**model_inputs(batch, model.config._attn_implementation), use_cache=False).logits.float() for batch in batches
    ], 1)  # fmt: skip
    weights = list(model.model.layers[0].self_attn.parameters())
    gradients = torch.autograd.grad(logits_BSV.square().sum(), weights)
    return logits_BSV.detach(), torch.cat([each.flatten().float() for each in gradients])


@contextlib.contextmanager
def _refusing(attention: str, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  (kernels raise what they like)
        why = " ".join(str(error).split())[:200]
        raise BrokenError(f"{attention} fails on {device.type} ({why})") from None
