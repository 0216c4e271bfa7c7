"""Split a model over the mesh: layers over ``pp``, matrices over ``tp``, sequences over ``cp``, and the remaining parameters over shards.

With tensor parallelism (arXiv 1909.08053) a rank has a slice of the heads, of the MLP's inner features and of the vocabulary. Between the
matrices it has a slice of the sequence (arXiv 2205.05198), and each rank computes the loss from its slice of the logits. With context
parallelism a rank has a slice of every sequence. Ranks exchange heads for sequence before attention and back after it (arXiv 2309.14509),
so the chosen attention function and the separation of packed documents do not change. transformers' modules and parameter names do not
change either; ``spec.tensors`` knows what each rank holds.

Shape suffixes: B sequences, H heads, S positions, D size of a head; R ranks.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
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
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model.llama import tie_head
from llama405b.parallel.fsdp import check_wrap, device_mesh, shard
from llama405b.settings.axes import NAMES, Axes
from llama405b.settings.schema import LossOf, Parallel
from llama405b.spec.tensors import Holdings

WHOLE, PART = Replicate(), Shard(1)  # layouts of the sequence dimension
OF_MODEL: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=WHOLE, output_layouts=PART),
    "model.norm": SequenceParallel(),
}
HEADS: dict[
    LossOf, ParallelStyle
] = {  # logits: each rank has a slice of the vocabulary; parts: the loss is computed alike on all ranks
    "logits": ColwiseParallel(input_layouts=PART, output_layouts=Shard(-1), use_local_output=False),
    "parts": ColwiseParallel(input_layouts=PART, output_layouts=WHOLE),
}


def split_matrices(model: nn.Module, mesh: DeviceMesh, loss: LossOf = "logits") -> None:
    """Split the matrices of a model on the meta device over the one-dimensional ``mesh``. Call it before FSDP."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    layers = model.model.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        parallelize_module(layer, mesh, _of_layer(), src_data_rank=None)
    present = dict(model.named_modules())
    ends = {name: style for name, style in (OF_MODEL | {"lm_head": HEADS[loss]}).items() if name in present}
    parallelize_module(model, mesh, ends, src_data_rank=None)
    tie_head(model)
    for name in frozen:  # torch's styles recreate some parameters, and recreated norms require gradients
        model.get_parameter(name).requires_grad_(False)
    # FSDP warns about in-place changes to views that the embedding and the head return; nothing changes them in place.
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
    """Let losses and their gradients be computed from logits whose vocabulary is split over the ranks."""
    with loss_parallel() if tp > 1 else contextlib.nullcontext():
        yield


NAME = "context_parallel_"  # prefix for the name of the wrapped attention function


def split_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a model's attention exchange heads for sequence with the other ranks of ``group``."""
    config = model.config
    inner = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, None)
    name = f"{NAME}{config._attn_implementation}"
    ALL_ATTENTION_FUNCTIONS.register(name, _over(inner or _eager(), group))
    config._attn_implementation = name


def attention_of(name: str) -> str:
    """Return the name of the attention function that a context-parallel implementation wraps."""
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
        if kv_heads % n_ranks:  # fewer key heads than ranks: several ranks get the same one
            times = query_BHSD.shape[1] // kv_heads
            key_BHSD, value_BHSD = (each.repeat_interleave(times, 1) for each in (key_BHSD, value_BHSD))
        query, key, value = (exchange(each, 1, 2, group) for each in (query_BHSD, key_BHSD, value_BHSD))
        out_BSHD, _ = inner(_Grouped(module, query.shape[1] // key.shape[1]), query, key, value, mask, **more)
        return exchange(out_BSHD, 1, 2, group), None

    return attend


class _Grouped:
    """An attention module with another number of query heads per key head."""

    def __init__(self, module: nn.Module, each: int) -> None:
        self.module, self.num_key_value_groups = module, each

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its slice along one dimension; return the received slices joined along another."""
    exchanged: Tensor = _Exchange.apply(x, split, join, group)
    return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all whose backward is the reverse all-to-all."""

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
    parts_R = torch.stack(x.chunk(dist.get_world_size(group), split))  # contiguous, whatever the strides of ``x``
    came_R = torch.empty(parts_R.shape, dtype=parts_R.dtype, device=parts_R.device)
    dist.all_to_all_single(came_R, parts_R, group=group)
    return torch.cat(came_R.unbind(), join)


class Stage(nn.Module):
    """The pipeline stages of one rank; with the interleaved schedule several, each a chunk of layers."""

    def __init__(self, whole: PreTrainedModel, chunks: Sequence[Sequence[int]], *, first: bool, last: bool) -> None:
        """Take this rank's modules from a full model on the meta device. ``chunks``: the layers of each stage.

        ``first``, ``last``: whether the first chunk begins with the embedding, and whether the last one ends with the head.
        """
        super().__init__()
        self.config = whole.config
        self.chunks = chunks
        self.model = nn.Module()
        self.model.embed_tokens = whole.model.embed_tokens if first else None
        # A dict keeps the layers' numbers in parameter names; a list would start at 0.
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for chunk in chunks for i in chunk})
        self.model.norm = whole.model.norm if last else None
        self.model.rotary_emb = whole.model.rotary_emb
        self.lm_head = whole.lm_head if last else None

    def forward(self, x: Tensor, chunk: int, position_ids: Tensor, **more: Any) -> Tensor:
        """Run one chunk: token ids or hidden states in, hidden states or logits out.

        ``more``: arguments of each layer, see ``model_inputs``.
        """
        hidden_BSh = self.model.embed_tokens(x) if chunk == 0 and self.model.embed_tokens is not None else x
        mask = more.pop("attention_mask", None)
        around = self.model.rotary_emb(hidden_BSh, position_ids)
        for i in self.chunks[chunk]:
            layer = self.model.layers[str(i)]
            hidden_BSh = layer(
                hidden_BSh,
                attention_mask=mask,
                position_embeddings=around,
                position_ids=position_ids,
                use_cache=False,
                **more,
            )
        if chunk == len(self.chunks) - 1 and self.lm_head is not None:
            hidden_BSh = self.lm_head(self.model.norm(hidden_BSh))
        return hidden_BSh

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of hidden states; call it after FSDP has sharded the module."""
        assert isinstance(self, FSDPModule)
        return fully_shard.state(self)._mp_policy.param_dtype or next(self.parameters()).dtype


def ranks_along(axes: Axes, axis: str) -> list[list[int]]:
    """Return the ranks of each group along an axis, in order of their coordinate on it."""
    others = [name for name in NAMES if name != axis]
    groups: dict[int, list[int]] = {}
    for rank in range(axes.world):
        groups.setdefault(axes.place(rank, others).rank, []).append(rank)
    return list(groups.values())


def group_along(axes: Axes, axis: str) -> dist.ProcessGroup:
    """Make the process groups along an axis, on all ranks; return this rank's group."""
    own, _ = dist.new_subgroups_by_enumeration(ranks_along(axes, axis))
    assert own
    return own


def split(
    model: PreTrainedModel, parallel: Parallel, me: Rank, before_shards: Callable[[nn.Module], None] = lambda _: None
) -> nn.Module:
    """Split a model on the meta device; return the module that this rank computes with.

    ``before_shards``: called with that module after its matrices are split.

    Raises:
        UserError: ``parallel.wrap`` names a class that the model does not have, or units that share parameters.
    """
    check_wrap(model, parallel.wrap)
    mesh, axes = device_mesh(me.axes, me.device.type), me.axes
    own: nn.Module = model
    if axes.cp > 1:
        split_sequences(model, group_along(axes, "cp"))
    if axes.pp > 1:
        stages, place = holdings_of(model, parallel, me).stages, axes.place(me.rank, ("pp",))
        mine = stages[place.rank :: place.size]
        own = Stage(model, mine, first=place.rank == 0, last=place.rank == place.size - 1)
    if axes.tp > 1:
        split_matrices(own, mesh["tp"], parallel.loss)
    before_shards(own)
    shard(own, parallel, me.device, mesh)
    ranks.share_timeout()
    return own


def holdings_of(model: PreTrainedModel, parallel: Parallel, me: Rank) -> Holdings:
    """Return which slices of a not yet split model each rank holds."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Holdings.of(shapes, me.axes, parallel.chunks)
