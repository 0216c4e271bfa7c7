"""Report what a configuration needs on N ranks.

Shards the full model on the meta device, with a fake process group.

Allocates no weights and uses no network. Knows shapes and dtypes; nothing about time or activation memory.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from llama405b.contract.errors import pluralize
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.parallel import fsdp
from llama405b.parallel.split import split_model
from llama405b.predict import estimate, run_shape
from llama405b.predict.search import can_predict, resolve_auto
from llama405b.settings.axes import DP_AXES, Axes, MicrobatchSplit
from llama405b.settings.config import PRESET_DIR, with_global_batch
from llama405b.settings.schema import COMPUTE_BYTES, Config
from llama405b.spec import models
from llama405b.spec.adapters import adapter_label, bytes_per_parameter
from llama405b.spec.rules import check_mesh
from llama405b.spec.tensors import read_hf_json

GIB = 1 << 30


def describe_shape(config: Config, preset: str, world_size: int) -> str:
    """Return lines of text on units, parameters and bytes per rank, and the estimated needs on GPUs.

    Raises:
        UserError: Neither the model's directory nor the preset gives its shape, or the batch does not divide evenly.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # slow to import

    hf_config = _read_shape(config, preset)
    ranks_per_host = min(world_size, run_shape.RANKS_PER_HOST)
    shape = models.parse_llama(hf_config.to_dict() | {"architectures": None}, "the model's configuration")
    config = resolve_auto(config, shape, world_size, ranks_per_host)
    axes = Axes.from_parallel(config.parallel, world_size, ranks_per_host)
    check_mesh(axes, config.parallel, shape, config.data.seq_len, ranks_per_host)
    config = with_global_batch(config, axes)
    grad_accum_steps = MicrobatchSplit.from_training(config.training, axes.size(DP_AXES)).grad_accum_steps
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        full = llama.build_on_meta(hf_config, "sdpa", fsdp.shard_dtype(config.parallel))
        sizes = {
            name: sum(p.numel() for p in parameters.values()) for name, parameters in fsdp.parameters_by_unit(full)
        }
        local = split_model(full, config.parallel, Rank(0, world_size, 0, "", torch.device("cpu"), mesh=axes))
        n_local = sum(p.data.to_local().numel() for p in local.parameters())
    finally:
        dist.destroy_process_group()
    layers = [size for name, size in sizes.items() if name.startswith("model.layers.")]
    other_units = [f"{name} {size:,}" for name, size in sizes.items() if not name.startswith("model.layers.")]
    largest = max(sizes, key=lambda name: sizes[name])
    state_bytes = bytes_per_parameter(shape, config)
    adapter = f", frozen, with {adapter_label(config.adapter)}" if config.adapter.is_enabled else ""
    numerics, places = config.parallel.numerics, ("device memory", "CPU memory")
    state = " and ".join(
        f"{n_local * n_bytes / GIB:,.1f} GiB of {place}"
        for n_bytes, place in zip(state_bytes, places, strict=True)
        if n_bytes
    )
    gathered = sizes[largest] / axes.tp * COMPUTE_BYTES[numerics] / GIB
    gpu_lines = []
    if config.parallel.device != "cpu" and can_predict(config):
        gpu_lines = estimate.describe_estimate(run_shape.PredictedRun.from_config(shape, config, world_size, axes=axes))
    return "\n".join(
        [
            f"model        {preset or config.model.path}: {sum(sizes.values()):,} parameters{adapter}",
            f"units        {len(layers)} decoder layers of {layers[0]:,}; {', '.join(other_units)}",
            f"ranks        {world_size} ({axes}): {n_local:,} parameters on rank 0{' (the most of any rank)' * (axes.pp == 1)}",
            f"state        {numerics}: {sum(state_bytes):.3g} bytes per parameter, {state} per rank",
            f"gathered     at most {gathered:,.2f} GiB at a time ({largest}); twice that while the next unit is prefetched",
            f"step         {pluralize(config.training.global_batch_size, 'sequence')} of {config.data.seq_len} tokens: "
            f"{pluralize(grad_accum_steps, 'micro-batch', 'micro-batches')} of {config.training.micro_batch_size} on each rank",
            *gpu_lines,
        ]
    )


def _read_shape(config: Config, preset: str) -> PreTrainedConfig:
    """Return the configuration from the model's directory if it exists, else the preset's."""
    directory = Path(config.model.path)
    architectures = json.loads((PRESET_DIR / "architectures.json").read_text())
    record = read_hf_json(directory / "config.json") if directory.is_dir() else architectures.get(preset)
    if record is None:
        models.read_llama(directory)  # raises, and names what is missing
    models.check_seq_len(models.parse_llama(record, str(directory)), config.data.seq_len)
    return llama.set_layers(llama.config_from_dict(record), config.model.layers or record["num_hidden_layers"])
