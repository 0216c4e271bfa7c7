"""RMSNorm in one kernel, and a SwiGLU that keeps two tensors, instead of transformers' own: less memory traffic, and less that is kept.

Each is used only where a check on the device finds that it computes what it should. Knows transformers' modules; not sharding or files.

Shape suffixes: T tokens (B and S, flat or not), h hidden size, f intermediate size.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from llama405b.model.llama import llama_name

TOKENS, MOST_WIDE = 64, 512  # of what is checked: tokens, and features of the MLP
WORSE = 1.5  # times the rounding errors of transformers' own
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-3}  # an error that is no fault, relative

Forward = Callable[[Any, Tensor], Tensor]


def norm(module: LlamaRMSNorm, x_Th: Tensor) -> Tensor:
    """Be the forward of ``LlamaRMSNorm``: rounds once, where that rounds before and after the weight."""
    return functional.rms_norm(x_Th, (x_Th.size(-1),), module.weight, module.variance_epsilon)


def mlp(module: LlamaMLP, x_Th: Tensor) -> Tensor:
    """Be the forward of ``LlamaMLP``: keeps what the gate and up projections return, and nothing that is computed from them."""
    weight_hf = module.down_proj.weight
    product_Tf = _SwiGLU.apply(module.gate_proj(x_Th), module.up_proj(x_Th), weight_hf)
    out_Th: Tensor = _Down.apply(product_Tf, weight_hf)
    return out_Th


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (arXiv 2002.05202). Keeps for ``_Down``, too, so that recomputation has all, and ends, before its product."""

    @staticmethod
    def forward(ctx: Any, gate_Tf: Tensor, up_Tf: Tensor, weight_hf: Tensor) -> Tensor:
        ctx.save_for_backward(gate_Tf, up_Tf, weight_hf)
        return functional.silu(gate_Tf) * up_Tf

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        [gradient_Tf] = gradients
        gate_Tf, up_Tf, silu_Tf = ctx.unpacked  # activation checkpointing gives back once what was kept
        del ctx.unpacked  # the graph lives longer
        gate = torch.ops.aten.silu_backward(gradient_Tf * up_Tf, gate_Tf)
        return gate, gradient_Tf * silu_Tf, None


class _Down(torch.autograd.Function):
    """The down projection, which computes its input again in the backward."""

    @staticmethod
    def forward(ctx: Any, product_Tf: Tensor, weight_hf: Tensor) -> Tensor:
        ctx.keeper = product_Tf.grad_fn
        return functional.linear(product_Tf, weight_hf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        [gradient_Th] = gradients
        gate_Tf, up_Tf, weight_hf = ctx.keeper.saved_tensors
        silu_Tf = functional.silu(gate_Tf)
        ctx.keeper.unpacked = gate_Tf, up_Tf, silu_Tf
        weight = gradient_Th.flatten(0, -2).T @ (silu_Tf * up_Tf).flatten(0, -2)
        return gradient_Th @ weight_hf, weight


FORWARDS: dict[str, tuple[type[nn.Module], Forward]] = {"RMSNorm": (LlamaRMSNorm, norm), "SwiGLU": (LlamaMLP, mlp)}


def lack(name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Say why one of ``FORWARDS`` is not used for a model on this device; "": it is.

    On random input, its result and gradients must be as near to those in FP64 as transformers' own are, but for ``WORSE``.
    """
    if name == "SwiGLU" and (config.hidden_act != "silu" or getattr(config, "mlp_bias", False)):  # a Llama alone has it
        return "this model's MLP is another"
    kind, fused = FORWARDS[name]
    small = LlamaConfig(hidden_size=config.hidden_size, intermediate_size=min(config.intermediate_size, MOST_WIDE))
    generator = torch.Generator().manual_seed(0)
    module = kind(config.hidden_size, config.rms_norm_eps) if kind is LlamaRMSNorm else kind(small)
    for weight in module.parameters():
        weight.data.normal_(1 if weight.ndim == 1 else 0, weight.size(-1) ** -0.5, generator=generator)
    x_Th = torch.randn(TOKENS, config.hidden_size, generator=generator)
    module, x_Th = module.to(device, dtype), x_Th.to(device, dtype)
    usual, exact = (
        _computed(type(module).forward, module, x_Th),
        _computed(type(module).forward, module.double(), x_Th.double()),
    )
    try:
        found = _computed(fused, module.to(dtype), x_Th)
    except Exception as error:  # noqa: BLE001 - a kernel raises what it likes
        return f"it fails on {device.type} ({' '.join(str(error).split())[:200]})"
    for mine, theirs, right in zip(found, usual, exact, strict=True):
        own, allowed = (float((each.double() - right).norm() / right.norm()) for each in (mine, theirs))
        if not own <= max(WORSE * allowed, ROUNDING[dtype]):
            return f"it rounds by {own:.1g} on {device.type}, and transformers' own by {allowed:.1g}"
    return ""


def _computed(forward: Forward, module: nn.Module, x_Th: Tensor) -> list[Tensor]:
    """Return what a forward returns, and the gradients of its sum of squares by input and weights."""
    x_Th = x_Th.detach().requires_grad_()
    with torch.enable_grad():
        out_Th = forward(module, x_Th)
        return [out_Th.detach(), *torch.autograd.grad(out_Th.double().square().sum(), [x_Th, *module.parameters()])]


def fuse(model: nn.Module, name: str) -> None:
    """Have a model's modules compute so. Call it after sharding."""
    kind, fused = FORWARDS[name]
    for module in model.modules():
        if llama_name(module, model.config) == kind.__name__:
            module.forward = functools.partial(fused, module)
