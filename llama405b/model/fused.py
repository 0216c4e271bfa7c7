"""RMSNorm in one kernel, and a SwiGLU that saves only two tensors.

Both need less memory traffic and activation memory than transformers' own. Each is used only if a check on the device finds it
accurate. Knows transformers' modules; not sharding or files.

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

from llama405b.model.llama import activation, family_of, llama_name
from llama405b.spec.models import LLAMA

CHECK_TOKENS, MAX_WIDTH = 64, 512  # size of the check: tokens, and features of the MLP
MAX_ERROR_RATIO = 1.5  # allowed ratio to the rounding error of transformers' own
ROUNDING_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-3}  # relative errors that are always allowed

Forward = Callable[[Any, Tensor], Tensor]


def fused_norm(module: LlamaRMSNorm, x_Th: Tensor) -> Tensor:
    """Replace the forward of ``LlamaRMSNorm``; rounds once instead of before and after the weight."""
    return functional.rms_norm(x_Th, (x_Th.size(-1),), module.weight, module.variance_epsilon)


def fused_mlp(module: LlamaMLP, x_Th: Tensor) -> Tensor:
    """Replace the forward of ``LlamaMLP``; saves only the outputs of the gate and up projections."""
    weight_hf = module.down_proj.weight
    product_Tf = _SwiGLU.apply(module.gate_proj(x_Th), module.up_proj(x_Th), weight_hf)
    if product_Tf.grad_fn is None:  # all before it is frozen, or there is no backward
        return functional.linear(product_Tf, weight_hf)
    out_Th: Tensor = _DownProjection.apply(product_Tf, weight_hf)
    return out_Th


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up (arXiv 2002.05202).

    Saves for ``_DownProjection``, too, so that recomputation can stop before its product.
    """

    @staticmethod
    def forward(ctx: Any, gate_Tf: Tensor, up_Tf: Tensor, weight_hf: Tensor) -> Tensor:
        ctx.save_for_backward(gate_Tf, up_Tf, weight_hf)
        return functional.silu(gate_Tf) * up_Tf

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        [gradient_Tf] = gradients
        gate_Tf, up_Tf, silu_Tf = ctx.unpacked  # activation checkpointing unpacks saved tensors only once
        del ctx.unpacked  # frees the tensors; the graph lives longer
        gate = torch.ops.aten.silu_backward(gradient_Tf * up_Tf, gate_Tf)
        return gate, gradient_Tf * silu_Tf, None


class _DownProjection(torch.autograd.Function):
    """The down projection, which recomputes its input in the backward."""

    @staticmethod
    def forward(ctx: Any, product_Tf: Tensor, weight_hf: Tensor) -> Tensor:
        # The graph node of _SwiGLU: the backward reads its saved tensors, so that nothing is saved twice.
        ctx.keeper = product_Tf.grad_fn
        return functional.linear(product_Tf, weight_hf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        [gradient_Th] = gradients
        gate_Tf, up_Tf, weight_hf = ctx.keeper.saved_tensors
        silu_Tf = functional.silu(gate_Tf)
        ctx.keeper.unpacked = gate_Tf, up_Tf, silu_Tf
        weight = None
        if ctx.needs_input_grad[1]:  # else it is frozen
            weight = gradient_Th.flatten(0, -2).T @ (silu_Tf * up_Tf).flatten(0, -2)
        return gradient_Th @ weight_hf, weight


FORWARDS: dict[str, tuple[type[nn.Module], Forward]] = {
    "RMSNorm": (LlamaRMSNorm, fused_norm),
    "SwiGLU": (LlamaMLP, fused_mlp),
}


def unsupported_reason(name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return why one of ``FORWARDS`` cannot be used for a model on this device, or "".

    On random input, its result and gradients must be as close to FP64 as transformers' own, up to a factor ``MAX_ERROR_RATIO``.
    """
    family = family_of(config)
    is_swiglu = activation(config) == "silu" and not getattr(
        config, "mlp_bias", False
    )  # mlp_bias: in Llama configs only
    if name == "SwiGLU" and not (is_swiglu and family.mlp == LLAMA.mlp):
        return "this model's MLP is not a SwiGLU of separate matrices without biases"
    if name == "RMSNorm" and family.norm_start != LLAMA.norm_start:
        return "this model's norms multiply by 1 + weight"
    kind, fused = FORWARDS[name]
    small = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=min(config.intermediate_size, MAX_WIDTH),
        num_attention_heads=1,  # the default, 32, need not divide the hidden size
    )
    generator = torch.Generator().manual_seed(0)
    module = kind(config.hidden_size, config.rms_norm_eps) if kind is LlamaRMSNorm else kind(small)
    for weight in module.parameters():
        weight.data.normal_(1 if weight.ndim == 1 else 0, weight.size(-1) ** -0.5, generator=generator)
    x_Th = torch.randn(CHECK_TOKENS, config.hidden_size, generator=generator)
    module, x_Th = module.to(device, dtype), x_Th.to(device, dtype)
    usual_values, exact_values = (
        _result_and_gradients(type(module).forward, module, x_Th),
        _result_and_gradients(type(module).forward, module.double(), x_Th.double()),
    )
    try:
        fused_values = _result_and_gradients(fused, module.to(dtype), x_Th)
    except Exception as error:  # noqa: BLE001 - a kernel may raise any exception
        return f"it fails on {device.type} ({' '.join(str(error).split())[:200]})"
    for fused_value, usual_value, exact_value in zip(fused_values, usual_values, exact_values, strict=True):
        fused_error, usual_error = (
            float((value.double() - exact_value).norm() / exact_value.norm()) for value in (fused_value, usual_value)
        )
        if not fused_error <= max(MAX_ERROR_RATIO * usual_error, ROUNDING_ERROR[dtype]):
            return f"it rounds by {fused_error:.1g} on {device.type}, and transformers' own by {usual_error:.1g}"
    return ""


def _result_and_gradients(forward: Forward, module: nn.Module, x_Th: Tensor) -> list[Tensor]:
    """Return a forward's output and the gradients of its sum of squares by input and weights."""
    x_Th = x_Th.detach().requires_grad_()
    with torch.enable_grad():
        out_Th = forward(module, x_Th)
        return [out_Th.detach(), *torch.autograd.grad(out_Th.double().square().sum(), [x_Th, *module.parameters()])]


def fuse(model: nn.Module, name: str) -> None:
    """Replace the forwards of a model's modules by the fused one. Call after sharding."""
    kind, fused = FORWARDS[name]
    for module in model.modules():
        if llama_name(module, model.config) == kind.__name__:
            module.forward = functools.partial(fused, module)
