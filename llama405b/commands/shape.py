"""What a configuration takes on N ranks: the true model, sharded on the meta device with a fake process group.

Allocates no weights and talks to nobody. Knows shapes and dtypes; nothing of time or of activations' memory.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from llama405b.axes import Axes
from llama405b.contract import config as configuration
from llama405b.contract import weights
from llama405b.contract.schema import BYTES_PER_PARAMETER, Config
from llama405b.model import llama
from llama405b.parallel import fsdp2
from llama405b.parallel.mesh import device_mesh

GIB = 1 << 30


def report(config: Config, preset: str, world: int) -> str:
    """Lines that say units, parameters and bytes per rank.

    Raises:
        UserError: Neither the model's directory nor the preset tells its shape, or the batch does not divide.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # heavy, and only needed here

    hf_config = _shape(config, preset)
    accumulate = configuration.check_world(config, world)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        module = llama.build_on_meta(hf_config, "sdpa", fsdp2.kept_dtype(config.parallel.numerics))
        mesh = device_mesh(Axes(dp_shard=world), "cpu")
        fsdp2.shard(module, config.parallel, torch.device("cpu"), mesh)
        units = [(name, list(parameters.values())) for name, parameters in fsdp2.units(module)]
    finally:
        dist.destroy_process_group()
    total = sum(p.numel() for _, parameters in units for p in parameters)
    mine = sum(p.data.to_local().numel() for _, parameters in units for p in parameters)
    each = BYTES_PER_PARAMETER[config.parallel.numerics]
    largest = max(units, key=lambda unit: sum(p.numel() for p in unit[1]))
    layers = [unit for unit in units if unit[0].startswith("model.layers.")]
    compute_bytes = 4 if config.parallel.numerics == "fp32" else 2
    where = "CPU memory" if config.parallel.cpu_offload else "device memory"
    return "\n".join(
        [
            f"model        {preset or config.model.path}: {total:,} parameters",
            f"units        {len(layers)} decoder layers of {sum(p.numel() for p in layers[0][1]):,}; "
            + ", ".join(f"{name} {sum(p.numel() for p in ps):,}" for name, ps in units if (name, ps) not in layers),
            f"ranks        {world}: {mine:,} parameters on rank 0, the fullest",
            f"state        {config.parallel.numerics}: {each} bytes per parameter, {mine * each / GIB:,.1f} GiB of {where} per rank",
            f"gathered     at most {sum(p.numel() for p in largest[1]) * compute_bytes / GIB:,.2f} GiB at a time ({largest[0]}), "
            "twice that while the next unit is prefetched",
            f"step         {config.training.global_batch_size} sequences of {config.data.seq_len} tokens: "
            f"{accumulate} micro-batches of {config.training.micro_batch_size} on each rank",
        ]
    )


def _shape(config: Config, preset: str) -> LlamaConfig:
    """The model's directory where it is here, else the shape that the preset is known to have."""
    directory = Path(config.model.path)
    known = json.loads((configuration.PRESET_DIR / "architectures.json").read_text())
    record = weights.read_hf_json(directory / "config.json") if directory.is_dir() else known.get(preset)
    if record is None:
        weights.read_llama(directory)  # raises, and says what is missing
    weights.check_seq_len(weights.parse_llama(record, str(directory)), config.data.seq_len)
    layers = config.model.layers
    return LlamaConfig(**record | ({"num_hidden_layers": layers} if layers else {}))
