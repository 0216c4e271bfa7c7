"""Shard a model with FSDP2 (the default) or FSDP1 (the recipe taken literally), and track which unit a step is in.

FSDP2's units: every decoder layer; the embedding, whose backward pass does not need its weight; the head with its norm, which stays
gathered between forward and backward. With tied embeddings, the embedding, norm and head are one unit. With FSDP1, rank 0 holds the full
model in CPU memory, all other ranks build it on the meta device, and FSDP1 synchronizes the module states; it exists for users who want
FSDP1's options. Knows modules and meshes; not the optimizer.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llama405b.distributed.ranks import Rank
from llama405b.model.llama import build_on_meta, llama_name, restore_buffers, strip_wrappers, tie_head
from llama405b.parallel.fsdp_internals import call_before_backward, gathers_and_sizes, shared_post_forward_mesh
from llama405b.settings.axes import SHARD_AXES, Axes
from llama405b.settings.choices import UNIT_CLASSES, Strategy
from llama405b.settings.schema import FP32_MASTERS, Parallel


def shard_dtype(parallel: Parallel) -> torch.dtype:
    """Return the dtype of the shards that FSDP gathers from."""
    return torch.bfloat16 if parallel.is_bf16 or parallel.offload == "optimizer" else torch.float32


def make_device_mesh(axes: Axes, device_type: str) -> DeviceMesh:
    """Make the DeviceMesh of all ranks; ``device_type`` is explicit because torch's default would use any GPU.

    Its axes: ``pp``, ``dp_replicate``, ``shard`` (``dp_shard`` and ``cp`` together), ``tp``. Axes of size 1, except ``shard``, are
    omitted: each would cost every rank a communicator.
    """
    sizes = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "shard": axes.size(SHARD_AXES), "tp": axes.tp}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    return dist.init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh that FSDP uses: the shard axis and, if present, the replicate axis before it."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in ("dp_replicate", "shard"))
    return mesh[names] if names != mesh.mesh_dim_names else mesh


def shard_model(model: nn.Module, parallel: Parallel, device: torch.device, mesh: DeviceMesh | None = None) -> None:
    """Turn every parameter into a DTensor that is sharded over the ranks; the model stays on its (meta) device.

    ``mesh``: of all ranks, see ``make_device_mesh``; None: plain FSDP over all ranks.
    """
    # Units within a layer return views with FP8; nothing changes them in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")
    mesh = data_mesh(mesh or make_device_mesh(Axes(dp_shard=dist.get_world_size()), device.type))
    reshard: bool | int = parallel.reshard_after_forward or not parallel.strategy_spec.keeps_weights_gathered
    offload: OffloadPolicy = OffloadPolicy()
    if parallel.offload == "all":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    precision = MixedPrecisionPolicy()
    if parallel.numerics in FP32_MASTERS:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_unit = functools.partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    tied, embedding = model.config.tie_word_embeddings, model.model.embed_tokens
    with shared_post_forward_mesh() if parallel.reshard_after_forward else contextlib.nullcontext():
        for module in list(model.modules()):
            if llama_name(module, model.config) in UNIT_CLASSES[parallel.fsdp_unit]:
                shard_unit(module, reshard_after_forward=reshard)
    if embedding is not None and not tied and parallel.fsdp_embedding:
        shard_unit(embedding, reshard_after_forward=bool(reshard))
        embedding.set_unshard_in_backward(False)
    if not tied and model.lm_head is not None:  # with pipeline parallelism only the last stage has it
        shard_unit([model.model.norm, model.lm_head], reshard_after_forward=False)
    shard_unit(model, reshard_after_forward=False)
    if parallel.prefetch:
        _set_prefetch(model, parallel.prefetch)


def _set_prefetch(model: nn.Module, n_ahead: int) -> None:
    """Let each unit all-gather its next units in the forward, and its previous units in the backward, before it computes."""
    units = [unit.modules[0] for unit in fsdp_units(model)]
    for index, module in enumerate(units):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + n_ahead])
        module.set_modules_to_backward_prefetch(units[max(0, index - n_ahead) : index][::-1])


class GradientSync:
    """Turns off FSDP2's resharding or reduction after all micro-batches of a step except the last, as the strategy says."""

    def __init__(self, model: nn.Module, strategy: Strategy, n_replicas: int) -> None:
        """``n_replicas``: replicas of the model, over which gradients are summed."""
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.strategy, self.n_replicas = strategy, n_replicas
        self.is_last = True

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Announce a micro-batch before its forward; the argument says whether it is the last of the step."""
        if is_last == self.is_last:
            return
        self.is_last = is_last
        for module in self.modules:
            if self.strategy.keeps_weights_gathered:
                module.set_reshard_after_backward(is_last, recurse=False)
            if not self.strategy.reduces_every_microbatch:
                module.set_requires_gradient_sync(is_last, recurse=False)
            elif (
                self.n_replicas > 1
            ):  # the sums over shards are small; they are summed over replicas in the last micro-batch
                module.set_requires_all_reduce(is_last, recurse=False)


def set_last_backward(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward is the last of a step: only then does FSDP wait for all gradients."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(is_last)


def allocate_grads_on_compute_stream(model: nn.Module) -> None:
    """Allocate reduce-scatter output on the compute stream so that the next forward can reuse its memory.

    This saves memory if a step has one micro-batch; with more, gradients of the first are alive in the forwards of the others.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ReduceScatter())


class ReduceScatter:
    """FSDP2's reduce-scatter with memory of the compute stream.

    FSDP2 allocates gradients on a stream of its own, and freed memory serves only that stream: for 405B on 64 GPUs this reserves 6 GiB
    more. Using the compute stream's memory is safe: FSDP2 has its stream wait for the work that the compute stream was given before, and
    ``record_stream`` keeps the memory of a gradient until it has been made and added.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for use on the current stream: for a unit's full gradients (input) or a rank's shard (output)."""
        reduce_stream, compute_stream = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        with torch.cuda.stream(compute_stream):
            buffer = torch.empty(*size, dtype=dtype, device=device)
        if torch.are_deterministic_algorithms_enabled():
            reduce_stream.wait_stream(compute_stream)  # torch then fills new memory with NaN, on the compute stream
        buffer.record_stream(
            reduce_stream
        )  # delays nothing with one micro-batch: readers of the gradient wait for this stream anyway
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce-scatter as FSDP2's default does."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@dataclasses.dataclass(frozen=True, slots=True)
class FsdpUnit:
    """Parameters that FSDP gathers together."""

    name: str
    modules: tuple[nn.Module, ...]  # FSDP gathers the unit before the forward of each of them
    parameters: tuple[str, ...]  # names in the model
    n_gathers: int  # all-gathers of its shards in one forward and backward
    padded_sizes: tuple[int, ...]  # elements of each parameter in the flat gradient of one rank, with padding


def fsdp_units(model: nn.Module) -> list[FsdpUnit]:
    """Return FSDP's units in the order in which a forward gathers them; the root comes first if it has parameters."""
    fsdp_modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    names_by_state: dict[int, list[str]] = {}
    for name, _ in model.named_parameters():
        owner = max((prefix for prefix in fsdp_modules if not prefix or name.startswith(f"{prefix}.")), key=len)
        names_by_state.setdefault(id(fully_shard.state(fsdp_modules[owner])), []).append(name)
    modules: dict[int, dict[str, nn.Module]] = {}
    for name, module in fsdp_modules.items():
        modules.setdefault(id(fully_shard.state(module)), {})[name] = module
    return [
        FsdpUnit(
            next(iter(unit_modules)),
            tuple(unit_modules.values()),
            tuple(names_by_state[state]),
            *gathers_and_sizes(next(iter(unit_modules.values()))),
        )
        for state, unit_modules in modules.items()
        if state in names_by_state
    ]


def unit_name(name: str) -> str:
    """Return the name of the unit of a parameter, from the parameter's name in the checkpoint."""
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name.rpartition(".")[0]


def load_fsdp1(
    directory: Path | None, config: PreTrainedConfig, attention: str, parallel: Parallel, rank: Rank
) -> nn.Module:
    """Load the weights on rank 0 (``directory`` None: random), wrap, synchronize; return the FSDP1 module."""
    model = _build_unwrapped(directory, config, attention, shard_dtype(parallel), rank)
    tied = config.tie_word_embeddings  # two modules share this weight, so it must stay in the root unit
    wraps_embedding = parallel.fsdp_embedding and not tied
    classes = {
        type(module)
        for module in model.modules()
        if llama_name(module, config) in UNIT_CLASSES[parallel.fsdp_unit]
        or (wraps_embedding and isinstance(module, nn.Embedding))
    }

    def materialize(module: nn.Module) -> None:
        module.to_empty(device=rank.device, recurse=False)
        tie_head(model)  # to_empty unties it

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        sync_module_states=True,
        param_init_fn=None if rank.is_rank0 else materialize,
        device_id=rank.device,
        sharding_strategy=ShardingStrategy[parallel.sharding_strategy],
        mixed_precision=precision if parallel.numerics == "fp32-master" else None,
        cpu_offload=CPUOffload(offload_params=parallel.offload == "all"),
        backward_prefetch=BackwardPrefetch.__members__.get(parallel.backward_prefetch),
        forward_prefetch=parallel.forward_prefetch,
        limit_all_gathers=parallel.limit_all_gathers,
        use_orig_params=True,
    )
    restore_buffers(wrapped, config, rank.device)
    return wrapped


def _build_unwrapped(
    directory: Path | None, config: PreTrainedConfig, attention: str, dtype: torch.dtype, rank: Rank
) -> PreTrainedModel:
    """Build the model, with weights on rank 0 only; rotary frequencies are FP32 on all ranks, so that they can be broadcast."""
    if not rank.is_rank0:
        meta = build_on_meta(config, attention, dtype)
        restore_buffers(meta, config, torch.device("meta"))
        return meta
    config.use_cache = False
    if directory:
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=attention
        )
    else:
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    restore_buffers(model, config, torch.device("cpu"))
    return model.train()


MarkerFactory = Callable[
    [str, str], Callable[[], None]
]  # (unit name, "forward" or "backward") -> a function that shows it


class UnitTracker:
    """Shows each unit when its forward or backward begins; recomputation counts as backward."""

    def __init__(self, make_marker: MarkerFactory) -> None:
        self.make_marker = make_marker
        self.in_backward = False

    def attach(self, model: nn.Module) -> None:
        """Track a model that FSDP has sharded; with FSDP1, or a torch without the needed internals, track only the forward."""
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule | FullyShardedDataParallel):
                continue
            path = strip_wrappers(f"{name}.").removeprefix("model.")
            short = path.rstrip(".") or "the model"
            mark_forward, mark_backward = self.make_marker(short, "forward"), self.make_marker(short, "backward")
            module.register_forward_pre_hook(
                functools.partial(self._forward, mark_forward, mark_backward, module is model), prepend=True
            )
            if isinstance(module, FSDPModule):
                call_before_backward(module, functools.partial(self._backward, mark_backward))

    def _forward(
        self, mark_forward: Callable[[], None], mark_backward: Callable[[], None], is_root: bool, *_: object
    ) -> None:
        self.in_backward = self.in_backward and not is_root
        (mark_backward if self.in_backward else mark_forward)()

    def _backward(self, mark: Callable[[], None]) -> None:
        self.in_backward = True
        mark()
