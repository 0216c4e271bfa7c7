"""What is used of FSDP2 beyond torch's public interface: a new version of torch is checked here.

Raises of all functions but the last: AttributeError, if this version of torch lacks what they use.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def param_group(module: nn.Module) -> Any | None:
    """Return FSDP's parameter group of a unit's module; None if it has no parameters of its own."""
    assert isinstance(module, FSDPModule)
    return fully_shard.state(module)._fsdp_param_group


def param_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's parameter groups, that of a unit with several modules for each of them."""
    groups = (param_group(module) for module in model.modules() if isinstance(module, FSDPModule))
    yield from filter(None, groups)


@contextlib.contextmanager
def shared_post_forward_mesh() -> Iterator[None]:
    """Let all units that are resharded to fewer ranks share one mesh: torch would make a mesh and communicators for each."""
    make_mesh_info, mesh_infos = _fully_shard._get_post_forward_mesh_info, list[FSDPMeshInfo | None]()

    def make_once(reshard_after_forward: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
        if not mesh_infos:
            mesh_infos.append(make_mesh_info(reshard_after_forward, mesh_info))
        return mesh_infos[0]

    _fully_shard._get_post_forward_mesh_info = make_once
    try:
        yield
    finally:
        _fully_shard._get_post_forward_mesh_info = make_mesh_info


def gathers_and_sizes(module: nn.Module) -> tuple[int, tuple[int, ...]]:
    """Return the number of all-gathers of a unit in one forward and backward, and its parameters' sizes in the flat gradient."""
    group = param_group(module)
    assert group
    n_gathers = 1 + (group.post_forward_mesh_info is group.mesh_info and group.unshard_in_backward)
    return n_gathers, tuple(parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params)


def pop_prefetch_order(model: nn.Module) -> list[Any]:
    """Clear and return FSDP's post-forward order.

    A backward prefetches along this order in reverse. If no backward follows a forward, or other forwards run in between, a backward
    would prefetch the wrong units; ``restore_prefetch_order`` sets the order again before the backward that it belongs to.
    """
    order: list[Any] = []  # FSDP's parameter groups
    for group in param_groups(model):
        order = order or list(group.comm_ctx.post_forward_order)
        group.comm_ctx.post_forward_order.clear()
        group._post_forward_indices.clear()
    return order


def restore_prefetch_order(model: nn.Module, order: Sequence[Any]) -> None:
    """Set FSDP's post-forward order to that of the forward whose backward follows."""
    pop_prefetch_order(model)
    for group in order:
        group._record_post_forward()


def forward_prefetched(module: nn.Module) -> Sequence[object]:
    """Return the states (``fully_shard.state``) of the units that a unit gathers ahead in the forward."""
    return fully_shard.state(module)._states_to_forward_prefetch


def compute_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which FSDP lets a module compute."""
    assert isinstance(module, FSDPModule)
    return fully_shard.state(module)._mp_policy.param_dtype or next(module.parameters()).dtype


def differentiable_shard(parameter: DTensor) -> Tensor:
    """Return the local shard of a gathered parameter of a one-dimensional mesh, as ``DTensor.to_local`` does, at a third of its cost.

    If all ranks have all of the parameter, its gradient is a sum over them, which FSDP computes.
    """
    is_replicated = parameter.placements[0].is_replicate()
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=[Partial()] if is_replicated else None)
    shard: Tensor = _DifferentiableShard.apply(parameter, is_replicated)
    return shard


class _DifferentiableShard(torch.autograd.Function):
    """See ``differentiable_shard``."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, is_replicated: bool) -> Tensor:
        """Return the local tensor."""
        spec = parameter._spec
        ctx.spec = DTensorSpec(spec.mesh, (Partial(),), spec.tensor_meta) if is_replicated else copy.copy(spec)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        """Return the gradient as a DTensor."""
        return DTensor(gradient, ctx.spec, requires_grad=False), None


def wrap_backward(
    model: nn.Module, wrap: Callable[[Callable[..., None]], Callable[..., None]], before_end: Callable[[], None]
) -> None:
    """Wrap what FSDP does before and after each unit's backward, and call a function before it ends the whole backward.

    Its methods are replaced on the instances, as FSDP looks them up at each call. Tensor hooks would not do: recomputation runs forward
    hooks of a unit within its backward, and the gradient of the embedding, whose input has no gradient, is reduced in a callback at the
    end of the backward.
    """
    states = (fully_shard.state(module) for module in model.modules() if isinstance(module, FSDPModule))
    for state in {id(state): state for state in states}.values():
        if group := state._fsdp_param_group:
            group.pre_backward, group.post_backward = wrap(group.pre_backward), wrap(group.post_backward)
        end = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = functools.partial(_call_both, before_end, end)


def call_before_backward(module: nn.Module, function: Callable[[], None]) -> None:
    """Call a function before a unit's backward; never, where this version of torch lacks what it takes."""
    group = getattr(fully_shard.state(module), "_fsdp_param_group", None)
    # Modules of one unit share a group: its method is wrapped once.
    if group and not isinstance(group.pre_backward, functools.partial):
        group.pre_backward = functools.partial(_call_both, function, group.pre_backward)


def _call_both(first: Callable[[], None], second: Callable[..., None], *args: object) -> None:
    first()
    second(*args)
