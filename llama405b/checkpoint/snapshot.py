"""What a checkpoint holds: the model, the optimizer (in the dtype kept, FP32 or BF16), and every rank's random state.

Of a model with adapters it holds these alone: the weights are where they were loaded from.

The step number determines the schedule and the position in the data. Knows DCP's state dicts; not directories or manifests.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from llama405b.checkpoint.unpickling import TensorPlanner, TensorReader
from llama405b.contract.adapters import is_factor
from llama405b.contract.checkpoints import step_of
from llama405b.distributed.ranks import Rank
from llama405b.optim.updater import Updater


def state_to_save(updater: Updater, me: Rank) -> dict[str, Any]:
    """Return this rank's part of what DCP saves: the very tensors, of which updates may be pending."""
    model_state, optimizer_state = _state_of(updater)
    return {"model": model_state, "optimizer": optimizer_state, "rng": {str(me.rank): _rng_state(me)}}


def restore(path: Path, model: nn.Module, updater: Updater, me: Rank, files: TensorReader | None = None) -> int:
    """Load a checkpoint into the shards; returns its step. ``files``: what reads it; None: what verifies nothing.

    Only tensors are read: the optimizer's settings are those of now.

    Raises:
        dcp.api.CheckpointException: On every rank, if ``files`` raised on any.
    """
    master, optimizer = updater.master, updater.optimizer
    updater.wait()
    for module in model.modules():
        if isinstance(module, FSDPModule):  # some stay gathered after a forward without a backward
            module.reshard()
    model_state, optimizer_state = _state_of(updater)
    state: dict[str, Any] = {"model": model_state, "optimizer": {"state": optimizer_state["state"]}}
    files = files or TensorReader(path)
    if f"rng.{me.rank}.cpu" in files.read_metadata().state_dict_metadata:
        state["rng"] = {str(me.rank): _rng_state(me)}
    dcp.load(state, storage_reader=files, planner=TensorPlanner())
    if isinstance(model, FullyShardedDataParallel):  # it saves copies; all others were filled in place
        set_state_dict(master, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    updater.sync_weights()
    rng = state.get("rng", {}).get(str(me.rank), {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return step_of(path)


def restore_weights(
    path: Path, model: nn.Module, updater: Updater, _me: Rank, files: TensorReader | None = None
) -> int:
    """Load the weights alone, without making moments; all else: see ``restore``."""
    master = updater.master
    state: dict[str, Any] = {"model": _kept(get_model_state_dict(master))}
    dcp.load(state, storage_reader=files or TensorReader(path), planner=TensorPlanner())
    if isinstance(model, FullyShardedDataParallel):
        set_model_state_dict(master, state["model"])
    updater.sync_weights()
    return step_of(path)


def _state_of(updater: Updater) -> tuple[dict[str, Any], Any]:
    """Return the tensors of model and optimizer; moments before the first update are zero.

    torch makes those by a step with gradients of zero, which counts: the first update would be corrected as if it were the second.
    """
    master, optimizer = updater.master, updater.optimizer
    if not optimizer.state:
        optimizer.zero_grad()  # where there are gradients torch makes no moments
        get_state_dict(master, optimizer)
        for state in optimizer.state.values():
            state["step"].zero_()
    weights, moments = get_state_dict(master, optimizer)
    return _kept(weights), moments


def _kept(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the adapters, or without any all weights."""
    return {name: weight for name, weight in weights.items() if is_factor(name)} or weights


def _rng_state(me: Rank) -> dict[str, torch.Tensor]:
    """The state of this rank's random generators."""
    state = {"cpu": torch.get_rng_state()}
    if me.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state()
    return state
