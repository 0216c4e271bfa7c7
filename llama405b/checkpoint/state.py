"""What a checkpoint holds of this rank, and how it comes back: weights, optimizer, random generators."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from llama405b.contract.checkpoints import step_of
from llama405b.ranks import Ranks


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, me: Ranks) -> int:
    """Load a verified checkpoint into the shards; returns its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    reader = dcp.FileSystemReader(path)
    if f"rng.{me.rank}.cpu" in reader.read_metadata().state_dict_metadata:
        state["rng"] = {str(me.rank): rng_state(me)}
    dcp.load(state, storage_reader=reader)
    asked = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for group, settings in zip(optimizer.param_groups, asked, strict=True):  # what is configured now counts
        group.update(settings)
    rng = state.get("rng", {}).get(str(me.rank), {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return step_of(path)


def rng_state(me: Ranks) -> dict[str, torch.Tensor]:
    """The random generators of this rank."""
    state = {"cpu": torch.get_rng_state()}
    if me.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state()
    return state
