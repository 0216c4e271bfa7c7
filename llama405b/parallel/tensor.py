"""Tensor parallelism: each rank has some of the heads, of the MLP's inner features and of the vocabulary (arXiv 1909.08053).

Between the matrices each rank has a part of the sequence (arXiv 2205.05198), and the loss is computed where its part of the logits is.
transformers' modules stay as they are; see ``contract.shards`` for what each rank then holds.
"""

import contextlib
import warnings
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from llama405b.contract.schema import LossOf
from llama405b.model.llama import tie_head

WHOLE, PART = Replicate(), Shard(1)  # of the sequence
OF_MODEL: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=PART),
    "model.norm": SequenceParallel(),
}
HEADS: dict[LossOf, ParallelStyle] = {  # of logits each rank has some; the loss of parts is the same on all
    "logits": ColwiseParallel(input_layouts=PART, output_layouts=Shard(-1), use_local_output=False),
    "parts": ColwiseParallel(input_layouts=PART, output_layouts=WHOLE),
}


def split_matrices(model: nn.Module, mesh: DeviceMesh, loss: LossOf = "logits") -> None:
    """Split the matrices of a model on the meta device over the ranks of ``mesh``, which has one axis. Call it before FSDP."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    layers = model.model.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        parallelize_module(layer, mesh, _of_layer(), src_data_rank=None)
    present = dict(model.named_modules())
    ends = {name: style for name, style in (OF_MODEL | {"lm_head": HEADS[loss]}).items() if name in present}
    parallelize_module(model, mesh, ends, src_data_rank=None)
    tie_head(model)
    for name in frozen:  # torch's styles make some parameters anew, and those of norms then take gradients
        model.get_parameter(name).requires_grad_(False)
    # FSDP warns of changes in place to what the embedding and the head return, which are views: nobody makes any.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")


def _of_layer() -> dict[str, ParallelStyle]:
    whole = {"input_kwarg_layouts": {"hidden_states": PART}, "desired_input_kwarg_layouts": {"hidden_states": WHOLE}}
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**whole),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=PART),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(PART,), desired_input_layouts=(WHOLE,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=PART),
    }


@contextlib.contextmanager
def loss_of_parts(tp: int) -> Iterator[None]:
    """Compute losses, and their gradients, of logits of which each rank has a part of the vocabulary."""
    with loss_parallel() if tp > 1 else contextlib.nullcontext():
        yield
