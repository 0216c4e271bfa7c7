"""Split a model over the mesh: layers over ``pp``, matrices over ``tp``, sequences over ``cp``, and the remaining parameters over shards.

With tensor parallelism (arXiv 1909.08053) a rank has a slice of the heads, of the MLP's inner features and of the vocabulary. Between the
matrices it has a slice of the sequence (arXiv 2205.05198), and each rank computes the loss from its slice of the logits. With context
parallelism a rank has a slice of every sequence. Ranks exchange heads for sequence before attention and back after it (arXiv 2309.14509),
so the chosen attention function and the separation of packed documents do not change. transformers' modules and parameter names do not
change either; ``spec.tensors`` knows what each rank holds.

Shape suffixes: B sequences, H heads, S positions, s positions of a rank's part, h hidden size, D size of a head; R ranks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llama405b.distributed import ranks
from llama405b.distributed.ranks import Rank
from llama405b.model.head import VocabPart
from llama405b.model.llama import family_of, is_decoder_layer, rotary_embeddings, tie_head
from llama405b.parallel.fsdp import make_device_mesh, shard_model
from llama405b.parallel.fsdp_internals import compute_dtype, differentiable_shard
from llama405b.settings.axes import AXIS_NAMES, Axes
from llama405b.settings.schema import Parallel
from llama405b.spec.tensors import ShardLayout, tp_dimension


class TpGroup(NamedTuple):
    """A tensor-parallel group, by its name: a compiled layer holds numbers and names as constants."""

    size: int
    rank: int  # this rank's number in the group
    group_name: str


def split_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter of a model on the meta device a DTensor over the one-dimensional ``mesh``. Call it before adapters."""
    splits_query_norms = family_of(model.config).query_norms == "all"
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dimension = tp_dimension(f"{module_name}.{name}", splits_query_norms=splits_query_norms)
            placement = Replicate() if dimension is None else Shard(dimension)
            value = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    tie_head(model)


def compute_on_shards(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let modules compute with this rank's shards of their parameters. Call it after ``split_matrices`` and adapters, before FSDP.

    To all that names parameters (FSDP, the optimizer, checkpoints) they stay DTensors. The sequence is gathered before attention, the
    MLP and the head, and scattered after attention and the MLP.
    """
    tp = TpGroup(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)
    for module in list(model.modules()):
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            _use_shards(module, tp)
        if is_decoder_layer(module):
            attention, mlp = module.self_attn, module.mlp
            attention.register_forward_pre_hook(functools.partial(_gather_hidden_states, tp), with_kwargs=True)
            attention.o_proj.register_forward_hook(functools.partial(_scatter_output, tp, attention.o_proj))
            mlp.register_forward_pre_hook(functools.partial(_gather_input, tp))
            # Of the MLP, as a fused one does not call its down projection.
            mlp.register_forward_hook(functools.partial(_scatter_output, tp, mlp.down_proj))
    if model.lm_head is not None:  # with pipeline parallelism only the last stage has it
        model.lm_head.register_forward_pre_hook(functools.partial(_gather_input, tp))
        model.lm_head.vocab_part = VocabPart(tp.rank * _n_local_rows(model.lm_head), mesh.get_group())


def _n_local_rows(module: nn.Module) -> int:
    weight = module._parameters["weight"]
    assert isinstance(weight, DTensor)
    return int(weight.to_local().shape[0])


def _use_shards(module: nn.Module, tp: TpGroup) -> None:
    """Give a module a class that computes with the local shards of its parameters."""
    placements = {name: parameter.placements[-1] for name, parameter in module.named_parameters(recurse=False)}
    bases: tuple[type, ...] = (type(module),)
    if isinstance(module, nn.Embedding):
        module.tp, module.n_rows = tp, _n_local_rows(module)
        if module.padding_idx is not None:
            local_index = module.padding_idx - tp.rank * module.n_rows
            module.padding_idx = local_index if 0 <= local_index < module.n_rows else None
        bases = (_VocabParallelEmbedding, *bases)
    elif placements["weight"].is_shard() and not isinstance(module, nn.Linear):
        module.tp = tp
        bases = (_SplitNorm, *bases)
    # The bias of a matrix that is split by inputs is added once, to the sum over the ranks.
    adds_bias_later = placements["weight"].is_shard(1)
    module.__class__ = _shard_class(bases, tuple(placements), adds_bias_later)


@functools.cache  # all layers share a class, and so a compiled graph
def _shard_class(bases: tuple[type, ...], names: tuple[str, ...], adds_bias_later: bool) -> type:
    properties = {name: property(functools.partial(_local_parameter, name)) for name in names}
    if adds_bias_later and "bias" in names:
        properties |= {"bias": property(_no_bias), "later_bias": properties["bias"]}
    name = bases[-1].__name__  # families and units know modules by the names of their classes
    return type(f"Split{name}" if _SplitNorm in bases else name, bases, properties)


def _local_parameter(name: str, module: nn.Module) -> Tensor | None:
    """Return what a module computes with; of a parameter that FSDP has sharded, too, what FSDP itself asks for by name."""
    parameter = module._parameters[name]
    is_gathered = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
    return differentiable_shard(parameter) if is_gathered else parameter


def _no_bias(module: nn.Module) -> Tensor | None:
    bias = module._parameters["bias"]
    return None if isinstance(bias, DTensor) and bias.device_mesh.ndim == 1 else bias


class _VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows; returns this rank's part of the sequence."""

    tp: TpGroup
    n_rows: int

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Embed the ids that this rank has rows of, and sum over the ranks."""
        rows_BS = ids_BS - self.tp.rank * self.n_rows
        is_other_BS = (rows_BS < 0) | (rows_BS >= self.n_rows)
        embedded_BSh = super().forward(rows_BS.clamp(0, self.n_rows - 1)).masked_fill(is_other_BS[..., None], 0)
        return scatter_sequence(embedded_BSh, self.tp)


class _SplitNorm(nn.Module):
    """An RMSNorm over features of which each rank has some, as OLMo 2 has them for the queries and keys of all heads."""

    tp: TpGroup
    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the mean square over all ranks' features."""
        wide = x.to(torch.float32)  # as transformers does
        sums: Tensor = _SumOverRanks.apply(wide.pow(2).sum(-1, keepdim=True), self.tp)
        wide = wide * torch.rsqrt(sums / (self.tp.size * x.size(-1)) + self.variance_epsilon)
        return (self.weight * wide).to(x.dtype)


def _gather_hidden_states(
    tp: TpGroup, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, keywords | {"hidden_states": gather_sequence(keywords["hidden_states"], tp)}


def _gather_input(tp: TpGroup, _: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    return (gather_sequence(arguments[0], tp),)


def _scatter_output(tp: TpGroup, last: nn.Module, _: nn.Module, __: Any, output_BSh: Tensor) -> Tensor:
    """Scatter what a block's last matrix computes, and add its bias."""
    output_Bsh = scatter_sequence(output_BSh, tp)
    bias = getattr(last, "later_bias", None)
    return output_Bsh if bias is None else output_Bsh + bias


def gather_sequence(x_Bsh: Tensor, tp: TpGroup) -> Tensor:
    """Return whole sequences, (B, S, h), of which each rank has a part. The backward sums gradients over the ranks."""
    result: Tensor = _SequenceExchange.apply(x_Bsh, tp, True)
    return result


def scatter_sequence(x_BSh: Tensor, tp: TpGroup) -> Tensor:
    """Return this rank's part of the sequences' sum over the ranks, (B, s, h)."""
    result: Tensor = _SequenceExchange.apply(x_BSh, tp, False)
    return result


class _SequenceExchange(torch.autograd.Function):
    """All-gather or reduce-scatter along the sequence; the backward of one is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TpGroup, gathers: bool) -> Tensor:
        """See ``gather_sequence`` and ``scatter_sequence``."""
        ctx.tp, ctx.gathers = tp, gathers
        return _all_gather(x, tp) if gathers else _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """See the class."""
        return (_reduce_scatter if ctx.gathers else _all_gather)(gradient, ctx.tp), None, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce, and so is its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TpGroup) -> Tensor:
        """Return the sum over the ranks."""
        ctx.tp = tp
        return C10D.wait_tensor(C10D.all_reduce(x, "sum", tp.group_name))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """See the class."""
        return C10D.wait_tensor(C10D.all_reduce(gradient.contiguous(), "sum", ctx.tp.group_name)), None


C10D = torch.ops._c10d_functional  # what torch.compile makes of collectives


def _all_gather(x_Bsh: Tensor, tp: TpGroup) -> Tensor:
    parts = C10D.wait_tensor(C10D.all_gather_into_tensor(x_Bsh.contiguous(), tp.size, tp.group_name))
    return parts.unflatten(0, (tp.size, -1)).transpose(0, 1).flatten(1, 2)  # a view if there is one sequence


def _reduce_scatter(x_BSh: Tensor, tp: TpGroup) -> Tensor:
    parts = x_BSh.unflatten(1, (tp.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(parts, "sum", tp.size, tp.group_name))


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
        split_matrices(local_model, mesh["tp"])
    if before_sharding:
        before_sharding(local_model)
    if axes.tp > 1:
        compute_on_shards(local_model, mesh["tp"])
    shard_model(local_model, parallel, rank.device, mesh)
    ranks.share_timeout()
    return local_model


def shard_layout_of(model: PreTrainedModel, parallel: Parallel, rank: Rank) -> ShardLayout:
    """Return which slices of a not yet split model each rank holds."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return ShardLayout.from_shapes(shapes, rank.axes, parallel.virtual_stages)
