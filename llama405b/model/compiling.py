"""torch.compile of decoder layers: one graph for all of them. Knows modules and what a machine has; nothing of sharding."""

import functools
import os
import shutil
from importlib.util import find_spec

import torch
from torch import nn

from llama405b.model.llama import is_decoder_layer

COMPILERS = ("cc", "gcc", "clang")  # of C, one of which torch and Triton call


def lack(device: torch.device) -> str:
    """Say what this machine lacks to compile for a device; "": nothing."""
    if device.type == "cuda" and not find_spec("triton"):
        return "torch.compile needs the package triton for GPUs, and it is not installed here"
    names = [os.environ["CC"]] if os.environ.get("CC") else COMPILERS
    if any(map(shutil.which, names)):
        return ""
    return f"torch.compile needs a C compiler, and there is no {' or '.join(names)} here"


def compile_layers(model: nn.Module) -> None:
    """Compile the layers' computation. Call it after sharding, and before activation checkpointing.

    FSDP's hooks and checkpointing stay outside of the graph, which has neither a layer's name nor its number: so one serves all layers,
    and parameters keep their names.
    """
    compiled = functools.cache(functools.partial(torch.compile, fullgraph=True))
    for module in model.modules():
        if is_decoder_layer(module):
            module.forward = functools.partial(compiled(type(module).forward), module)
