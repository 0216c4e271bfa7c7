"""Matrix products of decoder layers in FP8 (arXiv 2209.05433), by torchao: on meta, before sharding.

Weights, what is gathered of them, gradients, checkpoints and the modules' names stay as they are: each product casts its operands, with
one scale for each tensor, which is the fastest of torchao's recipes. Knows modules and devices; not sharding.
"""

import importlib.util

import torch
from torch import nn

from llama405b.model.llama import is_decoder_layer

LEAST = (8, 9)  # compute capability: Ada, Hopper, Blackwell
MULTIPLE = 16  # of which rows and columns must be


def lack(device: torch.device) -> str:
    """Say what FP8 lacks on a device; "": nothing. A CPU emulates it."""
    if not importlib.util.find_spec("torchao"):
        return "the package torchao is not installed; run `pip install torchao` on the hosts"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST:
        least, own = (".".join(map(str, each)) for each in (LEAST, found))
        return (
            f"it needs a compute capability of {least}, and {torch.cuda.get_device_name(device)} has {own}; use others"
        )
    return ""


def convert(model: nn.Module, device: torch.device) -> int:
    """Have the linear layers of a model's decoder layers compute in FP8; returns how many do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config, converted = Float8LinearConfig(emulate=device.type == "cpu"), []

    def chosen(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        suits = module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        converted.extend([name] * suits)
        return suits

    for layer in model.modules():
        if is_decoder_layer(layer):
            convert_to_float8_training(layer, module_filter_fn=chosen, config=config)
    return len(converted)
