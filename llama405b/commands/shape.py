"""What a configuration needs on N ranks: the full model, sharded on the meta device with a fake process group.

Allocates no weights and uses no network. Knows shapes and dtypes; nothing about time or activation memory.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from llama405b.capacity import estimate, run_shape
from llama405b.contract import config as configuration
from llama405b.contract import weights
from llama405b.contract.mesh import Axes
from llama405b.contract.phrases import counted
from llama405b.contract.schema import COMPUTE_BYTES, Config
from llama405b.contract.tensors import read_hf_json
from llama405b.model import llama
from llama405b.parallel import fsdp2

GIB = 1 << 30


def describe_shape(config: Config, preset: str, world: int) -> str:
    """Describe units, parameters and bytes per rank, and estimate what a run takes on GPUs, as lines of text.

    Raises:
        UserError: Neither the model's directory nor the preset gives its shape, or the batch does not divide evenly.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # heavy, and only needed here

    hf_config = _shape(config, preset)
    axes = Axes.of(config.parallel, world, min(world, run_shape.RANKS_PER_HOST))
    config = configuration.on_ranks(config, axes)
    rounds = configuration.check_ranks(config, axes).rounds
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        module = llama.build_on_meta(hf_config, "sdpa", fsdp2.shard_dtype(config.parallel))
        mesh = fsdp2.device_mesh(axes, "cpu")
        fsdp2.shard(module, config.parallel, torch.device("cpu"), mesh)
        sizes = {name: sum(p.numel() for p in parameters.values()) for name, parameters in fsdp2.units(module)}
        mine = sum(p.data.to_local().numel() for p in module.parameters())
    finally:
        dist.destroy_process_group()
    layers = [size for name, size in sizes.items() if name.startswith("model.layers.")]
    others = [f"{name} {size:,}" for name, size in sizes.items() if not name.startswith("model.layers.")]
    largest = max(sizes, key=lambda name: sizes[name])
    numerics, places = config.parallel.numerics, ("device memory", "CPU memory")
    state = " and ".join(
        f"{mine * each / GIB:,.1f} GiB of {place}"
        for each, place in zip(config.parallel.state_bytes, places, strict=True)
        if each
    )
    gathered = sizes[largest] * COMPUTE_BYTES[numerics] / GIB
    return "\n".join(
        [
            f"model        {preset or config.model.path}: {sum(sizes.values()):,} parameters",
            f"units        {len(layers)} decoder layers of {layers[0]:,}; {', '.join(others)}",
            f"ranks        {world}: {mine:,} parameters on rank 0, which holds the most",
            f"state        {numerics}: {sum(config.parallel.state_bytes)} bytes per parameter, {state} per rank",
            f"gathered     at most {gathered:,.2f} GiB at a time ({largest}), twice that while the next unit is prefetched",
            f"step         {counted(config.training.global_batch_size, 'sequence')} of {config.data.seq_len} tokens: "
            f"{counted(rounds, 'micro-batch', 'micro-batches')} of {config.training.micro_batch_size} on each rank",
            *_estimate(config, hf_config, world),
        ]
    )


def _estimate(config: Config, hf_config: LlamaConfig, world: int) -> list[str]:
    """What it takes on GPUs; nothing if it is for the CPU, or recomputes nothing."""
    if config.parallel.device == "cpu" or not config.model.activation_checkpointing:
        return []
    known = weights.parse_llama(hf_config.to_dict() | {"architectures": None}, "the model's configuration")
    return estimate.describe_needs(run_shape.RunShape.of(known, config, world))


def _shape(config: Config, preset: str) -> LlamaConfig:
    """The shape from the model's directory if it exists, else the preset's known shape."""
    directory = Path(config.model.path)
    known = json.loads((configuration.PRESET_DIR / "architectures.json").read_text())
    record = read_hf_json(directory / "config.json") if directory.is_dir() else known.get(preset)
    if record is None:
        weights.read_llama(directory)  # raises; its message says what is missing
    weights.check_seq_len(weights.parse_llama(record, str(directory)), config.data.seq_len)
    return LlamaConfig(**record | {"num_hidden_layers": config.model.layers or record["num_hidden_layers"]})
