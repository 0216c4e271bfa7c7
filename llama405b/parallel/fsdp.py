"""FSDP2, the engine, and FSDP1, the recipe in its literal form; and how far a step has got through their units.

FSDP2's units: every decoder layer; the embedding, whose backward pass does not need its weight; the head with its norm, kept gathered
between forward and backward. With tied embeddings the embedding, norm and head are one unit. With FSDP1 rank 0 holds the whole model in
CPU memory, all other ranks build it on meta, and the module states are synchronized: for users who want its options. Knows modules and
meshes; not the optimizer.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from llama405b.contract.errors import UserError
from llama405b.distributed.ranks import Rank
from llama405b.model.llama import build_on_meta, llama_name, restore_buffers, tie_head, unwrapped
from llama405b.settings.axes import SHARD, Axes
from llama405b.settings.schema import FP32_MASTERS, Parallel
from llama405b.settings.strategies import Strategy


def shard_dtype(parallel: Parallel) -> torch.dtype:
    """Return the dtype of the shards that FSDP gathers from."""
    return torch.bfloat16 if parallel.in_bf16 or parallel.offload == "optimizer" else torch.float32


def check_wrap(model: nn.Module, wrap: tuple[str, ...]) -> None:
    """Refuse class names in ``wrap``, which are a Llama's, that the model does not have; lists those that it has."""
    present = {llama_name(module, model.config) for module in model.modules()}
    for name in wrap:
        if name not in present:
            raise UserError(f"--parallel.wrap: the model has no {name!r}; choose from {', '.join(sorted(present))}")


def check_units(model: nn.Module, wrap: tuple[str, ...]) -> None:
    """Refuse units in ``wrap`` that share parameters: one within another, or within that of the head and its norm."""
    units = [module for module in model.modules() if llama_name(module, model.config) in wrap]
    for unit in units:
        if unit in (model.model.norm, model.lm_head):
            raise UserError(
                f"--parallel.wrap: {type(unit).__name__!r} is in the unit of the head and its norm; leave it out"
            )
        for inner in unit.modules():
            if inner is not unit and llama_name(inner, model.config) in wrap:
                names = f"{type(inner).__name__!r} is within {type(unit).__name__!r}"
                raise UserError(f"--parallel.wrap: {names}, and FSDP2 takes one of them; leave out the other")


def device_mesh(axes: Axes, device_type: str) -> DeviceMesh:
    """Make the mesh of all ranks, as DTensors have it; ``device_type``: torch's default would use any GPU.

    Its axes: ``pp``, ``dp_replicate``, ``shard`` (``dp_shard`` and ``cp`` together), ``tp``. Those of one rank, but for ``shard``, are
    left out: each would cost every rank a communicator.
    """
    sizes = {"pp": axes.pp, "dp_replicate": axes.dp_replicate, "shard": axes.size(SHARD), "tp": axes.tp}
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
    return dist.init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh that FSDP shards over, and before it that over which it keeps copies, if there are some."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in ("dp_replicate", "shard"))
    return mesh[names] if names != mesh.mesh_dim_names else mesh


def shard(model: nn.Module, parallel: Parallel, device: torch.device, mesh: DeviceMesh | None = None) -> None:
    """Turn every parameter into a DTensor, sharded over the ranks; the model stays on its (meta) device.

    ``mesh``: of all ranks, see ``device_mesh``; None: each rank is a shard.

    Raises:
        UserError: ``parallel.wrap`` names units that share parameters.
    """
    check_units(model, parallel.wrap)
    mesh = data_mesh(mesh or device_mesh(Axes(dp_shard=dist.get_world_size()), device.type))
    reshards: bool | int = parallel.reshard_after_forward or not parallel.of_strategy.keeps_weights
    offload: OffloadPolicy = OffloadPolicy()
    if parallel.offload == "all":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    precision = MixedPrecisionPolicy()
    if parallel.numerics in FP32_MASTERS:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    unit = functools.partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    tied, embedding = model.config.tie_word_embeddings, model.model.embed_tokens
    with _one_smaller_mesh() if parallel.reshard_after_forward else contextlib.nullcontext():
        for module in list(model.modules()):
            if llama_name(module, model.config) in parallel.wrap and module is not embedding:
                unit(module, reshard_after_forward=reshards)
    if embedding is not None and not tied and "Embedding" in parallel.wrap:
        unit(embedding, reshard_after_forward=bool(reshards))
        embedding.set_unshard_in_backward(False)
    if not tied and model.lm_head is not None:  # with pipeline stages, the last one's
        unit([model.model.norm, model.lm_head], reshard_after_forward=False)
    unit(model, reshard_after_forward=False)
    if parallel.prefetch:
        _prefetch(model, parallel.prefetch)


@contextlib.contextmanager
def _one_smaller_mesh() -> Iterator[None]:
    """Have all units that are resharded to fewer ranks share one mesh: torch makes one, with its communicators, for each."""
    make, made = _fully_shard._get_post_forward_mesh_info, list[FSDPMeshInfo | None]()

    def once(reshard_after_forward: bool | int, of: FSDPMeshInfo) -> FSDPMeshInfo | None:
        if not made:
            made.append(make(reshard_after_forward, of))
        return made[0]

    _fully_shard._get_post_forward_mesh_info = once
    try:
        yield
    finally:
        _fully_shard._get_post_forward_mesh_info = make


def _prefetch(model: nn.Module, ahead: int) -> None:
    """Have each unit gather so many others before it computes: in the forward those that follow, in the backward those before."""
    units = [unit.modules[0] for unit in fsdp_units(model)]
    for place, module in enumerate(units):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
        module.set_modules_to_backward_prefetch(units[max(0, place - ahead) : place][::-1])


class GradientSync:
    """What FSDP2 leaves out after each micro-batch of a step but the last one, as the strategy says."""

    def __init__(self, model: nn.Module, strategy: Strategy, copies: int) -> None:
        """``copies``: of the model, whose gradients are added up."""
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.strategy, self.copies = strategy, copies
        self.last = True

    def expect(self, *, last: bool) -> None:
        """Tell, before a forward, whether its micro-batch is the last of the step."""
        if last == self.last:
            return
        self.last = last
        for module in self.modules:
            if self.strategy.keeps_weights:
                module.set_reshard_after_backward(last, recurse=False)
            if not self.strategy.reduces_each:
                module.set_requires_gradient_sync(last, recurse=False)
            elif self.copies > 1:  # the sums over shards are small, and are added up over copies at the end
                module.set_requires_all_reduce(last, recurse=False)


def set_last_backward(model: nn.Module, last: bool) -> None:
    """Tell a sharded model whether a backward is the last of a step: only then does FSDP wait for all gradients."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)


def lend_gradients(model: nn.Module) -> None:
    """Have a sharded model on GPUs make its gradients in memory that the next forward can use, once they are freed.

    It saves memory where a step has one micro-batch; with more, gradients of the first are there in the forwards of the others.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ReduceScatter())


class ReduceScatter:
    """FSDP2's reduce-scatter, on memory of the stream that computes.

    FSDP2 makes gradients on a stream of its own, and once they are freed their memory serves only that stream: for 405B on 64 GPUs
    6 GiB more are reserved. What is done here is in order: FSDP2 has its stream wait for what was given to the other one before, and
    ``record_stream`` keeps a gradient's memory until it was made and added.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the stream that this is called on: for a unit's whole gradients, or a rank's own."""
        used_on, made_on = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        with torch.cuda.stream(made_on):
            made = torch.empty(*size, dtype=dtype, device=device)
        if torch.are_deterministic_algorithms_enabled():
            used_on.wait_stream(made_on)  # torch then fills new memory with NaN
        made.record_stream(used_on)  # with one micro-batch, what reads it waits for it anyway
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce, as FSDP2's own does."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@dataclasses.dataclass(frozen=True, slots=True)
class FsdpUnit:
    """What FSDP gathers in one piece."""

    name: str
    modules: tuple[nn.Module, ...]  # each gathers it before its forward
    parameters: tuple[str, ...]  # names in the model
    gathers: int  # of its shards, for each forward and backward
    padded_sizes: tuple[int, ...]  # elements of each parameter in the flat gradient of a rank's shards


def fsdp_units(model: nn.Module) -> list[FsdpUnit]:
    """Return FSDP's own units in the order in which a forward gathers them; the root comes first, if it has parameters."""
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    owned: dict[int, list[str]] = {}
    for name, _ in model.named_parameters():
        owner = max((prefix for prefix in wrapped if not prefix or name.startswith(f"{prefix}.")), key=len)
        owned.setdefault(id(fully_shard.state(wrapped[owner])), []).append(name)
    modules: dict[int, dict[str, nn.Module]] = {}
    for name, module in wrapped.items():
        modules.setdefault(id(fully_shard.state(module)), {})[name] = module
    return [
        FsdpUnit(next(iter(found)), tuple(found.values()), tuple(owned[state]), *_of_group(next(iter(found.values()))))
        for state, found in modules.items()
        if state in owned
    ]


def _of_group(module: nn.Module) -> tuple[int, tuple[int, ...]]:
    """How often a unit's shards are gathered for each forward and backward, and the sizes of its parameters in a flat gradient."""
    group = fully_shard.state(module)._fsdp_param_group
    gathers = 1 + (group.post_forward_mesh_info is group.mesh_info and group.unshard_in_backward)
    return gathers, tuple(parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params)


def take_forward(model: nn.Module) -> list[Any]:
    """Have FSDP forget in which order the last forward went through its units; returns that.

    A backward gathers ahead along it, the other way round. So where no backward follows, it would gather a unit for nobody, and
    where other forwards come between, their units: ``give_forward`` gives it back then.
    """
    order: list[Any] = []  # of FSDP's own groups of parameters
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := fully_shard.state(module)._fsdp_param_group):
            order = order or list(group.comm_ctx.post_forward_order)
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()
    return order


def give_forward(model: nn.Module, order: Sequence[Any]) -> None:
    """Have FSDP take this as the order of the last forward, whose backward follows."""
    take_forward(model)
    for group in order:
        group._record_post_forward()


def units(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Yield parameters by unit, ``(unit, {name in the checkpoint: parameter})``, in the order of use."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        name = unwrapped(name)
        found.setdefault(unit_of(name), {})[name] = parameter
    yield from found.items()


def unit_of(name: str) -> str:
    """Return the unit of a parameter, by its name in the checkpoint."""
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name.rpartition(".")[0]


def load_wrapped(
    directory: Path | None, config: PreTrainedConfig, attention: str, parallel: Parallel, me: Rank
) -> nn.Module:
    """Load on rank 0 (None: random weights), wrap, synchronize; returns the FSDP module with its weights.

    Raises:
        UserError: ``parallel.wrap`` names a class that the model does not have.
    """
    model = _unwrapped(directory, config, attention, shard_dtype(parallel), me)
    check_wrap(model, parallel.wrap)
    tied = config.tie_word_embeddings  # a weight that two modules share must stay in one unit: the root
    classes = {
        type(m)
        for m in model.modules()
        if llama_name(m, config) in parallel.wrap and not (tied and type(m) is nn.Embedding)
    }

    def materialise(module: nn.Module) -> None:
        module.to_empty(device=me.device, recurse=False)
        tie_head(model)  # to_empty unties it

    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        sync_module_states=True,
        param_init_fn=None if me.is_rank0 else materialise,
        device_id=me.device,
        sharding_strategy=ShardingStrategy[parallel.sharding_strategy],
        mixed_precision=mixed if parallel.numerics == "fp32-master" else None,
        cpu_offload=CPUOffload(offload_params=parallel.offload == "all"),
        backward_prefetch=BackwardPrefetch.__members__.get(parallel.backward_prefetch),
        forward_prefetch=parallel.forward_prefetch,
        limit_all_gathers=parallel.limit_all_gathers,
        use_orig_params=True,
    )
    restore_buffers(wrapped, config, me.device)
    return wrapped


def _unwrapped(
    directory: Path | None, config: PreTrainedConfig, attention: str, dtype: torch.dtype, me: Rank
) -> PreTrainedModel:
    """Build the model, on rank 0 with its weights; the rotary frequencies are FP32 on all ranks, or they could not be sent."""
    if not me.is_rank0:
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


Show = Callable[[str, str], Callable[[], None]]  # a unit's name and way -> what shows it


class UnitTracker:
    """Shows each unit as its forward begins, and as its backward does; what is recomputed belongs to the backward."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.in_backward = False

    def attach(self, model: nn.Module) -> None:
        """Track a model that FSDP has sharded; of FSDP1, and where torch has changed, the forward alone."""
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule | FullyShardedDataParallel):
                continue
            path = unwrapped(f"{name}.").removeprefix("model.")
            short = path.rstrip(".") or "the model"
            forward, backward = self.show(short, "forward"), self.show(short, "backward")
            module.register_forward_pre_hook(
                functools.partial(self._forward, forward, backward, module is model), prepend=True
            )
            state = fully_shard.state(module) if isinstance(module, FSDPModule) else None
            group = getattr(state, "_fsdp_param_group", None)
            if group and not isinstance(group.pre_backward, functools.partial):  # one of several modules with one group
                group.pre_backward = functools.partial(self._backward, backward, group.pre_backward)

    def _forward(self, forward: Callable[[], None], backward: Callable[[], None], is_root: bool, *_: object) -> None:
        self.in_backward = self.in_backward and not is_root
        (backward if self.in_backward else forward)()

    def _backward(self, show: Callable[[], None], part: Callable[..., None], *args: object) -> None:
        self.in_backward = True
        show()
        part(*args)
