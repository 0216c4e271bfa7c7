"""The state of a run as tensors by name: weights, moments, random generators. Knows model and optimizer; not files.

Names: ``model.NAME`` for weights (with adapters, only these), ``optimizer.state.NAME.KIND`` for moments and step counts, ``rng.RANK.KIND``.
"""

import contextlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from llama405b.checkpoint.index import DTYPE_NAMES, Held, Holdings
from llama405b.contract.checkpoints import WEIGHTS_PREFIX
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater
from llama405b.spec.adapters import is_lora_name
from llama405b.spec.tensors import TensorSlice, full_slice

Tensors = dict[str, Tensor]
Parts = list[tuple[TensorSlice, Tensor]]  # what a rank has of a tensor: which box of it, and its elements
PartTensors = dict[tuple[str, TensorSlice], Tensor]  # the same of all tensors, by name and box


def state_to_save(updater: Updater, rank: Rank) -> Tensors:
    """Return this rank's part of the state: the live tensors, whose updates may be pending."""
    return _named(*_model_and_optimizer_state(updater)) | rng_state(rank)


@contextlib.contextmanager
def state_to_load(
    model: nn.Module, updater: Updater, rank: Rank, names: Container[str], *, weights_only: bool
) -> Iterator[Tensors]:
    """Yield the tensors to fill from a checkpoint, and bring what is in them into effect.

    The optimizer keeps its current settings. ``names``: what the checkpoint holds: it may lack this rank's random generators.
    ``weights_only``: creates no optimizer state.
    """
    master, optimizer = updater.master, updater.optimizer
    updater.wait()
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a unit stays gathered after a forward without a backward
            module.reshard()
    rng, moments = Tensors(), dict[str, Any](state={})
    if weights_only:
        weights = _adapters_or_all(get_model_state_dict(master))
    else:
        weights, moments = _model_and_optimizer_state(updater)
        rng = {name: state for name, state in rng_state(rank).items() if name in names}
    yield _named(weights, moments) | rng
    if isinstance(model, FullyShardedDataParallel):  # FSDP1 returned copies; others were filled in place
        if weights_only:
            set_model_state_dict(master, weights)
        else:
            set_state_dict(master, optimizer, model_state_dict=weights, optim_state_dict=moments)
    updater.sync_weights()
    for name, state in rng.items():
        torch.cuda.set_rng_state(state) if name.endswith(".cuda") else torch.set_rng_state(state)


def _named(weights: Mapping[str, Any], moments: Mapping[str, Any]) -> Tensors:
    return {f"{WEIGHTS_PREFIX}{name}": weight for name, weight in weights.items()} | {
        f"optimizer.state.{name}.{kind}": tensor
        for name, kinds in moments["state"].items()
        for kind, tensor in kinds.items()
    }


def _model_and_optimizer_state(updater: Updater) -> tuple[dict[str, Any], Any]:
    """Return the tensors of model and optimizer; before the first update, the moments are zero.

    torch creates the moments by a step with zero gradients and counts it. Its step counts are reset here, or Adam's bias correction would
    treat the first update as the second.
    """
    master, optimizer = updater.master, updater.optimizer
    if not optimizer.state:
        optimizer.zero_grad()  # torch creates no moments while there are gradients
        get_state_dict(master, optimizer)
        for state in optimizer.state.values():
            state["step"].zero_()
    weights, moments = get_state_dict(master, optimizer)
    return _adapters_or_all(weights), moments


def _adapters_or_all(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the adapters; all weights if there are none."""
    return {name: weight for name, weight in weights.items() if is_lora_name(name)} or weights


def rng_state(rank: Rank) -> Tensors:
    """Return the state of this rank's random generators."""
    state = {f"rng.{rank.index}.cpu": torch.get_rng_state()}
    if rank.on_gpu:
        state[f"rng.{rank.index}.cuda"] = torch.cuda.get_rng_state()
    return state


def local_parts(tensor: Tensor) -> Parts:
    """Return what this rank has of a tensor: 30 microseconds of Python for each, so once for a run."""
    if isinstance(tensor, DTensor):
        [place] = tensor.__create_chunk_list__()
        return [(_box(place.offsets, place.sizes), tensor.to_local())]
    if isinstance(tensor, ShardedTensor):
        return [
            (_box(shard.metadata.shard_offsets, shard.metadata.shard_sizes), shard.tensor)
            for shard in tensor.local_shards()
        ]
    return [(full_slice(tensor.shape), tensor)]


def find_parts(tensors: Tensors) -> tuple[Holdings, PartTensors]:
    """Return which parts of which tensors this rank has, and its elements of each."""
    parts = {name: local_parts(tensor) for name, tensor in tensors.items()}
    held = {
        name: Held(DTYPE_NAMES[tensor.dtype], tuple(tensor.size()), tuple(box for box, _ in parts[name]))
        for name, tensor in tensors.items()
    }
    return Holdings.of(held), {(name, box): part.detach() for name in parts for box, part in parts[name]}


def _box(offsets: "torch.Size | list[int]", sizes: "torch.Size | list[int]") -> TensorSlice:
    return tuple((begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
