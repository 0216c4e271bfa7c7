"""Which implementations of attention there are, and which can run on a device; torch's own for packed documents among them.

Knows transformers' interface of attention and what is installed; not ranks or batches.

Shape suffixes: B sequences, H heads, S positions, D size of a head.
"""

import importlib.metadata
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

VARLEN = "varlen"
SDPA = "sdpa"


class Kernel(NamedTuple):
    """An implementation that is told where documents end, and needs no mask: it runs on CUDA, in BF16."""

    package: str  # that it comes from; "": torch
    capabilities: range  # the major numbers of CUDA devices


KERNELS = {  # the fastest first
    "flash_attention_4": Kernel("flash-attn-4", range(9, 13)),
    "flash_attention_3": Kernel("flash-attn-3", range(8, 10)),
    "flash_attention_2": Kernel("flash-attn", range(8, 13)),
    VARLEN: Kernel("", range(8, 13)),
}
KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.12


def candidates(choice: str) -> tuple[str, ...]:
    """Return the implementations to try, in this order; ``choice``: one of them, or auto."""
    return (*KERNELS, SDPA) if choice == "auto" else (choice,)


def lack(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Say what an implementation lacks here; "" if nothing."""
    if name not in KERNELS:
        return ""
    package, capabilities = KERNELS[name]
    if device.type != "cuda":
        return "flash-attn and varlen need CUDA"
    if dtype is not torch.bfloat16:
        return "flash-attn and varlen compute in BF16 only"
    if package and not _installed(package):
        return f"{package} is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in capabilities else f"{package or name} is not for GPUs of compute capability {major}.{minor}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def attend_varlen(
    _module: nn.Module,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    _mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with torch's own kernel, in the form that transformers calls; returns (B, S, H, D).

    ``cu_seq_lens_q``: where documents end in the flattened batch, after a 0 (int32); ``max_length_q``: the longest.
    """
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query_BHSD, key_BHSD, value_BHSD))
    groups: dict[str, bool] = {"enable_gqa": True} if KNOWS_GROUPS else {}
    if not KNOWS_GROUPS:
        shared = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    ends, longest = cu_seq_lens_q, max_length_q
    out = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **groups)
    return out.unflatten(0, (len(query_BHSD), -1)), None


AttentionInterface.register(VARLEN, attend_varlen)
AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)  # it needs none
