"""Context parallelism: each rank has a part of every sequence, but in attention, where it has all of it for some of the heads.

Before attention the ranks exchange heads for sequence, and after it back (arXiv 2309.14509): the attention function is the one that was
chosen, packed documents are kept apart as ever, and its cost is the same on all ranks.

Shape suffixes: B sequences, H heads, S positions, D size of a head; R ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "context_parallel_"  # what precedes that of the attention function


def split_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have a model's attention exchange heads for sequence with the other ranks of ``group``."""
    config = model.config
    inner = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, None)
    name = f"{NAME}{config._attn_implementation}"
    ALL_ATTENTION_FUNCTIONS.register(name, _over(inner or _eager(), group))
    config._attn_implementation = name


def attention_of(name: str) -> str:
    """Return the attention function that computes, by the name of an implementation."""
    return name.removeprefix(NAME)


def _eager() -> Callable[..., Any]:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward


def _over(inner: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    n_ranks = dist.get_world_size(group)

    def attend(
        module: nn.Module, query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        kv_heads = key_BHSD.shape[1]
        if kv_heads % n_ranks:  # fewer than ranks: several have the same one
            times = query_BHSD.shape[1] // kv_heads
            key_BHSD, value_BHSD = (each.repeat_interleave(times, 1) for each in (key_BHSD, value_BHSD))
        query, key, value = (exchange(each, 1, 2, group) for each in (query_BHSD, key_BHSD, value_BHSD))
        out_BSHD, _ = inner(_Grouped(module, query.shape[1] // key.shape[1]), query, key, value, mask, **more)
        return exchange(out_BSHD, 1, 2, group), None

    return attend


class _Grouped:
    """A module of attention, whose heads share keys by another number."""

    def __init__(self, module: nn.Module, each: int) -> None:
        self.module, self.num_key_value_groups = module, each

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Give each rank its part of a dimension, and get that part of all ranks, joined in another dimension."""
    exchanged: Tensor = _Exchange.apply(x, split, join, group)
    return exchanged


class _Exchange(torch.autograd.Function):
    """The backward of an exchange is the exchange back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        """See ``exchange``."""
        ctx.back = join, split, group
        return _exchanged(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """See the class."""
        return _exchanged(gradient, *ctx.back), None, None, None


def _exchanged(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    parts_R = torch.stack(x.chunk(dist.get_world_size(group), split))  # in memory without gaps, whatever ``x`` is
    came_R = torch.empty(parts_R.shape, dtype=parts_R.dtype, device=parts_R.device)
    dist.all_to_all_single(came_R, parts_R, group=group)
    return torch.cat(came_R.unbind(), join)
