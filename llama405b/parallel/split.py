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
from llama405b.model.llama import rotary_embeddings, tie_head
from llama405b.parallel.fsdp import make_device_mesh, shard_model
from llama405b.parallel.fsdp_internals import compute_dtype
from llama405b.settings.axes import AXIS_NAMES, Axes
from llama405b.settings.schema import LossMode, Parallel
from llama405b.spec.tensors import ShardLayout

REPLICATED, SEQUENCE_SHARD = Replicate(), Shard(1)  # layouts of the sequence dimension
MODEL_STYLES: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=REPLICATED, output_layouts=SEQUENCE_SHARD),
    "model.norm": SequenceParallel(),
}
HEAD_STYLES: dict[
    LossMode, ParallelStyle
] = {  # full: each rank has a slice of the vocabulary; chunked: the loss is computed alike on all ranks
    "full": ColwiseParallel(input_layouts=SEQUENCE_SHARD, output_layouts=Shard(-1), use_local_output=False),
    "chunked": ColwiseParallel(input_layouts=SEQUENCE_SHARD, output_layouts=REPLICATED),
}


def split_matrices(model: nn.Module, mesh: DeviceMesh, loss_mode: LossMode = "full") -> None:
    """Split the matrices of a model on the meta device over the one-dimensional ``mesh``. Call it before FSDP."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    layers = model.model.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        parallelize_module(layer, mesh, _layer_styles(), src_data_rank=None)
    modules = dict(model.named_modules())
    styles = {
        name: style for name, style in (MODEL_STYLES | {"lm_head": HEAD_STYLES[loss_mode]}).items() if name in modules
    }
    parallelize_module(model, mesh, styles, src_data_rank=None)
    tie_head(model)
    for name in frozen:  # torch's styles recreate some parameters, and recreated norms require gradients
        model.get_parameter(name).requires_grad_(False)
    # FSDP warns about in-place changes to views that the embedding and the head return; nothing changes them in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")


def _layer_styles() -> dict[str, ParallelStyle]:
    gather_sequence = {
        "input_kwarg_layouts": {"hidden_states": SEQUENCE_SHARD},
        "desired_input_kwarg_layouts": {"hidden_states": REPLICATED},
    }
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**gather_sequence),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=SEQUENCE_SHARD),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(SEQUENCE_SHARD,), desired_input_layouts=(REPLICATED,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=SEQUENCE_SHARD),
    }


@contextlib.contextmanager
def vocab_parallel_loss(tp: int) -> Iterator[None]:
    """Let losses and their gradients be computed from logits whose vocabulary is split over the ranks."""
    with loss_parallel() if tp > 1 else contextlib.nullcontext():
        yield


NAME_PREFIX = "context_parallel_"  # prefix for the name of the wrapped attention function


def split_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make a model's attention exchange heads for sequence with the other ranks of ``group``."""
    config = model.config
    inner = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, None)
    name = f"{NAME_PREFIX}{config._attn_implementation}"
    ALL_ATTENTION_FUNCTIONS.register(name, _make_context_parallel(inner or _eager_attention(), group))
    config._attn_implementation = name


def base_attention_name(name: str) -> str:
    """Return the name of the attention function that a context-parallel implementation wraps."""
    return name.removeprefix(NAME_PREFIX)


def _eager_attention() -> Callable[..., Any]:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward


def _make_context_parallel(inner: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    n_ranks = dist.get_world_size(group)

    def attend(
        module: nn.Module, query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        kv_heads = key_BHSD.shape[1]
        if kv_heads % n_ranks:  # fewer key heads than ranks: several ranks get the same one
            n_repeats = query_BHSD.shape[1] // kv_heads
            key_BHSD, value_BHSD = (tensor.repeat_interleave(n_repeats, 1) for tensor in (key_BHSD, value_BHSD))
        query, key, value = (exchange(tensor, 1, 2, group) for tensor in (query_BHSD, key_BHSD, value_BHSD))
        out_BSHD, _ = inner(
            _RegroupedAttention(module, query.shape[1] // key.shape[1]), query, key, value, mask, **kwargs
        )
        return exchange(out_BSHD, 1, 2, group), None

    return attend


class _RegroupedAttention:
    """An attention module with another number of query heads per key head."""

    def __init__(self, module: nn.Module, n_groups: int) -> None:
        self.module, self.num_key_value_groups = module, n_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def exchange(x: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Send each rank its slice along one dimension; return the received slices joined along another."""
    result: Tensor = _Exchange.apply(x, split_dim, join_dim, group)
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all whose backward is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
        """See ``exchange``."""
        ctx.back = join_dim, split_dim, group
        return _all_to_all(x, split_dim, join_dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """See the class."""
        return _all_to_all(gradient, *ctx.back), None, None, None


def _all_to_all(x: Tensor, split_dim: int, join_dim: int, group: dist.ProcessGroup) -> Tensor:
    parts_R = torch.stack(x.chunk(dist.get_world_size(group), split_dim))  # contiguous, whatever the strides of ``x``
    received_R = torch.empty(parts_R.shape, dtype=parts_R.dtype, device=parts_R.device)
    dist.all_to_all_single(received_R, parts_R, group=group)
    return torch.cat(received_R.unbind(), join_dim)


class PipelineStages(nn.Module):
    """The pipeline stages of one rank; with the interleaved schedule several, each a chunk of layers."""

    def __init__(
        self, full_model: PreTrainedModel, chunks: Sequence[Sequence[int]], *, first: bool, last: bool
    ) -> None:
        """Take this rank's modules from a full model on the meta device. ``chunks``: the layers of each stage.

        ``first``, ``last``: whether the first chunk begins with the embedding, and whether the last one ends with the head.
        """
        super().__init__()
        self.config = full_model.config
        self.chunks = chunks
        self.model = nn.Module()
        self.model.config = full_model.config
        self.model.embed_tokens = full_model.model.embed_tokens if first else None
        # A dict keeps the layers' numbers in parameter names; a list would start at 0.
        self.model.layers = nn.ModuleDict({str(i): full_model.model.layers[i] for chunk in chunks for i in chunk})
        self.model.norm = full_model.model.norm if last else None
        self.model.rotary_emb = full_model.model.rotary_emb
        self.lm_head = full_model.lm_head if last else None

    def forward(self, x: Tensor, chunk: int, position_ids: Tensor, **kwargs: Any) -> Tensor:
        """Run one chunk: token ids or hidden states in, hidden states or logits out.

        ``kwargs``: arguments of each layer, see ``model_inputs``.
        """
        hidden_BSh = self.model.embed_tokens(x) if chunk == 0 and self.model.embed_tokens is not None else x
        mask = kwargs.pop("attention_mask", None)
        position_embeddings = rotary_embeddings(self.model, hidden_BSh, position_ids)
        for i in self.chunks[chunk]:
            layer = self.model.layers[str(i)]
            hidden_BSh = layer(
                hidden_BSh,
                attention_mask=mask,
                position_embeddings=position_embeddings[i],
                position_ids=position_ids,
                use_cache=False,
                **kwargs,
            )
        if chunk == len(self.chunks) - 1 and self.lm_head is not None:
            hidden_BSh = self.lm_head(self.model.norm(hidden_BSh))
        return hidden_BSh

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of hidden states; call it after FSDP has sharded the module."""
        return compute_dtype(self)


def ranks_along(axes: Axes, axis: str) -> list[list[int]]:
    """Return the ranks of each group along an axis, in order of their coordinate on it."""
    other_axes = [name for name in AXIS_NAMES if name != axis]
    groups: dict[int, list[int]] = {}
    for rank in range(axes.world_size):
        groups.setdefault(axes.coordinate(rank, other_axes).rank, []).append(rank)
    return list(groups.values())


def make_group_along(axes: Axes, axis: str) -> dist.ProcessGroup:
    """Make the process groups along an axis, on all ranks; return this rank's group."""
    group, _ = dist.new_subgroups_by_enumeration(ranks_along(axes, axis))
    assert group
    return group


def split_model(
    model: PreTrainedModel,
    parallel: Parallel,
    rank: Rank,
    before_sharding: Callable[[nn.Module], None] | None = None,
    loss_mode: LossMode = "full",
) -> nn.Module:
    """Split a model on the meta device; return the module that this rank computes with.

    ``before_sharding``: called with that module after its matrices are split.
    """
    mesh, axes = make_device_mesh(rank.axes, rank.device.type), rank.axes
    local_model: nn.Module = model
    if axes.cp > 1:
        split_sequences(model, make_group_along(axes, "cp"))
    if axes.pp > 1:
        stages, coordinate = shard_layout_of(model, parallel, rank).stages, axes.coordinate(rank.index, ("pp",))
        local_stages = stages[coordinate.rank :: coordinate.size]
        local_model = PipelineStages(
            model, local_stages, first=coordinate.rank == 0, last=coordinate.rank == coordinate.size - 1
        )
    if axes.tp > 1:
        split_matrices(local_model, mesh["tp"], loss_mode)
    if before_sharding:
        before_sharding(local_model)
    shard_model(local_model, parallel, rank.device, mesh)
    ranks.share_timeout()
    return local_model


def shard_layout_of(model: PreTrainedModel, parallel: Parallel, rank: Rank) -> ShardLayout:
    """Return which slices of a not yet split model each rank holds."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return ShardLayout.from_shapes(shapes, rank.axes, parallel.virtual_stages)
