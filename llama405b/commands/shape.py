"""Report what a configuration needs on N ranks.

Shards the full model on the meta device, with a fake process group.

Allocates no weights and uses no network. Knows shapes and dtypes; nothing about time or activation memory.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from llama405b.contract.errors import counted
from llama405b.distributed.ranks import Rank
from llama405b.model import llama
from llama405b.parallel import fsdp
from llama405b.parallel.split import split
from llama405b.predict import estimate, run_shape
from llama405b.predict.search import chosen, is_predicted
from llama405b.settings.axes import DP, Axes, Dealing
from llama405b.settings.config import PRESET_DIR, on_ranks
from llama405b.settings.schema import COMPUTE_BYTES, Config
from llama405b.spec import models
from llama405b.spec.models import adapter_bytes, describe
from llama405b.spec.rules import check_mesh
from llama405b.spec.tensors import read_hf_json

GIB = 1 << 30


def describe_shape(config: Config, preset: str, world: int) -> str:
    """Return lines of text on units, parameters and bytes per rank, and the estimated needs on GPUs.

    Raises:
        UserError: Neither the model's directory nor the preset gives its shape, or the batch does not divide evenly.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # slow to import

    hf_config = _shape(config, preset)
    per_host = min(world, run_shape.RANKS_PER_HOST)
    known = models.parse_llama(hf_config.to_dict() | {"architectures": None}, "the model's configuration")
    config = chosen(config, known, world, per_host)
    axes = Axes.of(config.parallel, world, per_host)
    check_mesh(axes, config.parallel, known, config.data.seq_len, per_host)
    config = on_ranks(config, axes)
    rounds = Dealing.of(config.training, axes.size(DP)).rounds
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        whole = llama.build_on_meta(hf_config, "sdpa", fsdp.shard_dtype(config.parallel))
        sizes = {name: sum(p.numel() for p in parameters.values()) for name, parameters in fsdp.units(whole)}
        own = split(whole, config.parallel, Rank(0, world, 0, "", torch.device("cpu"), mesh=axes))
        mine = sum(p.data.to_local().numel() for p in own.parameters())
    finally:
        dist.destroy_process_group()
    layers = [size for name, size in sizes.items() if name.startswith("model.layers.")]
    others = [f"{name} {size:,}" for name, size in sizes.items() if not name.startswith("model.layers.")]
    largest = max(sizes, key=lambda name: sizes[name])
    held = adapter_bytes(known, config.adapter, config.parallel)
    adapter = f", frozen, with {describe(config.adapter)}" if config.adapter.trains else ""
    numerics, places = config.parallel.numerics, ("device memory", "CPU memory")
    state = " and ".join(
        f"{mine * each / GIB:,.1f} GiB of {place}" for each, place in zip(held, places, strict=True) if each
    )
    gathered = sizes[largest] / axes.tp * COMPUTE_BYTES[numerics] / GIB
    on_gpu = []
    if config.parallel.device != "cpu" and is_predicted(config):
        on_gpu = estimate.describe_needs(run_shape.RunShape.of(known, config, world, axes))
    return "\n".join(
        [
            f"model        {preset or config.model.path}: {sum(sizes.values()):,} parameters{adapter}",
            f"units        {len(layers)} decoder layers of {layers[0]:,}; {', '.join(others)}",
            f"ranks        {world} ({axes}): {mine:,} parameters on rank 0{' (the most of any rank)' * (axes.pp == 1)}",
            f"state        {numerics}: {sum(held):.3g} bytes per parameter, {state} per rank",
            f"gathered     at most {gathered:,.2f} GiB at a time ({largest}); twice that while the next unit is prefetched",
            f"step         {counted(config.training.global_batch_size, 'sequence')} of {config.data.seq_len} tokens: "
            f"{counted(rounds, 'micro-batch', 'micro-batches')} of {config.training.micro_batch_size} on each rank",
            *on_gpu,
        ]
    )


def _shape(config: Config, preset: str) -> PreTrainedConfig:
    """Return the configuration from the model's directory if it exists, else the preset's."""
    directory = Path(config.model.path)
    known = json.loads((PRESET_DIR / "architectures.json").read_text())
    record = read_hf_json(directory / "config.json") if directory.is_dir() else known.get(preset)
    if record is None:
        models.read_llama(directory)  # raises, and names what is missing
    models.check_seq_len(models.parse_llama(record, str(directory)), config.data.seq_len)
    return llama.with_layers(llama.config_of(record), config.model.layers or record["num_hidden_layers"])
