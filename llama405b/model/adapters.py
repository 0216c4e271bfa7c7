"""Adapters in a model on the meta device: a linear layer keeps its name and its weight, and has two narrow ones within it.

See ``contract.adapters`` for what they are. Knows modules and how tensor parallelism split them; not files or the optimizer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from llama405b.contract.groups import is_frozen
from llama405b.contract.schema import Adapter
from llama405b.model.llama import is_decoder_layer


class LoraLinear(nn.Linear):
    """A linear layer that adds what its adapter makes of the same input."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + B scaling A x, scaled where it is narrow.

        W's product is the last one, which checkpointing then does not compute again (early stop).
        """
        added = self.lora_B(self.lora_A(x) * self.scaling)
        return super().forward(x) + added


def add_adapters(model: nn.Module, adapter: Adapter, dtype: torch.dtype, groups: Sequence[str] = ()) -> None:
    """Give the targets adapters of a dtype. Call it once matrices are split, and before FSDP shards them.

    ``groups``: ``optimizer.groups``, which may freeze some.
    """
    for layer_name, layer in model.named_modules():
        if not is_decoder_layer(layer):
            continue
        for name, linear in list(layer.named_modules(prefix=layer_name)):
            if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in adapter.targets:
                _add(linear, adapter, dtype)
                for factor, parameter in linear.named_parameters(prefix=name):
                    parameter.requires_grad_(".lora_" in factor and not is_frozen(groups, factor))


def _add(linear: nn.Linear, adapter: Adapter, dtype: torch.dtype) -> None:
    """Make one linear layer's."""
    narrow, wide = (
        nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)
        for inputs, outputs in ((linear.in_features, adapter.rank), (adapter.rank, linear.out_features))
    )
    if isinstance(linear.weight, DTensor):  # A is split as the matrix is by its inputs, and B by its outputs
        by_inputs = linear.weight.placements == (Shard(1),)
        _place(narrow, linear.weight, Shard(1) if by_inputs else Replicate())
        _place(wide, linear.weight, Replicate() if by_inputs else Shard(0))
    linear.__class__ = LoraLinear
    linear.lora_A, linear.lora_B, linear.scaling = narrow, wide, adapter.alpha / adapter.rank


def _place(factor: nn.Linear, matrix: DTensor, placement: Placement) -> None:
    placed = distribute_tensor(factor.weight.data, matrix.device_mesh, [placement], src_data_rank=None)
    factor.weight = nn.Parameter(placed)
